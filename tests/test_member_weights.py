"""Weights of members: in predictions, scores and calibrations, against NumPy."""

import json

import jax
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm

import dist_ens as de
from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation.conformal import ConformalRule, jackknife_plus
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.fit_calibration import fit_rule
from dist_ens.evaluation.out_of_bag import held_out_predictions
from dist_ens.ground.errors import UserError
from dist_ens.metrics.pooling import mean_of_members
from tabled import CLASSES, ROWS, data_of, drawn, members_of, score_of, tabled

LEVELS = (0.1, 0.5, 0.9)
WEIGHTS = np.array([0.5, 0.0, 0.2, 0.3])
OBJECTIVES = {
    "categorical": (de.losses.categorical(CLASSES), CLASSES),
    "gaussian": (de.losses.gaussian(), 2),
    "squared_error": (de.losses.squared_error(), 1),
    "quantiles": (de.losses.quantiles(LEVELS), len(LEVELS)),
}


def entropy(p):
    return -(p * np.log(p)).sum(-1)


def pooled_by_hand(name, outputs, w):
    """Mean, total, aleatoric and epistemic of outputs [members, batch, samples, ...] in float64."""
    outputs = outputs.astype(np.float64)
    if name == "categorical":
        p = softmax(outputs, -1)
        mean = np.einsum("m,mbsc->bc", w, p) / p.shape[2]
        aleatoric = np.einsum("m,mbs->b", w, entropy(p)) / p.shape[2]
        return mean, entropy(mean), aleatoric, entropy(mean) - aleatoric
    if name == "quantiles":
        quantiles = np.sort(outputs, -1).mean(2)
        median = np.einsum("m,mb->b", w, quantiles[..., 1])
        spread = np.einsum("m,mb->b", w, np.square(quantiles[..., 1] - median))
        return median, None, None, spread
    mean = np.einsum("m,mbs->b", w, outputs[..., 0]) / outputs.shape[2]
    distance = np.square(outputs[..., 0] - mean[:, None])
    epistemic = np.einsum("m,mbs->b", w, distance) / outputs.shape[2]
    if name == "squared_error":
        return mean, epistemic, None, epistemic
    variance = np.log1p(np.exp(outputs[..., 1])) + 1e-6
    aleatoric = np.einsum("m,mbs->b", w, variance) / outputs.shape[2]
    return mean, aleatoric + epistemic, aleatoric, epistemic


@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_weighted_prediction_is_the_mixture_of_numpy(name, samples):
    objective, width = OBJECTIVES[name]
    ensemble, state = tabled(
        drawn(6, 4, width)[0], objective, dropout_samples=samples, noise=0.3 if samples else 0.0
    )
    x = np.eye(ROWS, dtype=np.float32)
    outputs = np.asarray(ensemble.apply(state, x))
    outputs = outputs if samples else outputs[:, :, None]
    p = ensemble.predict(state, x, weights=3 * WEIGHTS)  # They are normalised.
    expected = pooled_by_hand(name, outputs, WEIGHTS)
    for field, value in zip(("mean", "total", "aleatoric", "epistemic"), expected, strict=True):
        if value is None:
            assert getattr(p, field) is None
        else:
            np.testing.assert_allclose(getattr(p, field), value, rtol=1e-6, atol=1e-6)
    assert p.members.shape[0] == 4
    equal, plain = ensemble.predict(state, x, weights=[1] * 4), ensemble.predict(state, x)
    for field in ("mean", "total", "aleatoric", "epistemic", "std"):
        if getattr(plain, field) is not None:
            np.testing.assert_allclose(
                getattr(equal, field), getattr(plain, field), rtol=1e-6, atol=1e-6
            )


