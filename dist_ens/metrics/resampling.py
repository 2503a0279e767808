"""Examples drawn again: how far a score would move on another sample of the same size."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Numbers in a block of draws: 64 KB of float64. They stay in a core's cache from pass to pass, and
# in the heap: arrays from 128 KB on are mapped and paged in anew for every pass, which is slower
# than the passes.
BLOCK_SIZE = 2**13


def bootstrap_weights(num_examples: int, draws: int, seed: int) -> np.ndarray:
    """Draws bootstrap weights: the count of each example in resamples with replacement.

    They depend on the arguments alone. So predictors that are scored with the same weights meet
    the same resamples, and the differences of their scores are paired.

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
        samples: The score in each draw; float[draws]. It may be infinite.
        level: Share of the samples within, in (0, 1).

    Returns:
        Lower and upper bound, in the unit of the samples. Both NaN if a sample is.

    Raises:
        ValueError: If there is no sample, or `level` is not in (0, 1).

    >>> interval(np.arange(101.0), level=0.5)
    (25.0, 75.0)

    Source: Efron and Tibshirani (1993), "An introduction to the bootstrap", chapter 13.
    """
    samples = np.asarray(samples, np.float64)
    if samples.ndim != 1 or not samples.size:
        raise ValueError(
            "An interval is that of the samples of one score, float[draws], at least one. "
            f"Received: shape {samples.shape}. Take one score at a time."
        )
    if not 0 < level < 1:
        raise ValueError(
            f"The level of an interval lies between 0 and 1. Received: {level}. Try 0.95."
        )
    if np.isnan(samples).any():
        return math.nan, math.nan
    ordered = np.sort(samples)

    def quantile(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low = float(ordered[int(below)])
        # Not low + part * (high - low), as NumPy has it: NaN where both are infinite.
        return low if part == 0 else (1 - part) * low + part * float(ordered[int(below) + 1])

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def over_draws(score: Callable[..., np.ndarray], *weighted: tuple[np.ndarray | None, int]) -> Any:
    """Computes a score in every draw, or of the rows as they are.

    Args:
        score: From weights, a float64[draws, rows] of each of `weighted`, to float64[draws, ...].
            It is called with few draws at a time, so that what it makes is small.
        *weighted: The weights of some rows, float[draws, rows] and not negative, and the number of
            these rows. None instead of weights, then everywhere: every row once.

    Returns:
        float64[draws, ...], NaN in a draw without any row; with no weights that of the rows as
        they are, float64[...], a float if it is a single one.

    Raises:
        ValueError: If weights do not fit the rows or each other, are negative, or NaN.

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
            "Weights are float[draws, rows], of all rows or of none, in the same draws. Received: "
            f"{shapes} for {[rows for _, rows in weighted]} rows. "
            "Make them with bootstrap_weights(rows, draws, seed)."
        )
    length = max(1, BLOCK_SIZE // sum(rows for _, rows in weighted))
    parts = []
    for start in range(0, draws[0], length):
        here = slice(start, start + length)
        blocks = [np.asarray(weights)[here].astype(np.float64) for weights, _ in weighted]
        if not all(block.min() >= 0 for block in blocks):
            raise ValueError(
                "Weights count how often a row is drawn. Received: some negative or NaN. "
                "Make them with bootstrap_weights(rows, draws, seed)."
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            part = score(*blocks)
        for block in blocks:
            part[~block.any(axis=1)] = np.nan
        parts.append(part)
    return np.concatenate(parts)
