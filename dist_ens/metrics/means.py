"""Means over rows, as they are and in resamples of them."""

import numpy as np


def mean_of(values: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """The mean of some rows' values.

    Args:
        values: float[rows].
        weights: How often each row counts in some resamples, float32[draws, rows].

    Returns:
        A float; with weights float64[draws]. NaN in a draw if a value is infinite.
    """
    if weights is None:
        return float(values.mean(dtype=np.float64))
    # One product of float32 arrays: as exact as resamples need it, and nothing is copied.
    with np.errstate(invalid="ignore"):  # of what is infinite
        totals = weights @ values.astype(np.float32)
    return totals.astype(np.float64) / weights.sum(axis=1)