def means_by_hand(name, outputs, labels, w):
    """Some scores of the weighted pool in float64, from outputs [members, batch, samples, ...]."""
    mean, total, *_ = pooled_by_hand(name, outputs, w)
    if name == "categorical":
        return {
            "nll": score_of("nll", mean, labels),
            "brier": np.square(mean - np.eye(CLASSES)[labels]).sum(-1).mean(),
            "aleatoric": pooled_by_hand(name, outputs, w)[2].mean(),
        }
    found = {"rmse": np.sqrt(np.square(mean - labels).mean())}
    if name == "quantiles":
        return found
    parts = np.einsum("m,s->ms", w, np.full(outputs.shape[2], 1 / outputs.shape[2])).ravel()
    means = outputs[..., 0].transpose(0, 2, 1).reshape(len(parts), -1).astype(np.float64)
    raw = outputs[..., 1] if name == "gaussian" else np.full_like(outputs[..., 0], -np.inf)
    variances = np.log1p(np.exp(raw.transpose(0, 2, 1).reshape(len(parts), -1).astype(float)))
    variances += 1e-6 if name == "gaussian" else 0

    def distance(gap, variance):
        s = np.sqrt(np.maximum(variance, 1e-300))
        return gap * (2 * norm.cdf(gap / s) - 1) + 2 * s * norm.pdf(gap / s)

    to_target = parts @ distance(labels - means, variances)
    pairs = distance(means[:, None] - means, variances[:, None] + variances)
    found["crps"] = (to_target - np.einsum("i,j,ijb->b", parts, parts, pairs) / 2).mean()
    if name == "gaussian":
        densities = norm.pdf(labels, means, np.sqrt(variances))
        found["mixture_nll"] = -np.log(parts @ densities).mean()
        found["nll"] = -norm.logpdf(labels, mean, np.sqrt(total)).mean()
        pit = norm.cdf(labels, mean, np.sqrt(total))
        found["coverage"] = (np.abs(pit - 0.5) <= 0.45).mean()
    return found


