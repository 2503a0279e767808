"""How far confidences are from the share of rows that are right."""

import numpy as np

from dist_ens.metrics.ranking import cumulative, paired, ranked
from dist_ens.metrics.resampling import over_draws

# A probability may be above 1 by so much: rounding.
_ROUNDING = 1e-3


def expected_calibration_error(
    confidence: np.ndarray,
    correct: np.ndarray,
    weights: np.ndarray | None = None,
    num_bins: int = 15,
) -> float | np.ndarray:
    """Computes the mean gap between accuracy and confidence, in bins of equal width (ECE).

        ece = sum_b weight_b / total * |accuracy_b - confidence_b|

    The bins are (0, 1/15], (1/15, 2/15], …, the first with 0 in it: those of `classwise_sums`,
    also in that edges are compared in float32.

    Args:
        confidence: Probability of the predicted class, in [0, 1]; float[rows].
        correct: Whether it is the label: 0, 1, or the `credit` of a tie in between; float[rows].
        weights: How often each row is drawn; float[draws, rows]. None: once.
        num_bins: At least 1.

    Returns:
        In [0, 1]: a float, or float64[draws] with weights.

    Raises:
        ValueError: If the arrays do not fit each other, hold no row or a NaN, if a confidence is
            not in [0, 1], or if there is no bin.

    >>> expected_calibration_error(np.array([0.75, 0.5]), np.array([1, 0]))  # (1/4 + 1/2) / 2
    0.375

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599.
    """
    confidence, correct = _checked(confidence, correct, num_bins)
    bins = _bins(confidence, num_bins)
    order = np.argsort(bins, kind="stable")
    starts = np.unique(bins[order], return_index=True)[1]
    gap = (correct - confidence)[order]

    def score(block: np.ndarray) -> np.ndarray:
        # Not a matrix product, whose threads wait for each other where others compute too.
        gaps = np.add.reduceat(np.take(block, order, axis=1) * gap, starts, axis=1)
        return np.abs(gaps).sum(axis=1) / block.sum(axis=1)

    return over_draws(score, (weights, len(confidence)))


def adaptive_calibration_error(
    confidence: np.ndarray,
    correct: np.ndarray,
    weights: np.ndarray | None = None,
    num_bins: int = 15,
) -> float | np.ndarray:
    """Computes the adaptive ECE: the gap of accuracy and confidence, in bins of equally many rows.

        aece = 1 / bins * sum_b |accuracy_b - confidence_b|

    The rows, in order of confidence, are cut into bins of exactly the same weight. A row that a cut
    meets belongs to both bins in part. Rows of one confidence have no order: each bin that they
    reach into holds the same part of every one of them, which is what it holds of them on average
    over their orders.

    Args:
        confidence: Probability of the predicted class, in [0, 1]; float[rows].
        correct: Whether it is the label: 0, 1, or the `credit` of a tie in between; float[rows].
        weights: How often each row is drawn; float[draws, rows]. None: once.
        num_bins: At least 1. They may be more than the rows.

    Returns:
        In [0, 1]: a float, or float64[draws] with weights.

    Raises:
        ValueError: If the arrays do not fit each other, hold no row or a NaN, if a confidence is
            not in [0, 1], or if there is no bin.

    >>> confidence, correct = np.array([0.75, 0.5, 0.5]), np.array([1, 1, 0])
    >>> adaptive_calibration_error(confidence, correct, num_bins=3)  # (1/4 + 0 + 0) / 3
    0.08333333333333333

    Source: Nguyen and O'Connor (2015), https://arxiv.org/abs/1508.05154.
    """
    confidence, correct = _checked(confidence, correct, num_bins)
    order, ends = ranked(confidence)
    gap = (correct - confidence)[order]
    shares = np.linspace(0, 1, num_bins + 1)

    def score(block: np.ndarray) -> np.ndarray:
        block = np.take(block, order, axis=1)
        mass, gaps = cumulative(block, ends), cumulative(block * gap, ends)
        cuts = mass[:, -1:] * shares
        at_cuts = [np.interp(*draw) for draw in zip(cuts, mass, gaps, strict=True)]
        return np.abs(np.diff(at_cuts, axis=1)).sum(axis=1) / mass[:, -1]

    return over_draws(score, (weights, len(confidence)))


