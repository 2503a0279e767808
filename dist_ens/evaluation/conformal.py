"""Conformal prediction: label sets and intervals with a guaranteed coverage.

The guarantee holds for any model if the calibration examples and the examples to predict are
exchangeable. A level is the requested coverage, such as 0.9. Calibration examples must not be
training examples.

Examples to predict are arrays of NumPy, in float64, or of JAX in an exported function, in float32.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

import jax
import numpy as np

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Inputs, Leaf, SomeArray
from dist_ens.losses import Distribution

SETS = ("lac", "aps", "raps")
# Methods that need members which leave out training examples, and their `data.examples`.
LEFT_OUT_BY = {"cv+": "kfold", "jackknife+": "bootstrap"}
_MASK = "out_of_bag"
# Members' predictions are in float32, and two computations of one probability may differ by this.
# Without it examples of equal scores, of which a pooling by votes has many, could lose their label.
_ROUNDING = 1e-6
# Penalty of raps, and the number of classes without it.
_PENALTY, _FREE_CLASSES = 0.01, 5
# Size of one array of rows by training examples. Up to four of them exist at the same time.
_CHUNK_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class ConformalRule:
    """A conformal method with its calibration examples.

    `examples` are arrays of the n examples: for sets the `scores` of the labels, for cqr the
    `labels` and the leaves of the prediction, for cv+ and jackknife+ `residuals`, `out_of_bag`,
    bool[members, n], and `weights` of the members if they are not equal. `mean` and `std` are
    those by which real targets were standardised.

    With several targets the arrays are [n, targets], and a rule is fitted for each target alone. So
    the coverage holds for each target, and not for all targets of an example together.
    """

    method: str
    examples: Mapping[str, np.ndarray]
    mean: float | list[float] = 0.0
    std: float | list[float] = 1.0

    def sets(self, probs: SomeArray, u: SomeArray, level: float) -> SomeArray:
        """Returns which classes are in each set, from uncalibrated `probs`."""
        quantile = of_each_target(partial(conformal_quantile, level=level), self.examples["scores"])
        return class_scores(self.method, probs, u) <= quantile[None, ..., None] + _ROUNDING

    def own_interval(
        self,
        distribution: Distribution,
        shown: Mapping[str, np.ndarray],
        points: Callable[[], np.ndarray],
        level: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of `interval` in the targets' own unit, from predictions in it."""
        mean, std = np.array(self.mean), np.array(self.std)
        own = {name: values[None] for name, values in shown.items()}
        standard = distribution.shown(own, -mean[None] / std, 1 / std[None])
        summary = distribution.from_shown({name: values[0] for name, values in standard.items()})
        low, high = self.interval(distribution, summary, lambda: (points() - mean) / std, level)
        return low * std + mean, high * std + mean

    def interval(
        self,
        distribution: Distribution,
        summary: Mapping[str, np.ndarray],
        points: Callable[[], np.ndarray],
        level: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and upper ends of the intervals in the calibration examples' unit."""
        examples = self.examples
        if self.method != "cqr":
            mask, weights = examples[_MASK], examples.get("weights")

            def ends(residuals: np.ndarray, points: SomeArray) -> SomeArray:
                found = jackknife_plus(residuals, mask, points, level, weights)
                return found[0].__array_namespace__().stack(found)

            low, high = of_each_target(ends, examples["residuals"], points())
            return low, high
        held = {name: values for name, values in examples.items() if name != "labels"}
        arrays = *distribution.central_interval(held, level), examples["labels"]
        margin = of_each_target(partial(cqr_margin, level=level), *arrays)
        low, high = distribution.central_interval(summary, level)
        return low - margin, high + margin

    def to_dict(self) -> JsonDict:
        """Returns the method and its examples in types that JSON can hold."""
        examples = {name: values.tolist() for name, values in self.examples.items()}
        if _MASK in examples:
            # A hexadecimal digit for 4 examples: a list of words would be 20 times as long.
            examples[_MASK] = [np.packbits(row).tobytes().hex() for row in self.examples[_MASK]]
        return {**vars(self), "examples": examples}

    @classmethod
    def from_dict(cls, values: JsonDict) -> Self:
        """Returns the rule that `to_dict` wrote, also after a round trip through JSON."""
        examples = dict(values["examples"])
        if _MASK in examples:
            count = len(examples["residuals"])
            rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in examples[_MASK]]
            examples[_MASK] = [np.unpackbits(row, count=count).astype(bool) for row in rows]
        return cls(**{**values, "examples": {n: np.array(leaf) for n, leaf in examples.items()}})


