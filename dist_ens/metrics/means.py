"""Means over rows, as they are and in resamples of them."""

import numpy as np


def mean_of(values: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """Returns the mean of some rows' values.

    Args:
        values: Value of each row; float[rows].
        weights: How often each row counts in each resample, float32[draws, rows]; float64 computes
            in that precision. None weights all rows equally.

    Returns:
        A float; with weights float64[draws]. NaN in a draw if a value is infinite.
    """
    if weights is None:
        return float(values.mean(dtype=np.float64))
    # One product of float32 arrays is as exact as resamples need it, and copies nothing.
    precision = np.float64 if weights.dtype == np.float64 else np.float32
    with np.errstate(invalid="ignore"):  # 0 times infinity is NaN
        totals = weights @ values.astype(precision)
    return totals.astype(np.float64) / weights.sum(axis=1)
