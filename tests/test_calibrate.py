"""Calibrated predictions in Python: their numbers, their coverage, and whose they are."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from scipy.stats import norm

import dist_ens as de
from conformal_coverage import coverage_of_intervals, coverage_of_sets
from dist_ens.ground.errors import UserError

pytestmark = pytest.mark.quick
CLASSES, FEATURES, MEMBERS = 5, 4, 3


def linear(objective, num_outputs, **options):
    """A linear ensemble, its state, and its outputs for inputs in float64."""
    network = (
        lambda key: {"w": jax.random.normal(key, (FEATURES, num_outputs))},
        lambda params, inputs: inputs @ params["w"],
    )
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=MEMBERS, **options)
    state = ensemble.init({"inputs": np.zeros((1, FEATURES), np.float32)})
    weights = np.asarray(state.params["w"], np.float64)
    return ensemble, state, lambda inputs: np.einsum("nf,mfc->mnc", inputs, weights)


def inputs_of(count, seed):
    return np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)


def classes_drawn_from(probs, seed):
    drawn = np.random.default_rng(seed).random((len(probs), 1)) > np.cumsum(probs, axis=-1)
    return drawn.sum(axis=-1).clip(max=probs.shape[-1] - 1)


def test_calibrated_probabilities_are_the_pooled_ones_to_the_power_of_one_over_the_temperature():
    ensemble, state, outputs = linear(de.losses.categorical(CLASSES), CLASSES)
    held, x = inputs_of(300, 0), inputs_of(20, 1)
    labels = np.random.default_rng(2).integers(0, CLASSES, 300)  # The members know nothing.
    pooled = softmax(outputs(held), -1).mean(0)

    def nll(temperature):
        probs = softmax(np.log(pooled) / temperature, -1)
        return -np.log(probs[np.arange(300), labels]).mean()

    best = minimize_scalar(nll, bounds=(0.1, 100), method="bounded", options={"xatol": 1e-8}).x
    calibration = de.calibrate(ensemble, state, {"inputs": held, "labels": labels})
    assert calibration.parameters["temperature"] == pytest.approx(best, rel=1e-4)
    assert best > 3
    p = ensemble.predict(state, x, calibration=calibration)
    expected = softmax(np.log(softmax(outputs(x), -1).mean(0)) / best, -1)
    np.testing.assert_allclose(p.mean, expected, atol=1e-5)
    np.testing.assert_allclose(p.total, -(expected * np.log(expected)).sum(-1), atol=1e-5)
    # The members are not calibrated, and a calibrated entropy has no parts.
    np.testing.assert_allclose(p.members, softmax(outputs(x), -1), atol=1e-5)
    assert p.aleatoric is p.epistemic is p.sets is p.interval is None


def test_calibrated_variances_and_intervals_are_those_of_numpy():
    # Targets far from 0, of which the state holds the mean and the deviation.
    mean, std = 1000.0, 50.0
    ensemble, state, outputs = linear(de.losses.gaussian(standardize=True), 2)
    held_scale = {"label_mean": np.full(3, mean, "f"), "label_std": np.full(3, std, "f")}
    scale = ensemble.layout.put(held_scale, "members")
    state = state._replace(model_state={**state.model_state, **scale})
    held, x = inputs_of(99, 0), inputs_of(20, 1)

    def normal(inputs):
        means, raw = outputs(inputs)[..., 0], outputs(inputs)[..., 1]
        of_mixture = means.mean(0)
        variance = (np.log1p(np.exp(raw)) + 1e-6 + means**2).mean(0) - of_mixture**2
        return mean + std * of_mixture, std**2 * variance

    targets = normal(held)[0] + 3 * std * np.random.default_rng(2).normal(size=99)
    data = {"inputs": held, "labels": targets}
    calibration = de.calibrate(ensemble, state, data, conformal="cqr", level=0.8)
    p = ensemble.predict(state, x, calibration=calibration)
    q = ensemble.predict(state, x)
    centre, variance = normal(held)
    factor = np.mean((targets - centre) ** 2 / variance)
    assert calibration.parameters["scale"] == pytest.approx(factor, rel=1e-4)
    np.testing.assert_allclose(p.total, factor * normal(x)[1], rtol=1e-4)
    np.testing.assert_allclose(p.std**2, p.total, rtol=1e-6)
    np.testing.assert_allclose(p.aleatoric + p.epistemic, p.total, rtol=1e-5)
    np.testing.assert_allclose(p.mean, q.mean)
    # Of 99 scores the 80th smallest, ceil(100 * 0.8), moves the ends of mean -+ 1.2816 deviations.
    # The intervals are those of the variance before the calibration.
    for level, rank in ((0.8, 80), (0.9, 90)):
        z = norm.ppf((1 + level) / 2)
        margin = np.sort(np.abs(targets - centre) - z * np.sqrt(variance))[rank - 1]
        half = z * np.sqrt(normal(x)[1]) + margin
        low, high = ensemble.predict(state, x, calibration=calibration.at(level)).interval
        np.testing.assert_allclose(low, normal(x)[0] - half, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(high, normal(x)[0] + half, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_sets_hold_the_label_as_often_as_asked_and_each_row_has_its_own(method):
    ensemble, state, outputs = linear(de.losses.categorical(CLASSES), CLASSES)
    held, x = inputs_of(2000, 0), inputs_of(4000, 1)
    labels, truth = (
        classes_drawn_from(softmax(outputs(at) / 2, -1).mean(0), 2 + len(at)) for at in (held, x)
    )
    data = {"inputs": held, "labels": labels}
    calibration = de.calibrate(ensemble, state, data, method=None, conformal=method, level=0.9)
    p = ensemble.predict(state, x, calibration=calibration)
    # Standard error: the root of 0.09 / 2000 + 0.09 / 4000, which is 0.0082.
    assert coverage_of_sets(p.sets, truth) == pytest.approx(0.9, abs=0.025)
    assert 1 < p.sets.sum(-1).mean() < CLASSES
    q = ensemble.predict(state, x)
    for name in ("mean", "total", "epistemic"):  # Only the sets are added.
        np.testing.assert_array_equal(getattr(p, name), getattr(q, name))
    fewer = ensemble.predict(state, x, calibration=calibration.at(0.6)).sets
    assert coverage_of_sets(fewer, truth) == pytest.approx(0.6, abs=0.04)
    # The set of an example does not depend on the other examples of the call, nor on its type.
    for row, expected in zip(x[:9], p.sets[:9], strict=True):
        alone = ensemble.predict(state, row[None].astype(float), calibration=calibration).sets
        np.testing.assert_array_equal(alone, expected[None])


def test_sets_of_votes_hold_labels_of_equal_scores():
    # Three votes give every class one of four scores, so that nearly all scores are ties.
    votes = de.losses.Categorical(pooling="vote")
    objective = dataclasses.replace(de.losses.categorical(CLASSES), distribution=votes)
    ensemble, state, outputs = linear(objective, CLASSES)
    held, x = inputs_of(1000, 0), inputs_of(1000, 1)
    labels, truth = (
        classes_drawn_from(softmax(2 * outputs(at), -1).mean(0), seed)
        for seed, at in enumerate((held, x))
    )
    data = {"inputs": held, "labels": labels}
    calibration = de.calibrate(ensemble, state, data, method=None, conformal="lac", level=0.8)
    sets = ensemble.predict(state, x, calibration=calibration).sets
    assert coverage_of_sets(sets, truth) > 0.77


def test_intervals_of_quantiles_hold_the_target_as_often_as_asked():
    ensemble, state, outputs = linear(de.losses.quantiles((0.1, 0.5, 0.9)), 3)
    held, x = inputs_of(2000, 0), inputs_of(2000, 1)
    labels, truth = (
        outputs(at)[..., 1].mean(0) + np.random.default_rng(len(at) + seed).normal(size=len(at))
        for seed, at in enumerate((held, x))
    )
    data = {"inputs": held, "labels": labels}
    calibration = de.calibrate(ensemble, state, data, conformal="cqr", level=0.8)
    assert calibration.method is None  # Quantiles have no variance to scale.
    low, high = ensemble.predict(state, x, calibration=calibration).interval
    assert coverage_of_intervals(low, high, truth) == pytest.approx(0.8, abs=0.04)


def test_a_calibration_holds_after_a_round_trip_through_json_and_for_its_prediction_alone():
    ensemble, state, _ = linear(de.losses.categorical(CLASSES), CLASSES)
    data = {"inputs": inputs_of(60, 0), "labels": np.arange(60) % CLASSES}
    calibration = de.calibrate(ensemble, state, data, conformal="aps", level=0.8)
    again = de.Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    x = inputs_of(32, 1)
    p, q = (ensemble.predict(state, x, calibration=each) for each in (calibration, again))
    np.testing.assert_array_equal(p.mean, q.mean)
    np.testing.assert_array_equal(p.sets, q.sets)
    assert q.first(7).sets.shape == (7, CLASSES)

    copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    later, _ = ensemble.update(copy, {"inputs": x, "labels": np.zeros(32, int)})
    fewer = de.select_members(state, [0, 2])
    seeded, other, _ = linear(de.losses.categorical(CLASSES), CLASSES, seed=1)
    rest, its, _ = linear(de.losses.one_vs_rest(CLASSES), CLASSES)
    for by, at, told in (
        (ensemble, later, "step 0 in place of 1"),
        (ensemble, fewer, r"member_ids \(0, 1, 2\) in place of \(0, 2\)"),
        (seeded, other, "seed 0 in place of 1"),
        (rest, its, "objective 'categorical' in place of 'one_vs_rest'"),
    ):
        with pytest.raises(UserError, match=f"was fitted for another prediction: {told}"):
            by.predict(at, x, calibration=calibration)


@pytest.mark.parametrize(
    "objective",
    [de.losses.gaussian(), de.losses.squared_error(), de.losses.quantiles((0.1, 0.5, 0.9))],
    ids=lambda objective: objective.name,
)
def test_a_prediction_has_what_a_conformal_rule_of_its_objective_reads(objective):
    distribution, outputs = objective.distribution, objective.num_outputs
    prediction = distribution.predict(np.ones((2, 4, outputs), np.float32))
    members = jax.vmap(distribution.from_outputs)(np.ones((2, 1, 4, outputs), np.float32))
    summary = distribution.summary(distribution.pool(members))
    shown = distribution.shown(jax.tree.map(np.asarray, summary))
    found = distribution.shown_of(prediction)
    assert {*found} == {*shown}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), dict(found), dict(shown))