def of_each_target(
    fn: Callable[..., SomeArray | float], examples: np.ndarray, *others: SomeArray
) -> SomeArray:
    """Returns `fn(examples, *others)`, or its results for each target along a last axis.

    There are several targets if `examples` are [n, targets], and not [n]. Only `others` may be
    arrays of JAX, and the result is one then.
    """
    numpy = others[0].__array_namespace__() if others else np
    if examples.ndim == 1:
        return numpy.asarray(fn(examples, *others))
    targets = range(examples.shape[-1])
    found = [fn(examples[..., at], *(each[..., at] for each in others)) for at in targets]
    return numpy.stack([numpy.asarray(each) for each in found], axis=-1)


def uniform_of(inputs: Inputs) -> np.ndarray:
    """Returns a number in [0, 1) of each example, from its inputs alone; float32[batch].

    It is a hash of the inputs in float32. NumPy and JAX compute the same bits.
    """

    def hashed(leaf: Leaf) -> np.ndarray:
        rows = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        rows = rows.reshape(rows.shape[0], -1).astype(np.float32)
        words = rows.__array_namespace__().where(rows == 0, np.float32(0), rows).view(np.uint32)
        places = _mixed(np.arange(1, 1 + words.shape[1], dtype=np.uint32))
        return _mixed(words ^ places[None]).sum(axis=1, dtype=np.uint32)

    total: Leaf = np.uint32(0)
    for leaf in jax.tree.leaves(inputs):
        total = _mixed(hashed(leaf) ^ total)
    return (total >> 8).astype(np.float32) / np.float32(2**24)


def _mixed(words: SomeArray) -> SomeArray:
    """Returns words, uint32, of which each bit depends on all bits of the given ones.

    Source: the last step of MurmurHash3, https://github.com/aappleby/smhasher.
    """
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


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


def class_scores(method: str, probs: SomeArray, uniform: SomeArray) -> SomeArray:
    """Returns the nonconformity score of each class of each row, float[rows, classes].

        lac:  score(x, c) = 1 - p(c | x)
        aps and raps: see `adaptive_scores`

    Source: Sadinle et al. (2019), https://arxiv.org/abs/1609.00451, for lac.
    """
    probs = probs.astype(float)
    if method == "lac":
        return 1 - probs
    if method == "aps":
        return adaptive_scores(probs, uniform)
    return adaptive_scores(probs, uniform, _PENALTY, _FREE_CLASSES)


def adaptive_scores(
    probs: SomeArray, uniform: SomeArray, penalty: float = 0.0, k_reg: int = 0
) -> SomeArray:
    """Computes the scores of adaptive prediction sets: the most probable classes up to a total.

        score(x, c) = sum of p(k | x) over the classes k more probable than c  +  u * p(c | x)
                      +  penalty * max(rank of c - k_reg, 0)

    The most probable class has rank 1. The number u of each row, uniform in [0, 1), makes the
    coverage exact.

    Source: Romano et al. (2020), https://arxiv.org/abs/2006.02544, for aps; Angelopoulos et al.
    (2021), https://arxiv.org/abs/2009.14193, for raps.
    """
    xp = probs.__array_namespace__()
    order = xp.argsort(-probs, axis=1, stable=True)
    ranked = xp.take_along_axis(probs, order, axis=1)
    after_free = np.maximum(np.arange(1, probs.shape[1] + 1) - k_reg, 0)
    drawn_part = (1 - uniform[:, None]) * ranked
    ranked_scores = xp.cumsum(ranked, axis=1) - drawn_part + penalty * after_free[None]
    return xp.take_along_axis(ranked_scores, xp.argsort(order, axis=1), axis=1)