@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_weighted_scores_are_those_of_the_mixture_of_numpy(name, samples):
    objective, width = OBJECTIVES[name]
    tables, _ = drawn(7, 4, width)
    labels = drawn(7, 4, CLASSES if name == "categorical" else 1)[1]
    ensemble, state = tabled(
        tables, objective, dropout_samples=samples, noise=0.3 if samples else 0.0
    )
    data = data_of(labels)
    outputs = np.asarray(ensemble.apply(state, data["inputs"]))
    outputs = outputs if samples else outputs[:, :, None]
    scores = de.evaluate(ensemble, state, data, weights=WEIGHTS, batch_size=ROWS).ensemble
    expected = means_by_hand(name, outputs, labels, WEIGHTS)
    assert expected.items() <= scores.items() | expected.items()
    for metric, value in expected.items():
        assert scores[metric] == pytest.approx(value, rel=2e-6, abs=1e-6), metric
    # Equal weights are no weights.
    equal = de.evaluate(ensemble, state, data, weights=[2] * 4, batch_size=ROWS).ensemble
    assert equal == pytest.approx(de.evaluate(ensemble, state, data).ensemble, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("pooling", ["probs", "logits", "vote", "mixture"])
def test_a_member_of_weight_0_is_absent_even_if_it_predicts_nan(pooling):
    name = "gaussian" if pooling == "mixture" else "categorical"
    objective, width = OBJECTIVES[name]
    objective = de.losses.Objective(
        **{**vars(objective), "distribution": objective.distribution.with_pooling(pooling)}
    )
    tables, _ = drawn(8, 4, width)
    labels = drawn(8, 4, CLASSES if name == "categorical" else 1)[1]
    tables[1] = np.nan
    ensemble, state = tabled(tables, objective)
    three, rest = state.select([0, 2, 3]), WEIGHTS[[0, 2, 3]]
    data = data_of(labels)
    scores = de.evaluate(ensemble, state, data, weights=WEIGHTS)
    without = de.evaluate(ensemble, three, data, weights=rest)
    assert scores.ensemble == pytest.approx(without.ensemble, rel=1e-5, abs=2e-6, nan_ok=True)
    assert scores.mean_member == pytest.approx(without.mean_member, rel=1e-5, nan_ok=True)
    assert scores.left_out == [1]
    assert "member 2, weight 0.2" in repr(scores)
    assert "member 1, left out" in repr(scores)
    p = ensemble.predict(state, data["inputs"], weights=WEIGHTS)
    q = ensemble.predict(three, data["inputs"], weights=rest)
    for field in ("mean", "total", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(p, field), getattr(q, field), rtol=1e-5, atol=1e-6)


def test_a_pair_of_members_disagrees_by_the_product_of_their_weights():
    outputs = np.zeros((3, 2, 2), np.float32)
    outputs[0, :, 0] = outputs[1, :, 0] = outputs[2, :, 1] = 5
    ensemble, state = tabled(outputs)
    scores = de.evaluate(ensemble, state, data_of(np.zeros(2, int)), weights=[0.5, 0.3, 0.2])
    # Of the pairs 0-1, 0-2 and 1-2, with 0.15, 0.10 and 0.06, the last two disagree.
    assert scores.ensemble["disagreement"] == pytest.approx(0.16 / 0.31, rel=1e-5)


def test_other_weights_are_not_compiled_again():
    outputs, labels = drawn(0, 4)
    ensemble, state = tabled(outputs)
    data = data_of(labels)
    for weights in (WEIGHTS, WEIGHTS[::-1], [1, 0, 0, 0]):
        ensemble.predict(state, data["inputs"], weights=weights)
        de.evaluate(ensemble, state, data, weights=weights)
    assert ensemble.programs.predict.program._cache_size() == 1
    assert ensemble.programs.evaluation["scores"][1].score_of_device._cache_size() == 1


def test_weights_mean_the_same_on_every_layout_and_in_waves():
    outputs, labels = drawn(0, 4)
    data, one = data_of(labels), jax.devices()[:1]
    found = []
    for options in (
        {},
        {"layout": de.Layout.make(4, devices=one)},
        {"layout": de.Layout.make(4, devices=one), "waves": 2},
    ):
        ensemble, state = tabled(outputs, **options)
        p = ensemble.predict(state, data["inputs"], weights=WEIGHTS)
        scores = de.evaluate(ensemble, state, data, weights=WEIGHTS).ensemble
        found.append((np.asarray(p.mean), scores))
    for mean, scores in found[1:]:
        np.testing.assert_allclose(mean, found[0][0], atol=1e-6)
        assert scores == pytest.approx(found[0][1], abs=1e-6)


def test_weights_that_do_not_fit_are_refused_in_a_sentence():
    outputs, labels = drawn(0, 4)
    ensemble, state = tabled(outputs)
    data = data_of(labels)
    for weights, sentence in [
        ([1, 2], r"weights have the shape \[2\], and the members are 4"),
        ([1, 1, -1, 1], "Give finite numbers of at least 0"),
        ([0, 0, 0, 0], "Give finite numbers of at least 0"),
        ([1, np.nan, 1, 1], "Give finite numbers of at least 0"),
        (["a", "b", "c", "d"], "Give one number a member"),
    ]:
        for door in (
            lambda w: ensemble.predict(state, data["inputs"], weights=w),
            lambda w: de.evaluate(ensemble, state, data, weights=w),
            lambda w: de.calibrate(ensemble, state, data, weights=w),
        ):
            with pytest.raises(UserError, match=sentence):
                door(weights)
    groups = tabled(outputs, num_groups=2)
    twice = {name: np.concatenate([leaf] * 2) for name, leaf in data.items()}
    with pytest.raises(UserError, match="weights are those of one pool, and this ensemble has 2"):
        de.evaluate(*groups, twice, weights=WEIGHTS)
    with pytest.raises(UserError, match="this ensemble has 2 groups"):
        groups[0].predict(groups[1], data["inputs"], weights=WEIGHTS)


def test_a_loss_function_has_weighted_predictions_but_no_weighted_scores():
    outputs, _ = drawn(0, 4, 1)

    def loss(params, model_state, batch, key):
        return jax.numpy.square(batch["x"] @ params["w"]).mean(), (model_state, {})

    ensemble, state = tabled(outputs, loss)
    x = np.eye(ROWS, dtype=np.float32)
    p = ensemble.predict(state, x, weights=WEIGHTS)
    mean = np.tensordot(WEIGHTS, outputs.astype(np.float64), 1)
    np.testing.assert_allclose(p.mean, mean, atol=1e-6)
    spread = np.tensordot(WEIGHTS, np.square(outputs.astype(np.float64) - mean), 1)
    np.testing.assert_allclose(p.epistemic, spread, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="weights pool predictions, and the loss of this ensemble"):
        de.evaluate(ensemble, state, {"x": x}, weights=WEIGHTS)


def test_a_distribution_without_weights_pools_equally_and_refuses_weights():
    class Old(de.losses.Point):
        def pool(self, predictions):
            return super().pool(predictions)

    objective = de.losses.Objective(**{**vars(de.losses.squared_error()), "distribution": Old()})
    outputs, labels = drawn(0, 4, 1)
    ensemble, state = tabled(outputs, objective)
    rmse = de.evaluate(ensemble, state, data_of(labels)).ensemble["rmse"]
    assert rmse == pytest.approx(score_of("rmse", members_of(outputs).mean(0), labels), rel=1e-5)
    with pytest.raises(UserError, match="Old pools all members equally. Give its methods pool"):
        de.evaluate(ensemble, state, data_of(labels), weights=WEIGHTS)


def test_calibrations_are_of_the_weighted_pool_and_of_no_other():
    outputs, _ = drawn(0, 4)
    labels = np.random.default_rng(1).integers(0, CLASSES, ROWS)  # The members know nothing.
    ensemble, state = tabled(3 * outputs)
    data = data_of(labels)
    made = de.calibrate(ensemble, state, data, conformal="lac", level=0.8, weights=WEIGHTS)
    pooled = np.tensordot(WEIGHTS, softmax(3 * outputs.astype(np.float64), -1), 1)
    temperature = made.parameters["temperature"]
    expected = softmax(np.log(pooled) / temperature, -1)
    p = ensemble.predict(state, data["inputs"], weights=WEIGHTS, calibration=made)
    np.testing.assert_allclose(p.mean, expected, atol=1e-5)
    scores = np.sort(1 - pooled[np.arange(ROWS), labels])
    limit = scores[int(np.ceil((ROWS + 1) * 0.8)) - 1]
    np.testing.assert_array_equal(p.sets, 1 - pooled <= limit + 1e-6)
    only = de.calibrate(ensemble, state.select([0, 2, 3]), data, weights=[5, 2, 3])
    assert only.parameters["temperature"] == pytest.approx(temperature, rel=1e-4)
    # Weights that are a multiple are the same, and so is the absence of a member of weight 0.
    again = de.Calibration.from_dict(json.loads(json.dumps(made.to_dict())))
    ensemble.predict(state, data["inputs"], weights=2 * WEIGHTS, calibration=again)
    for other in (None, WEIGHTS[::-1]):
        with pytest.raises(UserError, match="The calibration was fitted for another prediction"):
            ensemble.predict(state, data["inputs"], weights=other, calibration=made)
    some = de.calibrate(ensemble, state, data, weights=[1, 2, 3, 4])
    with pytest.raises(UserError, match=r"another prediction: weights \(0.1, 0.2, 0.3, 0.4\)"):
        ensemble.predict(state, data["inputs"], weights=[4, 3, 2, 1], calibration=some)
    equal = de.calibrate(ensemble, state, data, weights=[3] * 4)
    ensemble.predict(state, data["inputs"], calibration=equal)


def test_jackknife_intervals_centre_on_weighted_means():
    random = np.random.default_rng(0)
    mask, residuals = random.random((4, 30)) < 0.6, random.random(30)
    mask[0] = True
    points, weights = random.normal(size=(4, 5)), np.array([0.1, 0.2, 0.3, 0.4])
    low, high = jackknife_plus(residuals, mask, points, 0.8, weights)
    rank = int(np.ceil(31 * 0.8))
    for row in range(5):
        mu = np.array([weights[m] @ points[m, row] / weights[m].sum() for m in mask.T])
        assert high[row] == pytest.approx(np.sort(mu + residuals)[rank - 1])
        assert low[row] == pytest.approx(-np.sort(residuals - mu)[rank - 1])


def test_out_of_bag_predictions_and_residuals_are_weighted():
    outputs, labels = drawn(9, 4, 1)
    ensemble, state = tabled(outputs, de.losses.squared_error())
    split, random = ArraySplit(np.eye(ROWS, dtype=np.float32), labels), np.random.default_rng(0)
    mask = random.random((4, ROWS)) < 0.6
    mask[0] |= ~mask[2:].any(axis=0)
    evaluator = Evaluator(ensemble, 25, Spec((ROWS,), "float32", (), None)).pooling((), WEIGHTS)
    parts = [summary for summary, _ in held_out_predictions(evaluator, state, split, mask)]
    found = np.concatenate([part["mean"] for part in parts])
    pool = mask * WEIGHTS[:, None]
    expected = (pool * outputs[..., 0].astype(np.float64)).sum(0) / pool.sum(0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    rule = fit_rule("jackknife+", 0.8, evaluator, state, split, mask)
    np.testing.assert_allclose(rule.examples["residuals"], np.abs(labels - expected), atol=1e-6)
    again = ConformalRule.from_dict(json.loads(json.dumps(rule.to_dict())))
    x = random.normal(size=(4, 5))
    for one, two in zip(
        again.interval(evaluator.distribution, {}, lambda: x, 0.8),
        jackknife_plus(rule.examples["residuals"], mask, x, 0.8, WEIGHTS),
        strict=True,
    ):
        np.testing.assert_allclose(one, two)


def test_weighted_means_ignore_what_does_not_count():
    values = np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 6.0]])
    np.testing.assert_array_equal(mean_of_members(values, np.array([1.0, 0, 3.0])), [2.5, 5.0])
    mask = np.array([[1.0, 0], [0, 0], [0, 1.0]])
    np.testing.assert_array_equal(mean_of_members(values, mask), [1.0, 6.0])
    np.testing.assert_array_equal(mean_of_members(jax.numpy.array(values[::2])), [2.0, 4.0])
