"""Conformal prediction: label sets and intervals with a guaranteed coverage.

The guarantee holds for any model if the calibration examples and the examples to predict are
exchangeable. A level is the requested coverage, such as 0.9. Calibration examples must not be
training examples.
"""

from dist_ens.conformal.intervals import (
    PredictionIntervals,
    coverage_of_intervals,
    cv_plus,
    jackknife_plus,
    mean_width,
    out_of_bag_means,
    split_cqr,
)
from dist_ens.conformal.quantile import conformal_quantile, quantile_rank
from dist_ens.conformal.sets import (
    PredictionSets,
    aps,
    class_scores,
    coverage_of_sets,
    lac,
    mean_set_size,
    raps,
)

__all__ = [
    "PredictionIntervals",
    "PredictionSets",
    "aps",
    "class_scores",
    "conformal_quantile",
    "coverage_of_intervals",
    "coverage_of_sets",
    "cv_plus",
    "jackknife_plus",
    "lac",
    "mean_set_size",
    "mean_width",
    "out_of_bag_means",
    "quantile_rank",
    "raps",
    "split_cqr",
]
