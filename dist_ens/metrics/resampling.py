"""The bootstrap: resamples of the examples, and intervals of scores over them."""

import math
from collections.abc import Callable

import numpy as np

from dist_ens.types import Score

# Numbers in a block of draws, 64 KB of float64. A block stays in a core's cache from pass to pass.
# It also stays in the heap: arrays of 128 KB and more are mapped again for every pass, which takes
# longer than the passes.
BLOCK_SIZE = 2**13


def bootstrap_weights(num_examples: int, draws: int, seed: int) -> np.ndarray:
    """Draws bootstrap weights: the count of each example in resamples with replacement.

    The weights depend on the arguments alone. Predictors that are scored with the same weights see
    the same resamples, so the differences of their scores are paired.

    Args:
        num_examples: Number of examples in the split and in each resample, at least 1.
        draws: Number of resamples, at least 1.
        seed: Seed of NumPy's generator, not negative.

    Returns:
        Counts; float32[draws, examples]. Every row sums to `num_examples`.

    Raises:
        ValueError: If there is no example or no draw.

    >>> bootstrap_weights(4, draws=2, seed=0).sum(axis=1)
    array([4., 4.], dtype=float32)

    Source: Efron (1979), "Bootstrap methods: another look at the jackknife".
    """
    if num_examples < 1 or draws < 1:
        raise ValueError(
            f"num_examples={num_examples}, draws={draws} give no resample. Both must be at least 1."
        )
    random = np.random.default_rng(seed)
    weights = np.empty((draws, num_examples), np.float32)
    for row in weights:
        drawn = random.integers(num_examples, size=num_examples)
        row[:] = np.bincount(drawn, minlength=num_examples)
    return weights


def interval(samples: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Computes the percentile interval of a score.

        [q((1 - level) / 2), q((1 + level) / 2)],  q: quantile, linear between two samples

    Args:
        samples: Score in each draw; float[draws]. Samples may be infinite.
        level: Share of the samples within the interval, in (0, 1).

    Returns:
        Lower and upper bound, in the unit of the samples. Both are NaN if a sample is NaN.

    Raises:
        ValueError: If `samples` is not float[draws] with at least one sample, or `level` is not in
            (0, 1).

    >>> interval(np.arange(101.0), level=0.5)
    (25.0, 75.0)

    Source: Efron and Tibshirani (1993), "An introduction to the bootstrap", chapter 13.
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1 or not samples.size:
        raise ValueError(
            f"The samples have the shape {samples.shape}, which is not that of one score in each "
            "draw. Give float[draws] with at least one sample."
        )
    if not 0 < level < 1:
        raise ValueError(f"level={level} of an interval is not between 0 and 1. Try 0.95.")
    if np.isnan(samples).any():
        return math.nan, math.nan
    ordered = np.sort(samples)

    def quantile(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low = float(ordered[int(below)])
        # NumPy's low + part * (high - low) would be NaN if both are infinite.
        return low if part == 0 else (1 - part) * low + part * float(ordered[int(below) + 1])

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def over_draws(score: Callable[..., np.ndarray], *weighted: tuple[np.ndarray | None, int]) -> Score:
    """Computes a score in every resample, or of the rows themselves.

    Args:
        score: Function of the weights, float64[draws, rows] for each of `weighted`, that returns
            float64[draws, ...]. It is called with few draws at a time, so that its intermediate
            arrays are small.
        *weighted: Pairs of weights, float[draws, rows] and not negative, and the number of rows. If
            the weights of all pairs are None, every row counts once.

    Returns:
        The score in every draw, float64[draws, ...], NaN in a draw without any row. Without weights
        the score of the rows, a float or float64[...].

    Raises:
        ValueError: If the weights do not match the rows or each other, or a weight is negative or
            NaN.

    >>> over_draws(lambda weights: weights @ np.array([1.0, 2.0]), (np.array([[2, 0], [1, 1]]), 2))
    array([2., 3.])
    """
    shapes = [None if weights is None else np.shape(weights) for weights, _ in weighted]
    draws = next((shape[:1] for shape in shapes if shape is not None), None)
    if draws is None:
        values = score(*(np.ones((1, rows)) for _, rows in weighted))[0]
        return float(values) if values.ndim == 0 else values
    if shapes != [(*draws, rows) for _, rows in weighted]:
        raise ValueError(
            f"The weights have the shapes {shapes}, and there are {[rows for _, rows in weighted]} "
            "rows. Give weights [draws, rows] of all rows or of none, in the same draws. Make them "
            "with bootstrap_weights(rows, draws, seed)."
        )
    length = max(1, BLOCK_SIZE // sum(rows for _, rows in weighted))
    parts = []
    for start in range(0, draws[0], length):
        here = slice(start, start + length)
        blocks = [np.asarray(weights)[here].astype(np.float64) for weights, _ in weighted]
        if not all(block.min() >= 0 for block in blocks):
            raise ValueError(
                "Some weights are negative or NaN, and weights count how often a row is drawn. "
                "Make them with bootstrap_weights(rows, draws, seed)."
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            part = score(*blocks)
        for block in blocks:
            part[~block.any(axis=1)] = np.nan
        parts.append(part)
    return np.concatenate(parts)
