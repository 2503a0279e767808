"""Objectives: losses, the predictive distributions that they train, and their default metrics.

Functions such as `categorical` and `gaussian` return an `Objective`. A custom loss with a custom
predictive distribution is an `Objective` that holds your subclass of `Distribution`.
"""

from dist_ens.losses.averaging import Ratio, batch_mean
from dist_ens.losses.categorical import (
    Categorical,
    accuracy,
    categorical,
    class_mean_categorical,
    class_mean_cross_entropy,
    log_normalized_sigmoid,
    log_softmax,
    one_vs_rest,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
)
from dist_ens.losses.distribution import Distribution, Loss, Objective, TrainingScores
from dist_ens.losses.gaussian import (
    SMALLEST_VARIANCE,
    Gaussian,
    beta_gaussian,
    beta_nll,
    gaussian,
    gaussian_nll,
    normal_distribution,
    squared_error_score,
)
from dist_ens.losses.heads import of_heads as of_heads
from dist_ens.losses.multilabel import MultiLabel, multilabel
from dist_ens.losses.points import Point, mse, squared_error
from dist_ens.losses.prediction import Prediction, predict_leaves
from dist_ens.losses.quantiles import Quantiles, pinball, quantiles

# A config names a loss of these. `of_heads` is for members with heads, which it does not name.
__all__ = [
    "SMALLEST_VARIANCE",
    "Categorical",
    "Distribution",
    "Gaussian",
    "Loss",
    "MultiLabel",
    "Objective",
    "Point",
    "Prediction",
    "Quantiles",
    "Ratio",
    "TrainingScores",
    "accuracy",
    "batch_mean",
    "beta_gaussian",
    "beta_nll",
    "categorical",
    "class_mean_categorical",
    "class_mean_cross_entropy",
    "gaussian",
    "gaussian_nll",
    "log_normalized_sigmoid",
    "log_softmax",
    "squared_error_score",
    "mse",
    "multilabel",
    "normal_distribution",
    "one_vs_rest",
    "pinball",
    "predict_leaves",
    "quantiles",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_error",
]
