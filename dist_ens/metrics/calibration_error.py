"""Calibration errors: the gaps between confidence and accuracy.

`confidence` is the probability of the predicted class, in [0, 1]; float[rows]. `correct` is the
`credit` of the predicted class: 1 if it is the label, 0 if not, a value between for ties;
float[rows]. `weights` are the number of times that each row is drawn in each resample,
float[draws, rows]; by default every row counts once. An error is in [0, 1]: a float, or
float64[draws] with weights.
"""

import numpy as np

from dist_ens.metrics.ranking import over_ranking
from dist_ens.metrics.resampling import BLOCK_SIZE, over_draws

NUM_BINS = 15


def expected_calibration_error(
    confidence: np.ndarray,
    correct: np.ndarray,
    weights: np.ndarray | None = None,
    num_bins: int = NUM_BINS,
) -> float | np.ndarray:
    """Computes the expected calibration error (ECE), with bins of equal width.

        ece = sum_b weight_b / total * |accuracy_b - confidence_b|

    The bins are [0, 1/15], (1/15, 2/15], …, as in `classwise_sums`.

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599.
    """
    confidence = np.asarray(confidence, np.float64)
    bins = _bins(confidence, num_bins)
    order = np.argsort(bins, kind="stable")
    starts = np.unique(bins[order], return_index=True)[1]
    gap = (correct - confidence)[order]

    def score(block: np.ndarray) -> np.ndarray:
        # The threads of a matrix product would wait for each other on a busy machine.
        gaps = np.add.reduceat(np.take(block, order, axis=1) * gap, starts, axis=1)
        return np.abs(gaps).sum(axis=1) / block.sum(axis=1)

    return over_draws(score, (weights, len(confidence)))


def adaptive_calibration_error(
    confidence: np.ndarray,
    correct: np.ndarray,
    weights: np.ndarray | None = None,
    num_bins: int = NUM_BINS,
) -> float | np.ndarray:
    """Computes the adaptive calibration error, with bins of equal weight.

        aece = 1 / bins * sum_b |accuracy_b - confidence_b|

    A row at the edge of two bins belongs to both in part. Rows with equal confidences are divided
    among their bins in equal parts, which is the expectation over their random order.

    Source: Nguyen and O'Connor (2015), https://arxiv.org/abs/1508.05154.
    """
    confidence = np.asarray(confidence, np.float64)
    shares = np.linspace(0, 1, num_bins + 1)

    def score(mass: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        cuts = mass[:, -1:] * shares
        at_cuts = [np.interp(*draw) for draw in zip(cuts, mass, gaps, strict=True)]
        return np.abs(np.diff(at_cuts, axis=1)).sum(axis=1) / mass[:, -1]

    return over_ranking(score, confidence, correct - confidence, weights)


def classwise_calibration_error(
    count: np.ndarray, hits: np.ndarray, confidence: np.ndarray
) -> float | np.ndarray:
    """Computes the mean over classes of the ECE of a class from sums, [..., classes, bins].

        mean_c sum_b count_cb / total_c * |hits_cb / count_cb - confidence_cb / count_cb|

    Source: Kull et al. (2019), https://arxiv.org/abs/1910.12656.
    """
    count, hits, confidence = (np.asarray(sums, np.float64) for sums in (count, hits, confidence))
    total = count.sum(axis=-1)
    error = (np.abs(hits - confidence).sum(axis=-1) / total).mean(axis=-1)
    return float(error) if error.ndim == 0 else error


def drawn_classwise_errors(sums: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """Draws `classwise_calibration_error` in approximate resamples, from sums alone.

    A cell is one bin of one class. In a resample, hits minus confidence of a cell is drawn from a
    normal distribution with the mean and variance of that sum in a bootstrap resample. Cells are
    drawn independently, except those of two classes, which mirror each other. With ten
    overconfident classes, the spread of the errors is about a seventh smaller than in resamples of
    the examples. `sums` are those of `classwise_sums`.
    """
    random = np.random.default_rng(seed)
    count, hits, confidence, squares = np.asarray(sums, np.float64)
    if len(count) == 2:
        count, hits, confidence, squares = (each[:1] for each in (count, hits, confidence, squares))
    num_rows = count.sum(axis=-1, keepdims=True)
    gaps = hits - confidence
    mean = gaps / num_rows
    deviation = np.sqrt(np.maximum(squares - np.square(gaps) / num_rows, 0)) / num_rows
    # A few draws at a time are fast, and take little memory if there are many classes.
    length = max(1, BLOCK_SIZE // mean.size)
    drawn = [
        np.abs(
            mean + deviation * random.standard_normal((min(length, num_draws - start), *mean.shape))
        )
        .sum(axis=-1)
        .mean(axis=-1)
        for start in range(0, num_draws, length)
    ]
    return np.minimum(np.concatenate(drawn), 1)


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_BINS
) -> dict[str, np.ndarray]:
    """Computes accuracy and mean confidence in the bins of `expected_calibration_error`.

    Both means are NaN in a bin without rows.

    Source: DeGroot and Fienberg (1983), "The comparison and evaluation of forecasters".
    """
    confidence = np.asarray(confidence, np.float64)
    bins = _bins(confidence, num_bins)
    count, total, right = (
        np.bincount(bins, values, minlength=num_bins)
        for values in (np.ones(len(bins)), confidence, correct)
    )
    with np.errstate(invalid="ignore"):  # 0 / 0 gives the NaN of an empty bin.
        return {"confidence": total / count, "accuracy": right / count, "count": count}


def _bins(confidence: np.ndarray, num_bins: int) -> np.ndarray:
    """Returns the bin of each confidence; int[rows] in [0, num_bins)."""
    # In float32, 0.6 * 15 is exactly 9, which lies on the edge, for inputs of any precision.
    edges = np.ceil(confidence.astype(np.float32) * np.float32(num_bins)).astype(np.intp)
    return np.clip(edges - 1, 0, num_bins - 1)
