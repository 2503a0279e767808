"""Conformal prediction: label sets and intervals with a guaranteed coverage.

The guarantee holds for any model if the calibration examples and the examples to predict are
exchangeable. A level is the requested coverage, such as 0.9. Calibration examples must not be
training examples.
"""

import math

import numpy as np

from dist_ens.ground.errors import UserError

# Penalty of raps, and the number of classes without it.
_PENALTY, _FREE_CLASSES = 0.01, 5
# Size of one array of rows by training examples. Up to four of them exist at the same time.
_CHUNK_BYTES = 2**23


def conformal_quantile(scores: np.ndarray, level: float) -> float:
    """Computes the conformal quantile of calibration scores, of which higher is worse.

        quantile = the k-th smallest of n scores,  k = ceil((n + 1) * level)

    The score of a new example is at most this with probability at least `level`. If no two scores
    are equal, the probability is at most level + 1 / (n + 1).

    Source: Vovk et al. (2005), "Algorithmic learning in a random world"; as here in Lei et al.
    (2018), https://arxiv.org/abs/1604.04173.
    """
    k = quantile_rank(len(scores), level)
    return float(np.partition(np.asarray(scores, np.float64), k - 1)[k - 1])


def quantile_rank(num_scores: int, level: float) -> int:
    """Returns the rank k of `conformal_quantile`; raises a `UserError` if it exceeds the number."""
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
    return math.ceil(value * (1 - 1e-12))  # 100 * 0.07 is 7.000000000000001 in floating point.


def class_scores(method: str, probs: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Returns the nonconformity score of each class of each row, float64[rows, classes].

        lac:  score(x, c) = 1 - p(c | x)
        aps and raps: see `adaptive_scores`

    Source: Sadinle et al. (2019), https://arxiv.org/abs/1609.00451, for lac.
    """
    probs = np.asarray(probs, np.float64)
    if method == "lac":
        return 1 - probs
    if method == "aps":
        return adaptive_scores(probs, uniform)
    return adaptive_scores(probs, uniform, _PENALTY, _FREE_CLASSES)


def adaptive_scores(
    probs: np.ndarray, uniform: np.ndarray, penalty: float = 0.0, k_reg: int = 0
) -> np.ndarray:
    """Computes the scores of adaptive prediction sets: the most probable classes up to a total.

        score(x, c) = sum of p(k | x) over the classes k more probable than c  +  u * p(c | x)
                      +  penalty * max(rank of c - k_reg, 0)

    The most probable class has rank 1. The number u of each row, uniform in [0, 1), makes the
    coverage exact.

    Source: Romano et al. (2020), https://arxiv.org/abs/2006.02544, for aps; Angelopoulos et al.
    (2021), https://arxiv.org/abs/2009.14193, for raps.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    after_free = np.maximum(np.arange(1, probs.shape[1] + 1) - k_reg, 0)
    drawn_part = (1 - uniform[:, None]) * ranked
    ranked_scores = np.cumsum(ranked, axis=1) - drawn_part + penalty * after_free
    scores = np.empty_like(ranked_scores)
    np.put_along_axis(scores, order, ranked_scores, axis=1)
    return scores


def cqr_margin(lower: np.ndarray, upper: np.ndarray, targets: np.ndarray, level: float) -> float:
    """Returns the distance by which the ends of intervals are moved outwards to cover `level`.

        score(x, y) = max(lower(x) - y, y - upper(x))
        margin = conformal_quantile(scores, level)

    It is negative if the intervals were too wide. An interval can then become empty.

    Source: Romano et al. (2019), https://arxiv.org/abs/1905.03222.
    """
    return conformal_quantile(np.maximum(lower - targets, targets - upper), level)


def jackknife_plus(
    residuals: np.ndarray, out_of_bag: np.ndarray, member_predictions: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Computes intervals from members that were each trained without some of the examples.

        mu_{-i}(x) = mean of the predictions of the members that were trained without example i
        lower(x) = the k-th largest of mu_{-i}(x) - residual_i,  k = ceil((n + 1) * level)
        upper(x) = the k-th smallest of mu_{-i}(x) + residual_i

    Both are taken over the n training examples i. The method is called CV+ for members of a k-fold
    cross-validation, which cover at least 2 * level - 1 - sqrt(2 / n), and
    jackknife+-after-bootstrap for bootstrap samples. `out_of_bag` is bool[members, n], and
    `member_predictions` are float[members, rows].

    Source: Barber et al. (2021), https://arxiv.org/abs/1905.02928, for CV+; Kim, Xu and Barber
    (2020), https://arxiv.org/abs/2002.09025, for the bootstrap.
    """
    residuals = np.asarray(residuals, np.float64)
    weights = _out_of_bag_weights(out_of_bag)
    rank, num_rows = quantile_rank(len(residuals), level), member_predictions.shape[1]
    lower, upper = np.empty(num_rows), np.empty(num_rows)
    # An array of all rows by all examples may not fit in memory.
    chunk = max(1, _CHUNK_BYTES // residuals.nbytes)
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        centres = member_predictions[:, part].T @ weights
        upper[part] = _kth_smallest(centres + residuals, rank)
        lower[part] = -_kth_smallest(residuals - centres, rank)
    return lower, upper


def out_of_bag_means(out_of_bag: np.ndarray, member_predictions: np.ndarray) -> np.ndarray:
    """Computes the mean prediction of each training example by members not trained on it."""
    predictions = np.asarray(member_predictions, np.float64)
    return (_out_of_bag_weights(out_of_bag) * predictions).sum(axis=0)


def _kth_smallest(values: np.ndarray, k: int) -> np.ndarray:
    """Returns the k-th smallest value of each row, k from 1. Reorders the rows in place."""
    values.partition(k - 1, axis=1)
    return values[:, k - 1]


def _out_of_bag_weights(out_of_bag: np.ndarray) -> np.ndarray:
    """Returns the weight of each member in mu_{-i}, float64[members, n]."""
    num_members = out_of_bag.sum(axis=0)
    seen_by_all = np.count_nonzero(num_members == 0)
    if seen_by_all:
        raise UserError(
            f"{seen_by_all:,} of {out_of_bag.shape[1]:,} examples are in the samples of all "
            f"{len(out_of_bag)} members. Train more members."
        )
    return out_of_bag / num_members
