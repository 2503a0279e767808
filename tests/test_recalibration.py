"""Recalibrated predictions, against cases worked by hand, brute force and scikit-learn."""

import json

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression

from dist_ens.ground.errors import UserError
from dist_ens.metrics.recalibration import (
    MAX_TEMPERATURE,
    MIN_PROB,
    MIN_TEMPERATURE,
    RECALIBRATIONS,
    Recalibration,
    fit_isotonic,
    fit_temperature,
    fit_variance_scale,
    fit_vector,
)

pytestmark = pytest.mark.quick

every_method = pytest.mark.parametrize("fit", RECALIBRATIONS.values(), ids=RECALIBRATIONS)
UNEVEN = [[0.6, 0.4], [0.3, 0.7]]


def overconfident(num_rows, num_classes=4, seed=0):
    """Predictions twice as sure as they may be, too fond of the last class, and labels."""
    random = np.random.default_rng(seed)
    logits = 1.5 * random.normal(size=(num_rows, num_classes))
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    return log_softmax(2 * logits + np.linspace(0, 1, num_classes)), labels


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def nll(log_probs, labels):
    return -log_probs[np.arange(len(labels)), labels].mean()


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs))


def test_a_temperature_worked_by_hand():
    # Odds of 9 : 1 in each row, right in 3 of 4. Best are odds of 3 : 1, and 9^(1/T) = 3 for T = 2.
    log_probs = log([[0.9, 0.1]] * 4)
    recalibration = fit_temperature(log_probs, np.array([0, 0, 1, 0]))
    assert recalibration.parameters["temperature"] == pytest.approx(2, abs=1e-9)
    np.testing.assert_allclose(np.exp(recalibration(log_probs)), [[0.75, 0.25]] * 4, atol=1e-9)
    # At that temperature 0.8 : 0.16 : 0.04 = 20 : 4 : 1 become their square roots.
    roots = np.sqrt([20, 4, 1])
    other = np.exp(recalibration(log([[0.8, 0.16, 0.04]])))
    np.testing.assert_allclose(other, [roots / roots.sum()], atol=1e-9)


@pytest.mark.parametrize(
    ("probs", "labels", "temperature", "warning"),
    [
        (UNEVEN, [0, 1], MIN_TEMPERATURE, "below 0.01, the bound at which the fit stopped: 0 of "),
        (UNEVEN, [1, 0], MAX_TEMPERATURE, "above 100, the bound at which the fit stopped: 2 of "),
        # Right in 3 of 4 at odds of 1 : 0, taken for 1 : 1.2e-38 with -ln(1.1755e-38) = 87.34.
        ([[1.0, 0.0]] * 4, [0, 0, 0, 1], 79.4972, "1 of 4 validation rows give their label a prob"),
    ],
    ids=["no error", "no better than chance", "zero"],
)
def test_a_temperature_that_the_rows_do_not_determine_is_told(probs, labels, temperature, warning):
    found = fit_temperature(log(probs), np.array(labels))
    assert found.parameters == {"temperature": pytest.approx(temperature, abs=1e-4)}
    (told,) = found.warnings
    assert warning in told


def test_scales_that_grow_without_end_are_told():
    # All rows of class 2 and no others have it as the most probable; 0 and 1 are confused.
    random = np.random.default_rng(0)
    labels = np.arange(90) % 3
    logits = 3.0 * np.eye(3)[labels] + 2 * random.random((90, 3)) * [1, 1, 0]
    logits[:6, :2] = logits[:6, 1::-1]
    (told,) = fit_vector(log_softmax(logits), labels).warnings
    wrong = np.count_nonzero(logits.argmax(1) != labels)
    assert wrong > 0
    assert told.startswith("No finite scale and bias is best for class 2, ")


def test_isotonic_functions_of_a_single_step_are_told():
    # Class 0 has 0.9 and 0.8, all other rows less: one step. Classes 1 and 2 are confused once.
    probs = [[0.9, 0.05, 0.05], [0.8, 0.1, 0.1], [0.1, 0.3, 0.6], [0.1, 0.6, 0.3], [0.0, 0.4, 0.6]]
    (told,) = fit_isotonic(log(probs), np.array([0, 0, 1, 2, 2])).warnings
    assert told.startswith("The calibrated probability of class 0 is a single step from 0 to 1: 2 ")


