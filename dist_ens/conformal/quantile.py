"""The one quantile on which all conformal prediction rests."""

import math

import numpy as np

from dist_ens.errors import UserError


def conformal_quantile(scores: np.ndarray, level: float) -> float:
    """The score that a new example does not exceed with probability `level` or a little more.

        the k-th smallest of n scores,  k = ceil((n + 1) * level)

    A new score is at most this with a probability in [level, level + 1 / (n + 1)] where no two are
    equal, and with at least `level` always.

    Args:
        scores: Of the calibration examples, the higher the worse; float[n].
        level: In (0, 1).

    Raises:
        UserError: For another level, for scores that are not finite, and if k > n: then no score is
            high enough.

    >>> conformal_quantile(np.arange(1.0, 20.0), level=0.9)  # the 18th of 19, not the 17.1th
    18.0

    Source: Vovk et al. (2005), "Algorithmic learning in a random world"; as here in Lei et al.
    (2018), https://arxiv.org/abs/1604.04173.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise UserError(
            "Scores are float[examples], all finite. Received: shape "
            f"{list(scores.shape)}, {np.count_nonzero(~np.isfinite(scores)):,} not finite. Give "
            "one finite score for each calibration example."
        )
    k = quantile_rank(len(scores), level)
    return float(np.partition(scores, k - 1)[k - 1])


def quantile_rank(num_scores: int, level: float) -> int:
    """Which of the calibration examples' scores, in rising order from 1, bounds a new one.

    Args:
        num_scores: Of the calibration examples.
        level: In (0, 1).

    Raises:
        UserError: For another level, and if none of the scores is high enough.

    >>> quantile_rank(19, level=0.9)
    18
    """
    if not 0 < level < 1:
        raise UserError(
            f"A level is a coverage between 0 and 1. Received: {level}. Try 0.9 for 90 %."
        )
    rank = _ceil((num_scores + 1) * level)
    if rank > num_scores:
        raise UserError(
            "Calibration needs at least level / (1 - level) examples. Received: "
            f"{num_scores:,} at level {level}, which needs {_ceil(level / (1 - level)):,}. Add "
            "examples, or lower the level."
        )
    return rank


def _ceil(value: float) -> int:
    return math.ceil(value * (1 - 1e-12))  # 100 * 0.07 is 7.000000000000001, and 7 is meant
