"""How well a score puts rows in order: the errors last, or what is out of distribution first."""

import functools

import numpy as np

from dist_ens.metrics.resampling import over_draws

# The share of the out-of-distribution rows that `fpr95` has detected.
_DETECTED = 0.95


def area_under_risk_coverage(
    confidence: np.ndarray, errors: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """Computes the mean risk over all coverages (AURC), of the k most confident rows for every k.

        aurc = 1/n sum_{k=1..n} 1/k sum_{j=1..k} e_j,  rows from the most confident to the least

    Rows of one confidence have the mean of their errors each: the expectation over their orders.
    A row of weight w is w rows. A group of m such rows, of mean error e, that follows C rows of
    total error E adds, with the harmonic numbers H,

        sum_{j=1..m} (E + j e) / (C + j) = m e + (E - C e) (H(C + m) - H(C))

    Args:
        confidence: Higher is more confident, infinite too; float[rows].
        errors: 0 or 1, or any loss; float[rows], finite.
        weights: How often each row is drawn, whole numbers; float[draws, rows]. None: once.

    Returns:
        In the unit of the errors: a float, or float64[draws] with weights.

    Raises:
        ValueError: If the arrays do not fit each other, hold no row or a NaN, if an error is
            infinite, or if a weight is no count.

    >>> area_under_risk_coverage(np.array([0.9, 0.8]), np.array([0, 1]))  # (0 + 1/2) / 2
    0.25

    Source: Geifman et al. (2019), https://arxiv.org/abs/1805.08206.
    """
    confidence, errors = paired(confidence, errors)
    order, ends = ranked(confidence)
    errors = errors[order]

    def score(block: np.ndarray) -> np.ndarray:
        block = np.take(block, order, axis=1)
        covered, lost = cumulative(block, ends), cumulative(block * errors, ends)
        places = covered.astype(np.intp)
        if (places != covered).any():
            raise ValueError(
                "The risk of the k most confident rows needs whole weights, for k is whole. "
                "Received: some with a fraction. Make them with bootstrap_weights."
            )
        mass, error = np.diff(covered, axis=1), np.diff(lost, axis=1)
        mean = error / np.maximum(mass, 1)  # a group that is not drawn has no mass, and no error
        harmonic = np.take(_harmonic_numbers(int(places.max())), places)
        excess = (lost[:, :-1] - covered[:, :-1] * mean) * np.diff(harmonic, axis=1)
        return (lost[:, -1] + excess.sum(axis=1)) / covered[:, -1]

    return over_draws(score, (weights, len(confidence)))


def risk_at_coverage(
    confidence: np.ndarray,
    errors: np.ndarray,
    coverage: float,
    weights: np.ndarray | None = None,
) -> float | np.ndarray:
    """Computes the mean error of the most confident share of the rows.

    Where the share ends within a row, or within rows of one confidence, they count in part.

    Args:
        confidence: Higher is more confident, infinite too; float[rows].
        errors: 0 or 1, or any loss; float[rows], finite.
        coverage: The share, in (0, 1].
        weights: How often each row is drawn; float[draws, rows]. None: once.

    Returns:
        In the unit of the errors: a float, or float64[draws] with weights.

    Raises:
        ValueError: If `coverage` is not in (0, 1], or the arrays do not fit each other, hold no
            row or a NaN, or if an error is infinite.

    >>> risk_at_coverage(np.array([0.9, 0.8]), np.array([0, 1]), coverage=0.75)  # (0 + 1/2) / 1.5
    0.3333333333333333

    Source: Geifman and El-Yaniv (2017), https://arxiv.org/abs/1705.08500.
    """
    if not 0 < coverage <= 1:
        raise ValueError(
            f"Coverage is a share of the rows, in (0, 1]. Received: {coverage}. Try 0.9."
        )
    confidence, errors = paired(confidence, errors)
    order, ends = ranked(confidence)
    errors = errors[order]

    def score(block: np.ndarray) -> np.ndarray:
        block = np.take(block, order, axis=1)
        covered, lost = cumulative(block, ends), cumulative(block * errors, ends)
        share = coverage * covered[:, -1]
        within = [np.interp(*draw) for draw in zip(share, covered, lost, strict=True)]
        return np.array(within) / share

    return over_draws(score, (weights, len(confidence)))


def risk_coverage_curve(
    confidence: np.ndarray, errors: np.ndarray, num_points: int = 101
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean error of the most confident share of the rows, for shares from 0 to 1.

    At 0 it is the limit: the mean error of the rows of the highest confidence.

    Args:
        confidence: Higher is more confident, infinite too; float[rows].
        errors: 0 or 1, or any loss; float[rows], finite.
        num_points: Of the curve, at equal distances; at least 2.

    Returns:
        Coverage, and risk in the unit of the errors; float64[points] each.

    Raises:
        ValueError: If there are fewer than two points, the arrays do not fit each other, hold no
            row or a NaN, or if an error is infinite.

    >>> coverage, risk = risk_coverage_curve(np.array([0.9, 0.8]), np.array([0, 1]), num_points=3)
    >>> risk.tolist()
    [0.0, 0.0, 0.5]

    Source: Geifman and El-Yaniv (2017), https://arxiv.org/abs/1705.08500.
    """
    if num_points < 2:
        raise ValueError(f"A curve needs two points. Received: num_points={num_points}. Try 101.")
    confidence, errors = paired(confidence, errors)
    order, ends = ranked(confidence)
    lost = cumulative(errors[order][None], ends)[0]
    coverage = np.linspace(0, 1, num_points)
    share = coverage[1:] * len(confidence)
    return coverage, np.append(lost[1] / ends[1], np.interp(share, ends, lost) / share)


def detection_scores(
    scores_in: np.ndarray,
    scores_out: np.ndarray,
    weights_in: np.ndarray | None = None,
    weights_out: np.ndarray | None = None,
) -> dict[str, float | np.ndarray]:
    """Scores the detection of rows out of distribution, the positives, by a higher score.

        auroc = P(out > in) + P(out = in) / 2
        aupr  = sum_t (recall_t - recall_t') precision_t,  over thresholds t, t' the next higher
        fpr95 = P(in >= t) for the largest t with P(out >= t) >= 0.95

    Args:
        scores_in: Of rows in distribution; float[rows_in], infinite too.
        scores_out: Of rows out of distribution; float[rows_out], likewise.
        weights_in: How often each row is drawn; float[draws, rows_in]. None: once.
        weights_out: Likewise, float[draws, rows_out]; given exactly if `weights_in` is.

    Returns:
        `auroc`, `aupr` and `fpr95`, each in [0, 1]: a float, or float64[draws] with weights. The
        `aupr` of a score that tells nothing is rows_out / (rows_in + rows_out).

    Raises:
        ValueError: If a score is NaN, one of the two holds no row, or weights do not fit.

    >>> detection_scores(np.array([0.0, 2.0]), np.array([1.0, 3.0]))
    {'auroc': 0.75, 'aupr': 0.8333333333333333, 'fpr95': 0.5}

    Source: Hendrycks and Gimpel (2017), https://arxiv.org/abs/1610.02136, for the first two; Liang
    et al. (2018), https://arxiv.org/abs/1706.02690, for the third.
    """
    scores_in, scores_out = _rows(scores_in), _rows(scores_out)
    order, ends = ranked(np.concatenate([scores_in, scores_out]))
    is_out = order >= len(scores_in)

    def score(block_in: np.ndarray, block_out: np.ndarray) -> np.ndarray:
        block = np.take(np.concatenate([block_in, block_out], axis=1), order, axis=1)
        covered, detected = cumulative(block, ends), cumulative(block * is_out, ends)
        alarms = covered - detected
        num_out, num_in = detected[:, -1], alarms[:, -1]
        higher = (detected[:, :-1] + detected[:, 1:]) / 2  # half of those that are tied
        auroc = (np.diff(alarms, axis=1) * higher).sum(axis=1) / (num_in * num_out)
        # Above the highest row that is drawn: nothing of nothing, which adds nothing.
        precision = detected / np.maximum(covered, np.finfo(np.float64).tiny)
        aupr = (np.diff(detected, axis=1) * precision[:, 1:]).sum(axis=1) / num_out
        # The first place, for thresholds fall; counts decide it exactly.
        enough = (detected >= _DETECTED * num_out[:, None]).argmax(axis=1)
        fpr95 = alarms[np.arange(len(alarms)), enough] / num_in
        return np.stack([auroc, aupr, fpr95], axis=1)

    values = over_draws(score, (weights_in, len(scores_in)), (weights_out, len(scores_out)))
    names = ("auroc", "aupr", "fpr95")
    return dict(zip(names, values.tolist() if weights_in is None else values.T, strict=True))


def ranked(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows from the highest score to the lowest, and where groups of equal scores end.

    Args:
        scores: float64[rows], without NaN.

    Returns:
        The rows in order, int[rows], and how many there are up to the end of each group, after a
        zero; int[groups + 1].

    >>> order, ends = ranked(np.array([1.0, 3.0, 1.0]))
    >>> order.tolist(), ends.tolist()
    ([1, 0, 2], [0, 1, 3])
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    is_end = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    return order, np.flatnonzero(is_end)


def cumulative(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Sums of the values up to the end of each group.

    Args:
        values: float64[draws, rows].
        ends: Of `ranked`; int[groups + 1].

    Returns:
        float64[draws, groups + 1], the first of them zero.

    >>> cumulative(np.array([[1.0, 2.0, 3.0]]), np.array([0, 1, 3]))
    array([[0., 1., 6.]])
    """
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums if len(ends) == sums.shape[1] else np.take(sums, ends, axis=1)


def paired(confidence: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and what goes with them, checked; float64[rows] each.

    Raises:
        ValueError: If they are not as many, none, or a confidence is NaN or a value not finite.
    """
    confidence, values = _rows(confidence), np.asarray(values, np.float64)
    if values.shape != confidence.shape:
        raise ValueError(
            "Every confidence goes with one outcome. Received: shapes "
            f"{confidence.shape} and {values.shape}. Give both of the same rows."
        )
    if not np.isfinite(values).all():
        raise ValueError(
            "Outcomes must be finite, for their mean is scored. Received: "
            f"{np.sum(~np.isfinite(values))} of {len(values)} infinite or NaN. Clip the loss, or "
            "leave these rows out."
        )
    return confidence, values


@functools.lru_cache(maxsize=1)  # all draws of a bootstrap have as many rows
def _harmonic_numbers(last: int) -> np.ndarray:
    """1 + 1/2 + … + 1/n for n = 0, 1, …, last."""
    return np.append(0.0, np.cumsum(1 / np.arange(1, last + 1)))


def _rows(scores: np.ndarray) -> np.ndarray:
    """Scores that can be put in order, float64[rows]."""
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or not scores.size:
        raise ValueError(
            "Scores are those of one predictor, float[rows], of at least one row. Received: shape "
            f"{scores.shape}. Take one predictor at a time."
        )
    if np.isnan(scores).any():
        raise ValueError(
            f"Scores must be numbers, to be put in order. Received: {np.isnan(scores).sum()} of "
            f"{len(scores)} NaN. Leave these rows out."
        )
    return scores