def test_two_classes_by_vector_are_a_logistic_regression_on_the_log_probabilities():
    # log p(0) / p(1) = scale_0 * log_probs_0 - scale_1 * log_probs_1 + bias_0 - bias_1
    log_probs, labels = overconfident(400, 2)
    rival = LogisticRegression(C=1e12, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    rival.fit(log_probs * [1, -1], labels == 0)
    recalibration = fit_vector(log_probs, labels)
    expected = rival.predict_proba(log_probs * [1, -1])[:, ::-1]
    np.testing.assert_allclose(np.exp(recalibration(log_probs)), expected, atol=1e-6)
    scale, bias = recalibration.parameters["scale"], recalibration.parameters["bias"]
    np.testing.assert_allclose(scale, rival.coef_[0], atol=1e-4)
    np.testing.assert_allclose(bias, [rival.intercept_[0] / 2, -rival.intercept_[0] / 2], atol=1e-4)


def test_no_step_from_the_fitted_scales_and_biases_lowers_the_nll():
    log_probs, labels = overconfident(500, 6)
    parameters = fit_vector(log_probs, labels).parameters
    assert sum(parameters["bias"]) == pytest.approx(0, abs=1e-12)
    found = np.concatenate([parameters["scale"], parameters["bias"]])

    def at(scale_and_bias):
        scale, bias = np.split(scale_and_bias, 2)
        return nll(log_softmax(scale * log_probs + bias), labels)

    # The NLL is convex: where its slope is 0 it is least. Central differences of 1e-5.
    slopes = [(at(found + step) - at(found - step)) / 2e-5 for step in 1e-5 * np.eye(12)]
    np.testing.assert_allclose(slopes, 0, atol=1e-7)
    assert at(found) < at(np.repeat([1.0, 0.0], 6)) - 0.01


class Given(ClassifierMixin, BaseEstimator):
    """Predicts the probabilities that it is given as inputs."""

    def fit(self, inputs, labels):
        self.classes_ = np.unique(labels)
        return self

    def predict_proba(self, inputs):
        return inputs


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_isotonic_probabilities_are_those_of_scikit_learn(num_classes):
    log_probs, labels = overconfident(400, num_classes)
    fresh, _ = overconfident(200, num_classes, seed=1)
    everything = np.arange(400)
    rival = CalibratedClassifierCV(Given(), method="isotonic", cv=[(everything, everything)])
    rival.fit(np.exp(log_probs), labels)
    recalibration = fit_isotonic(log_probs, labels)
    for given in (log_probs, fresh):
        expected = rival.predict_proba(np.exp(given))
        np.testing.assert_allclose(np.exp(recalibration(given)), expected, atol=1e-6)


def test_isotonic_ties_are_averaged():
    # 0.3 three times with one of class 0; 0.6 twice with both: f = 1/3 and 1, and 2/3 halfway.
    log_probs = log([[p, 1 - p] for p in (0.3, 0.3, 0.3, 0.6, 0.6)])
    recalibration = fit_isotonic(log_probs, np.array([1, 0, 1, 0, 0]))
    got = np.exp(recalibration(log([[0.3, 0.7], [0.45, 0.55], [0.6, 0.4], [0.1, 0.9]])))
    np.testing.assert_allclose(got[:, 0], [1 / 3, 2 / 3, 1, 1 / 3], atol=1e-9)


def test_a_row_for_which_all_classes_are_0_becomes_uniform():
    # f_c is 0 up to 0.45 and 1 from 0.5, for each class.
    probs = [[0.5, 0.45, 0.05], [0.05, 0.5, 0.45], [0.45, 0.05, 0.5]]
    recalibration = fit_isotonic(log(probs), np.arange(3))
    got = np.exp(recalibration(log([[1 / 3, 1 / 3, 1 / 3], [0.44, 0.44, 0.12], [0.1, 0.2, 0.7]])))
    np.testing.assert_allclose(got, [[1 / 3] * 3, [1 / 3] * 3, [0, 0, 1]], atol=1e-9)


@every_method
def test_what_is_fitted_on_one_half_is_better_on_the_other(fit):
    log_probs, labels = overconfident(4000)
    recalibration = fit(log_probs[:2000], labels[:2000])
    assert recalibration.warnings == ()
    before, after = log_probs[2000:], recalibration(log_probs[2000:])

    def brier(log_probs):
        return np.square(np.exp(log_probs) - np.eye(4)[labels[2000:]]).sum(1).mean()

    assert brier(after) < brier(before) - 0.01
    if fit is not fit_isotonic:  # whose NLL is a matter of the floor
        assert nll(after, labels[2000:]) < nll(before, labels[2000:]) - 0.05


@every_method
@pytest.mark.parametrize("labels", [[0, 1, 2, 1, 0, 0], [0, 1, 2, 0, 0, 2]], ids=["errors", "none"])
def test_probabilities_of_exactly_0_and_1_are_calibrated_to_finite_logarithms(fit, labels):
    probs = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0.6, 0.4, 0], [0, 0, 1]]
    recalibration = fit(log(probs), np.array(labels))
    for given in (log(probs), log([[0.0, 0.3, 0.7]])):
        with np.errstate(all="raise", under="ignore"):
            got = recalibration(given)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(np.exp(got).sum(axis=1), 1, atol=1e-12)
        assert (np.exp(got) >= MIN_PROB * (1 - 1e-12)).all()
        assert (got.astype(np.float32) > -87.5).all()


@every_method
def test_a_recalibration_is_made_again_from_json(fit):
    log_probs, labels = overconfident(100)
    recalibration = fit(log_probs, labels)
    again = Recalibration(recalibration.method, json.loads(json.dumps(recalibration.parameters)))
    assert RECALIBRATIONS[recalibration.method] is fit
    np.testing.assert_array_equal(again(log_probs), recalibration(log_probs))


def test_a_class_without_rows_is_named_unless_nothing_is_fitted_for_it():
    log_probs, labels = log(np.full((4, 5), 0.2)), np.array([0, 1, 1, 4])
    for fit in (fit_vector, fit_isotonic):
        with pytest.raises(UserError, match=r"no validation rows of class 2, 3 among 4"):
            fit(log_probs, labels)
    # Even predictions have no best temperature.
    assert fit_temperature(log_probs, labels).parameters == {"temperature": 1.0}


def test_the_variance_scale_is_the_mean_of_the_squared_errors_in_variances():
    # (3 - 0)^2 / 1 = 9, (2 - 0)^2 / 4 = 1, (1 - 1)^2 / 2 = 0: the mean is 10 / 3.
    means, variances, targets = np.array([[0.0, 0, 1], [1, 4, 2], [3, 2, 1]])
    scale = fit_variance_scale(means, variances, targets)
    assert scale == pytest.approx(10 / 3, abs=1e-12)

    def normal_nll(scale):
        return (np.log(scale * variances) + (targets - means) ** 2 / (scale * variances)).mean()

    assert normal_nll(scale) < min(normal_nll(scale * 1.001), normal_nll(scale / 1.001))
    half = np.float16
    assert fit_variance_scale(half(means), half(variances), half(targets)) == scale