def classwise_calibration_error(
    count: np.ndarray, hits: np.ndarray, confidence: np.ndarray
) -> float | np.ndarray:
    """Computes the mean over classes of the gap between a class's frequency and its probability.

        mean_c sum_b count_cb / total_c * |hits_cb / count_cb - confidence_cb / count_cb|

    Args:
        count: Rows whose probability of the class falls in the bin; float[..., classes, bins].
        hits: How many of these are of the class; likewise.
        confidence: Sum of their probabilities of the class; likewise.

    Returns:
        In [0, 1]: a float, or float64[...] if there are axes before the classes.

    Raises:
        ValueError: If the shapes differ, or a class has counted no row.

    >>> count, hits = np.array([[1, 1], [1, 1]]), np.array([[0, 1], [0, 1]])
    >>> classwise_calibration_error(count, hits, np.array([[0.25, 0.75], [0.25, 0.75]]))
    0.25

    Source: Kull et al. (2019), https://arxiv.org/abs/1910.12656.
    """
    count, hits, confidence = (np.asarray(sums, np.float64) for sums in (count, hits, confidence))
    if count.ndim < 2 or not count.shape == hits.shape == confidence.shape:
        raise ValueError(
            "The sums are float[..., classes, bins], all of one shape. Received: "
            f"{count.shape}, {hits.shape} and {confidence.shape}. Add them up in the same bins."
        )
    total = count.sum(axis=-1)
    if not total.all():
        raise ValueError(
            "Every class needs the probabilities of at least one row. Received: none in "
            f"{np.sum(total == 0)} of {total.size}. Add some."
        )
    error = (np.abs(hits - confidence).sum(axis=-1) / total).mean(axis=-1)
    return float(error) if error.ndim == 0 else error


def drawn_classwise_errors(sums: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """Draws `classwise_calibration_error` in resamples of the examples, from sums alone.

    In a resample a cell's hits less its confidence are taken as normal, which a sum of many
    examples is, of the mean and the variance that a resample's sum has (of examples of many
    positions a little more). Cells are taken as independent but for those of two classes, which
    mirror each other; of ten overconfident classes the errors are then a seventh less spread than
    resamples of the examples would have them.

    Args:
        sums: float[4, classes, bins]: count, hits and confidence as `classwise_calibration_error`
            takes them, and the sum over the examples of the square of what each adds to hits less
            confidence.
        num_draws: Of resamples.
        seed: Of the draws.

    Returns:
        float64[num_draws], in [0, 1].
    """
    random = np.random.default_rng(seed)
    count, hits, confidence, squares = np.asarray(sums, np.float64)
    if len(count) == 2:
        count, hits, confidence, squares = (each[:1] for each in (count, hits, confidence, squares))
    num_rows = count.sum(axis=-1, keepdims=True)
    gaps = hits - confidence
    mean = gaps / num_rows
    deviation = np.sqrt(np.maximum(squares - np.square(gaps) / num_rows, 0)) / num_rows
    drawn = [
        np.abs(mean + deviation * random.standard_normal(mean.shape)).sum(axis=-1).mean()
        for _ in range(num_draws)
    ]
    return np.minimum(drawn, 1)


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int = 15
) -> dict[str, np.ndarray]:
    """Computes a reliability diagram: accuracy against confidence, by bin of confidence.

    Args:
        confidence: Probability of the predicted class, in [0, 1]; float[rows].
        correct: Whether it is the label: 0, 1, or the `credit` of a tie in between; float[rows].
        num_bins: Of equal width, as in `expected_calibration_error`; at least 1.

    Returns:
        Means `confidence` and `accuracy` in [0, 1], NaN in a bin without rows, and `count`, the
        number of its rows; float64[bins] each.

    Raises:
        ValueError: If the arrays do not fit each other, hold no row or a NaN, if a confidence is
            not in [0, 1], or if there is no bin.

    >>> bins = reliability_bins(np.array([0.75, 1.0]), np.array([1, 0]), num_bins=2)
    >>> bins["confidence"].tolist(), bins["accuracy"].tolist(), bins["count"].tolist()
    ([nan, 0.875], [nan, 0.5], [0.0, 2.0])

    Source: DeGroot and Fienberg (1983), "The comparison and evaluation of forecasters".
    """
    confidence, correct = _checked(confidence, correct, num_bins)
    bins = _bins(confidence, num_bins)
    count, total, right = (
        np.bincount(bins, values, minlength=num_bins)
        for values in (np.ones(len(bins)), confidence, correct)
    )
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN of an empty bin
        return {"confidence": total / count, "accuracy": right / count, "count": count}


def _checked(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and whether they are right, float64[rows] each."""
    if num_bins < 1:
        raise ValueError(f"There is at least one bin. Received: num_bins={num_bins}. Try 15.")
    confidence, correct = paired(confidence, correct)
    outside = (confidence < 0) | (confidence > 1 + _ROUNDING)
    if outside.any():
        raise ValueError(
            f"Confidences are probabilities, in [0, 1]. Received: {outside.sum()} of "
            f"{len(confidence)} outside, such as {confidence[outside][0]}. Take the softmax of the "
            "logits, or the exponential of the log-probabilities."
        )
    return confidence, correct


def _bins(confidence: np.ndarray, num_bins: int) -> np.ndarray:
    """Returns the bin of each confidence; int[rows] in [0, num_bins)."""
    # In float32, where 0.6 * 15 is 9 and so on the edge, whichever precision it came in.
    edges = np.ceil(confidence.astype(np.float32) * np.float32(num_bins)).astype(np.intp)
    return np.clip(edges - 1, 0, num_bins - 1)
