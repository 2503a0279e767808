"""The quantile of calibration scores that all conformal methods use."""

import math

import numpy as np

from dist_ens.errors import UserError


def conformal_quantile(scores: np.ndarray, level: float) -> float:
    """Computes the conformal quantile of calibration scores.

        quantile = the k-th smallest of n scores,  k = ceil((n + 1) * level)

    The score of a new example is at most this with probability at least `level`. If no two scores
    are equal, the probability is at most level + 1 / (n + 1).

    Args:
        scores: Nonconformity scores of the calibration examples, higher is worse; float[n].
        level: Requested coverage, in (0, 1).

    Returns:
        The quantile, in the unit of the scores.

    Raises:
        UserError: If `level` is not in (0, 1), a score is not finite, or k > n, so that there are
            too few scores.

    >>> conformal_quantile(np.arange(1.0, 20.0), level=0.9)  # the 18th of 19, not the 17.1th
    18.0

    Source: Vovk et al. (2005), "Algorithmic learning in a random world"; as here in Lei et al.
    (2018), https://arxiv.org/abs/1604.04173.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise UserError(
            f"The scores have the shape {list(scores.shape)}, and "
            f"{np.count_nonzero(~np.isfinite(scores)):,} of them are not finite. Give one finite "
            "score for each calibration example, float[examples]."
        )
    k = quantile_rank(len(scores), level)
    return float(np.partition(scores, k - 1)[k - 1])


def quantile_rank(num_scores: int, level: float) -> int:
    """Returns the rank of `conformal_quantile` among the calibration scores.

        rank = ceil((num_scores + 1) * level)

    Args:
        num_scores: Number of calibration scores.
        level: Requested coverage, in (0, 1).

    Returns:
        The rank in ascending order, from 1.

    Raises:
        UserError: If `level` is not in (0, 1), or the rank exceeds `num_scores`.

    >>> quantile_rank(19, level=0.9)
    18
    """
    if not 0 < level < 1:
        raise UserError(f"level={level} is not a coverage between 0 and 1. Try 0.9 for 90 %.")
    rank = _ceil((num_scores + 1) * level)
    if rank > num_scores:
        raise UserError(
            f"{num_scores:,} calibration examples are too few for level {level}, which needs "
            f"{_ceil(level / (1 - level)):,}. Add examples, or lower the level."
        )
    return rank


def _ceil(value: float) -> int:
    """Returns the ceiling of a number, where rounding errors above a whole number are ignored."""
    return math.ceil(value * (1 - 1e-12))  # 100 * 0.07 is 7.000000000000001 in floating point.
