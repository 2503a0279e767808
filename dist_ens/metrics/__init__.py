"""Scores of probabilistic predictions, as pure functions on arrays.

A score over a whole split is computed from sums over its batches: the sums of each batch, added up,
then the scores. So it is exact for any split, of any size.
"""

from dist_ens.metrics.classification import (
    classification_scores,
    classification_sums,
    mixture_log_probs,
)
from dist_ens.metrics.regression import mixture_moments, regression_scores, regression_sums

__all__ = [
    "classification_scores",
    "classification_sums",
    "mixture_log_probs",
    "mixture_moments",
    "regression_scores",
    "regression_sums",
]
