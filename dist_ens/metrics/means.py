"""Means over rows, and over resamples of the rows."""

import numpy as np


def mean_of(values: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
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
