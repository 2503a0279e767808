"""Ranking metrics: risk under selective prediction, and detection out of distribution.

`confidence` is higher for more confident predictions, and may be infinite; float[rows]. `errors`
are 0 or 1, or any finite losses; float[rows]. A risk has the unit of the errors. `weights` are the
number of times that each row is drawn in each resample, float[draws, rows]; by default every row
counts once. A score is a float, or float64[draws] with weights. No number may be NaN.
"""

import functools
from collections.abc import Callable

import numpy as np

from dist_ens.ground.types import Score
from dist_ens.metrics.resampling import over_draws

# Fraction of the out-of-distribution rows that are detected at the threshold of `fpr95`.
_DETECTED = 0.95


def area_under_risk_coverage(
    confidence: np.ndarray, errors: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """Computes the area under the risk-coverage curve (AURC).

        aurc = 1/n sum_{k=1..n} 1/k sum_{j=1..k} e_j,  rows from the most confident to the least

    Rows of equal confidence each get the mean of their errors, which is the expectation over their
    random order. A row of weight w, a whole number, counts as w rows. Let a group of m rows of
    equal confidence and mean error e follow C rows of total error E. With the harmonic numbers H,
    it adds

        sum_{j=1..m} (E + j e) / (C + j) = m e + (E - C e) (H(C + m) - H(C))

    Source: Geifman et al. (2019), https://arxiv.org/abs/1805.08206.
    """

    def score(covered: np.ndarray, lost: np.ndarray) -> np.ndarray:
        places = covered.astype(np.intp)
        mass, error = np.diff(covered, axis=1), np.diff(lost, axis=1)
        mean = error / np.maximum(mass, 1)  # A group that is not drawn has mass 0 and error 0.
        harmonic = np.take(_harmonic_numbers(int(places.max())), places)
        excess = (lost[:, :-1] - covered[:, :-1] * mean) * np.diff(harmonic, axis=1)
        return (lost[:, -1] + excess.sum(axis=1)) / covered[:, -1]

    return over_ranking(score, confidence, errors, weights)


def risk_at_coverage(
    confidence: np.ndarray, errors: np.ndarray, coverage: float, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """Computes the mean error of the most confident fraction of the rows.

    If the fraction ends within a row, or within rows of equal confidence, these count in part.

    Source: Geifman and El-Yaniv (2017), https://arxiv.org/abs/1705.08500.
    """

    def score(covered: np.ndarray, lost: np.ndarray) -> np.ndarray:
        share = coverage * covered[:, -1]
        within = [np.interp(*draw) for draw in zip(share, covered, lost, strict=True)]
        return np.array(within) / share

    return over_ranking(score, confidence, errors, weights)


def risk_coverage_curve(
    confidence: np.ndarray, errors: np.ndarray, num_points: int = 101
) -> tuple[np.ndarray, np.ndarray]:
    """Returns equally spaced coverages from 0 to 1, and the `risk_at_coverage` of each.

    At coverage 0 the risk is the limit, the mean error of the rows of the highest confidence.
    """
    order, ends = ranked(confidence)
    lost = cumulative(errors[order][None].astype(np.float64), ends)[0]
    coverage = np.linspace(0, 1, num_points)
    share = coverage[1:] * len(confidence)
    return coverage, np.append(lost[1] / ends[1], np.interp(share, ends, lost) / share)


def detection_scores(
    scores_in: np.ndarray,
    scores_out: np.ndarray,
    weights_in: np.ndarray | None = None,
    weights_out: np.ndarray | None = None,
) -> dict[str, float | np.ndarray]:
    """Computes how well a score detects rows out of distribution, which should have higher scores.

        auroc = P(out > in) + P(out = in) / 2
        aupr  = sum_t (recall_t - recall_t') precision_t,  over thresholds t, t' the next higher
        fpr95 = P(in >= t) for the largest t with P(out >= t) >= 0.95

    Source: Hendrycks and Gimpel (2017), https://arxiv.org/abs/1610.02136, for the first two; Liang
    et al. (2018), https://arxiv.org/abs/1706.02690, for the third.
    """
    order, ends = ranked(np.concatenate([scores_in, scores_out]))
    is_out = order >= len(scores_in)

    def score(block_in: np.ndarray, block_out: np.ndarray) -> np.ndarray:
        block = np.take(np.concatenate([block_in, block_out], axis=1), order, axis=1)
        covered, detected = cumulative(block, ends), cumulative(block * is_out, ends)
        alarms = covered - detected
        num_out, num_in = detected[:, -1], alarms[:, -1]
        higher = (detected[:, :-1] + detected[:, 1:]) / 2  # Tied rows count half.
        auroc = (np.diff(alarms, axis=1) * higher).sum(axis=1) / (num_in * num_out)
        # Above the highest drawn row the precision is 0 / 0, which must add 0.
        precision = detected / np.maximum(covered, np.finfo(np.float64).tiny)
        aupr = (np.diff(detected, axis=1) * precision[:, 1:]).sum(axis=1) / num_out
        # Thresholds descend, so the first place has the largest one. Counts compare exactly.
        enough = (detected >= _DETECTED * num_out[:, None]).argmax(axis=1)
        fpr95 = alarms[np.arange(len(alarms)), enough] / num_in
        return np.stack([auroc, aupr, fpr95], axis=1)

    values = over_draws(score, (weights_in, len(scores_in)), (weights_out, len(scores_out)))
    names = ("auroc", "aupr", "fpr95")
    return dict(zip(names, values.tolist() if weights_in is None else values.T, strict=True))


def over_ranking(
    score: Callable[[np.ndarray, np.ndarray], np.ndarray],
    confidence: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray | None,
) -> Score:
    """Returns a score of sums from the most confident row on, in every resample.

    `score` is a function of the sums of the weights, and of the weighted values, up to the end of
    each group of equal confidences, float64[draws, groups + 1].
    """
    order, ends = ranked(confidence)
    values = values[order].astype(np.float64)

    def of_block(block: np.ndarray) -> np.ndarray:
        block = np.take(block, order, axis=1)
        return score(cumulative(block, ends), cumulative(block * values, ends))

    return over_draws(of_block, (weights, len(confidence)))


def ranked(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows in descending order of their scores, and the ends of ties, int[groups + 1]."""
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    is_end = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    return order, np.flatnonzero(is_end)


def cumulative(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Computes the sums of the rows' values, [draws, rows], up to each end from `ranked`."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums if len(ends) == sums.shape[1] else np.take(sums, ends, axis=1)


@functools.lru_cache(maxsize=1)  # All draws of a bootstrap have the same number of rows.
def _harmonic_numbers(last: int) -> np.ndarray:
    """Returns 1 + 1/2 + … + 1/n for n = 0, 1, …, last."""
    return np.append(0.0, np.cumsum(1 / np.arange(1, last + 1)))
