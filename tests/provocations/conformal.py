"""How the messages of `dist_ens.conformal` are provoked."""

import numpy as np

from dist_ens import conformal
from dist_ens.conformal import intervals, quantile, sets

_GENERATOR = np.random.default_rng(0)
_PROBS = np.full((20, 2), 0.5)
_LABELS = np.zeros(20, int)


def no_model_for_an_example():
    conformal.cv_plus(np.ones(3), np.array([0, 1, 2]), np.zeros((2, 5)), 0.5)


def a_sample_for_another_number_of_examples():
    intervals.out_of_bag_means(np.ones((2, 3), bool), np.zeros((2, 4)))


def an_example_in_every_sample():
    intervals.out_of_bag_means(np.array([[True, False], [True, False]]), np.zeros((2, 2)))


def negative_residuals():
    conformal.cv_plus(np.array([1.0, -2.0]), np.array([0, 1]), np.zeros((2, 5)), 0.5)


def predictions_that_are_nan():
    conformal.cv_plus(np.ones(2), np.array([0, 1]), np.full((2, 5), np.nan), 0.5)


def ends_of_other_rows():
    intervals.mean_width(np.zeros(3), np.ones(4))


def an_end_that_is_nan():
    intervals.mean_width(np.zeros(3), np.array([1.0, np.nan, 1.0]))


def scores_that_are_not_finite():
    quantile.conformal_quantile(np.array([1.0, np.inf, 2.0]), 0.5)


def a_level_in_percent():
    quantile.conformal_quantile(np.ones(20), 90)


def too_few_scores_for_a_level():
    quantile.conformal_quantile(np.ones(20), 0.99)


def sets_of_other_classes():
    sets.lac(_PROBS, _LABELS, 0.5)(np.full((4, 3), 1 / 3))


def a_negative_penalty():
    sets.raps(_PROBS, _LABELS, 0.5, _GENERATOR, penalty=-1.0)


def logits_instead_of_probabilities():
    sets.lac(np.array([[2.0, -3.0]]), np.array([0]), 0.5)


def sets_of_numbers():
    sets.mean_set_size(np.ones((4, 3)))
