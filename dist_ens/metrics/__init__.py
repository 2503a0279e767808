"""Scores of probabilistic predictions, as pure functions on arrays.

A few statistics of each row are computed on the device that holds the predictions. The scores are
computed from them on the host, over all rows or over resamples of the rows.
"""

from dist_ens.metrics.catalogue import (
    CATALOGUE,
    CLASSIFICATION,
    INTERVAL_LEVEL,
    MULTILABEL,
    REGRESSION,
    UNBALANCED,
    formatted,
    label_of,
)
from dist_ens.metrics.classification import (
    classification_values,
    classwise_sums,
    credit,
    diversity_values,
    entropy,
    mixture_log_probs,
    votes_of,
)
from dist_ens.metrics.metric import Metric, Rows, scores_of
from dist_ens.metrics.regression import mixture_moments, mixture_quantile, regression_values
from dist_ens.metrics.resampling import bootstrap_weights, interval, mean_of

__all__ = [
    "CATALOGUE",
    "CLASSIFICATION",
    "INTERVAL_LEVEL",
    "MULTILABEL",
    "REGRESSION",
    "UNBALANCED",
    "Metric",
    "Rows",
    "bootstrap_weights",
    "classification_values",
    "classwise_sums",
    "credit",
    "diversity_values",
    "entropy",
    "formatted",
    "interval",
    "label_of",
    "mean_of",
    "mixture_log_probs",
    "mixture_moments",
    "mixture_quantile",
    "regression_values",
    "scores_of",
    "votes_of",
]