def cqr_margin(lower: np.ndarray, upper: np.ndarray, targets: np.ndarray, level: float) -> float:
    """Returns the distance by which the ends of intervals are moved outwards to cover `level`.

        score(x, y) = max(lower(x) - y, y - upper(x))
        margin = conformal_quantile(scores, level)

    It is negative if the intervals were too wide. An interval can then become empty.

    Source: Romano et al. (2019), https://arxiv.org/abs/1905.03222.
    """
    return conformal_quantile(np.maximum(lower - targets, targets - upper), level)


def jackknife_plus(
    residuals: np.ndarray,
    out_of_bag: np.ndarray,
    member_predictions: SomeArray,
    level: float,
    weights: np.ndarray | None = None,
) -> tuple[SomeArray, SomeArray]:
    """Computes intervals from members that were each trained without some of the examples.

        mu_{-i}(x) = mean of the predictions of the members that were trained without example i
        lower(x) = the k-th largest of mu_{-i}(x) - residual_i,  k = ceil((n + 1) * level)
        upper(x) = the k-th smallest of mu_{-i}(x) + residual_i

    Both are taken over the n training examples i. The method is called CV+ for members of a k-fold
    cross-validation, which cover at least 2 * level - 1 - sqrt(2 / n), and
    jackknife+-after-bootstrap for bootstrap samples. `out_of_bag` is bool[members, n], and
    `member_predictions` are float[members, rows]. With `weights`, float[members], the means are
    weighted.

    Source: Barber et al. (2021), https://arxiv.org/abs/1905.02928, for CV+; Kim, Xu and Barber
    (2020), https://arxiv.org/abs/2002.09025, for the bootstrap.
    """
    residuals = np.asarray(residuals, np.float64)
    weights = _out_of_bag_weights(out_of_bag, weights)
    rank, num_rows = quantile_rank(len(residuals), level), member_predictions.shape[1]

    def ends(predictions: SomeArray) -> tuple[SomeArray, SomeArray]:
        centres = predictions.T @ weights
        lower = -_kth_smallest(-(centres - residuals[None]), rank)
        return lower, _kth_smallest(centres + residuals[None], rank)

    if isinstance(member_predictions, jax.Array):
        return ends(member_predictions)
    # An array of all rows by all examples may not fit in memory.
    chunk = max(1, _CHUNK_BYTES // residuals.nbytes)
    parts = [ends(member_predictions[:, at : at + chunk]) for at in range(0, num_rows, chunk)]
    lower, upper = map(np.concatenate, zip(*parts, strict=True))
    return lower, upper


def out_of_bag_means(
    out_of_bag: np.ndarray, member_predictions: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Computes the mean prediction of each training example by members not trained on it.

    Predictions are float[members, n], or float[members, n, targets].
    """
    predictions = np.asarray(member_predictions, np.float64)
    weights = _out_of_bag_weights(out_of_bag, weights)
    weights = weights.reshape(*weights.shape, *(1,) * (predictions.ndim - 2))
    return (weights * predictions).sum(axis=0)


def _kth_smallest(values: SomeArray, k: int) -> SomeArray:
    """Returns the k-th smallest value of each row, k from 1. Reorders rows of NumPy in place."""
    if isinstance(values, jax.Array):
        return jax.numpy.sort(values, axis=1)[:, k - 1]
    values.partition(k - 1, axis=1)
    return values[:, k - 1].copy()


def _out_of_bag_weights(out_of_bag: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Returns the weight of each member in mu_{-i}, float64[members, n]."""
    num_members = out_of_bag.sum(axis=0)
    seen_by_all = np.count_nonzero(num_members == 0)
    if seen_by_all:
        raise UserError(
            f"{seen_by_all:,} of {out_of_bag.shape[1]:,} examples are in the samples of all "
            f"{len(out_of_bag)} members. Train more members."
        )
    if weights is not None:
        out_of_bag = out_of_bag * weights[:, None]
    return out_of_bag / out_of_bag.sum(axis=0)
