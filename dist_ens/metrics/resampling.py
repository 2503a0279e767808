"""Means over rows, and the bootstrap: resamples of the examples, and intervals over them."""

import math
from collections.abc import Callable

import numpy as np

from dist_ens.ground.types import Score

# Numbers in a block of draws, 64 KB of float64. A block stays in a core's cache from pass to pass.
# It also stays in the heap: arrays of 128 KB and more are mapped again for every pass, which takes
# longer than the passes.
BLOCK_SIZE = 2**13


def mean_of(values: np.ndarray, weights: np.ndarray | None = None) -> Score:
    """Returns the mean of some rows' values.

    Args:
        values: Value of each row; float[rows].
        weights: Number of times each row counts in each resample; float32[draws, rows], or float64
            for a mean in that precision. Default: all rows count equally.

    Returns:
        A float, or float64[draws] with weights. If a value is infinite, draws without its row are
        NaN.

    >>> mean_of(np.array([1.0, 3.0]))
    2.0
    >>> mean_of(np.array([1.0, 3.0]), np.array([[1.0, 1.0], [2.0, 0.0]]))
    array([2., 1.])
    """
    if weights is None:
        return float(values.mean(dtype=np.float64))
    # A product of float32 arrays is accurate enough for resamples, and makes no copy.
    precision = np.float64 if weights.dtype == np.float64 else np.float32
    with np.errstate(invalid="ignore"):  # 0 times infinity is NaN.
        totals = weights @ values.astype(precision)
    return totals.astype(np.float64) / weights.sum(axis=1)


def bootstrap_weights(num_examples: int, draws: int, seed: int) -> np.ndarray:
    """Draws the counts of examples in resamples with replacement, float32[draws, examples].

    They depend on the arguments alone. Predictors that are scored with the same counts see the same
    resamples, so the differences of their scores are paired.

    >>> bootstrap_weights(4, draws=2, seed=0).sum(axis=1)
    array([4., 4.], dtype=float32)

    Source: Efron (1979), "Bootstrap methods: another look at the jackknife".
    """
    random = np.random.default_rng(seed)
    weights = np.empty((draws, num_examples), np.float32)
    for row in weights:
        drawn = random.integers(num_examples, size=num_examples)
        row[:] = np.bincount(drawn, minlength=num_examples)
    return weights


def interval(samples: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Computes the percentile interval of a score from its resamples; NaN if one is NaN.

        [q((1 - level) / 2), q((1 + level) / 2)],  q: quantile, linear between two samples

    >>> interval(np.arange(101.0), level=0.5)
    (25.0, 75.0)

    Source: Efron and Tibshirani (1993), "An introduction to the bootstrap", chapter 13.
    """
    if np.isnan(samples).any():
        return math.nan, math.nan
    ordered = np.sort(np.asarray(samples, np.float64))

    def quantile(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low = float(ordered[int(below)])
        # NumPy's low + part * (high - low) would be NaN if both are infinite.
        return low if part == 0 else (1 - part) * low + part * float(ordered[int(below) + 1])

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def over_draws(score: Callable[..., np.ndarray], *weighted: tuple[np.ndarray | None, int]) -> Score:
    """Returns a score in every resample, float64[draws, ...], or of the rows without weights.

    `score` is a function of the weights, float64[draws, rows], for each pair of weights and number
    of rows in `weighted`. It is called with few draws at a time, so that its arrays are small. A
    draw without any row gives NaN.
    """
    given = [weights for weights, _ in weighted if weights is not None]
    if not given:
        values = score(*(np.ones((1, rows)) for _, rows in weighted))[0]
        return float(values) if values.ndim == 0 else values
    length = max(1, BLOCK_SIZE // sum(rows for _, rows in weighted))
    parts = []
    for start in range(0, len(given[0]), length):
        blocks = [weights[start : start + length].astype(np.float64) for weights in given]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = score(*blocks)
        for block in blocks:
            part[~block.any(axis=1)] = np.nan
        parts.append(part)
    return np.concatenate(parts)
