"""Scores of probabilistic predictions, as pure functions on arrays.

What each prediction adds to the scores is computed where the predictions are, a few numbers for a
row; the scores, over rows as they are or in resamples of them, on the host.
"""

from dist_ens.metrics.classification import (
    classification_scores,
    classification_values,
    classwise_sums,
    credit,
    diversity_values,
    entropy,
    mixture_log_probs,
    votes_of,
)
from dist_ens.metrics.means import mean_of
from dist_ens.metrics.regression import (
    INTERVAL_LEVEL,
    mixture_moments,
    mixture_quantile,
    regression_scores,
    regression_values,
)
from dist_ens.metrics.resampling import bootstrap_weights, interval

__all__ = [
    "INTERVAL_LEVEL",
    "bootstrap_weights",
    "classification_scores",
    "classification_values",
    "classwise_sums",
    "credit",
    "diversity_values",
    "entropy",
    "interval",
    "mean_of",
    "mixture_log_probs",
    "mixture_moments",
    "mixture_quantile",
    "regression_scores",
    "regression_values",
    "votes_of",
]
