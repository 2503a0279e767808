"""The best few members of an ensemble, and weights of members in every pool."""

import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from scipy.stats import norm
from sklearn.datasets import load_digits

import dist_ens as de
import test_trust
from commands import dist_ens
from dist_ens.data import ArraySplit
from dist_ens.evaluation.conformal import jackknife_plus
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import Examples
from dist_ens.evaluation.more_members import gain_of_more
from dist_ens.evaluation.selection import METHODS
from dist_ens.experiment import open_source
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.metrics import bootstrap_weights
from dist_ens.metrics.pooling import mean_of_members
from dist_ens.report.facts import listed_weights, told_of_more

ROWS, CLASSES = 60, 3
LEVELS = (0.1, 0.5, 0.9)
AUTOGLUON = json.loads((pathlib.Path(__file__).parent / "selected_by_autogluon.json").read_text())
pytestmark = pytest.mark.quick


def tabled(outputs, objective=None, **options):
    """An ensemble whose members' outputs for the rows of the identity are a table, and its state.

    With `noise`, each prediction adds random numbers of this size, as dropout does.
    """
    noise = options.pop("noise", 0.0)

    def apply(params, model_state, inputs, key, train):
        found = inputs @ params["w"]
        return found + noise * jax.random.normal(key, found.shape), model_state

    network = (lambda key, inputs: ({"w": np.zeros_like(outputs[0])}, ())), apply
    objective = objective or de.losses.categorical(outputs.shape[-1])
    count = options.pop("num_members", len(outputs))
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=count, **options)
    return ensemble, ensemble.state_of([{"w": table} for table in outputs], [()] * count)


def drawn(seed, members, width=CLASSES, noise=1.5, rows=ROWS):
    """Outputs of members that know more or less of the labels, and the labels."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=(rows, width))
    own = noise * (0.5 + np.arange(members) / members)
    outputs = truth + own[:, None, None] * random.normal(size=(members, rows, width))
    labels = truth.argmax(-1) if width > 1 else truth[:, 0]
    return outputs.astype(np.float32), labels


def data_of(labels):
    return {"inputs": np.eye(len(labels), dtype=np.float32), "labels": labels}


def score_of(metric, predictions, labels):
    """A lower-is-better score of a pooled prediction in float64."""
    if metric == "rmse":
        return np.sqrt(np.square(predictions - labels).mean())
    if metric == "nll":
        return -np.log(predictions[np.arange(len(labels)), labels]).mean()
    return -(predictions.argmax(-1) == labels).mean()


def caruana(predictions, labels, metric, size):
    """Ensemble selection with replacement, from the paper: members in order, and scores."""
    chosen, path = [], []
    for _ in range(size):
        pools = [predictions[[*chosen, member]].mean(0) for member in range(len(predictions))]
        scores = [round(score_of(metric, pool, labels), 8) for pool in pools]
        chosen.append(scores.index(min(scores)))  # The first of those that are tied.
        path.append(min(scores))
    return chosen, path


def members_of(outputs):
    outputs = outputs.astype(np.float64)
    return softmax(outputs, -1) if outputs.shape[-1] > 1 else outputs[..., 0]


def selected(outputs, labels, **options):
    objective = None if outputs.shape[-1] > 1 else de.losses.squared_error()
    ensemble, state = tabled(outputs, objective)
    return de.select(ensemble, state, data_of(labels), **options)


@pytest.mark.parametrize(("members", "size"), [(8, 5), (3, 11), (1, 4), (12, 1)])
@pytest.mark.parametrize("metric", ["nll", "accuracy", "rmse"])
def test_greedy_makes_the_choices_of_the_paper_also_with_ties_and_more_choices_than_members(
    metric, members, size
):
    outputs, labels = drawn(members + size, members, 1 if metric == "rmse" else CLASSES)
    order, path = caruana(members_of(outputs), labels, metric, size)
    if metric == "accuracy" and members > 3:  # It has many ties, since it counts examples.
        scores = [score_of(metric, each, labels) for each in members_of(outputs)]
        assert len({*np.round(scores, 8)}) < members
    found = selected(outputs, labels, size=size, metric=metric)
    assert list(found.choices) == order
    np.testing.assert_allclose(found.path, np.abs(path), rtol=1e-5, atol=1e-6)
    counts = np.bincount(order, minlength=members) / size
    assert list(found.member_ids) == np.flatnonzero(counts).tolist()
    np.testing.assert_allclose(found.weights, counts[counts > 0], rtol=1e-12)


@pytest.mark.parametrize("case", AUTOGLUON["cases"], ids=lambda case: f"seed_{case['seed']}")
def test_greedy_makes_the_choices_of_autogluon(case):
    # The file was written by autogluon.core 1.6.3 for the predictions that `drawn` makes.
    outputs, labels = drawn(case["seed"], case["members"], case["width"])
    assert np.float64(outputs).sum() == pytest.approx(case["sum"], abs=1e-9)
    found = selected(outputs, labels, size=case["size"], metric=case["metric"])
    assert list(found.choices) == case["order"]
    weights = np.zeros(case["members"])
    weights[list(found.member_ids)] = found.weights
    np.testing.assert_allclose(weights, case["weights"], atol=1e-9)
    np.testing.assert_allclose(found.path, case["trajectory"], atol=2e-6)


def test_of_equal_members_the_first_is_chosen_and_chosen_again():
    outputs, labels = drawn(0, 4)
    best = selected(outputs, labels, size=1).choices[0]
    others = np.delete(outputs, best, axis=0)
    outputs = np.stack([others[0], outputs[best], outputs[best], others[1], outputs[best]])
    for method in ("greedy", "top"):
        assert selected(outputs, labels, size=1, method=method).member_ids == (1,)
    assert not {2, 4} & {*selected(outputs, labels, size=9).choices}


def test_top_takes_the_best_members_with_equal_weights():
    outputs, labels = drawn(3, 6)
    own = [score_of("nll", each, labels) for each in members_of(outputs)]
    found = selected(outputs, labels, size=3, method="top")
    assert list(found.choices) == np.argsort(own)[:3].tolist()
    assert found.member_ids == tuple(sorted(found.choices))
    assert found.weights == pytest.approx([1 / 3] * 3)
    pool = members_of(outputs)[list(found.choices)].mean(0)
    assert found.path[-1] == pytest.approx(score_of("nll", pool, labels), rel=1e-5)
    assert len(selected(outputs, labels, size=10, method="top").member_ids) == 6


@pytest.mark.parametrize("metric", ["nll", "rmse"])
def test_stacking_finds_the_weights_of_the_lowest_score(metric):
    outputs, labels = drawn(5, 6, 1 if metric == "rmse" else CLASSES)
    found = selected(outputs, labels, metric=metric, method="stacking")
    predictions = members_of(outputs)

    def score(weights):
        return score_of(metric, np.tensordot(weights, predictions, 1), labels)

    best = minimize(
        score,
        np.full(6, 1 / 6),
        bounds=[(1e-12, 1)] * 6,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.path[-1] == pytest.approx(best.fun, rel=1e-5)
    weights = np.zeros(6)
    weights[list(found.member_ids)] = found.weights
    np.testing.assert_allclose(weights, best.x, atol=5e-3)
    assert {*found.member_ids} == {*np.flatnonzero(best.x > 1e-4)}
    assert len(found.member_ids) < 6 or metric == "rmse"
    greedy = selected(outputs, labels, size=20, metric=metric)
    assert found.path[-1] <= min(greedy.path) + 1e-6


def test_members_that_diverged_or_are_frozen_are_never_chosen():
    outputs, labels = drawn(1, 5)
    outputs[0, 7] = np.nan
    ensemble, state = tabled(outputs, failure_policy="freeze")
    frozen = np.arange(5) == 1
    state = ensemble.with_record(state)
    state = state._replace(failures=state.failures._replace(is_frozen=jax.numpy.array(frozen)))
    for method in METHODS:
        found = de.select(ensemble, state, data_of(labels), size=9, method=method)
        assert {*found.member_ids} <= {2, 3, 4}, method
        assert np.isfinite(found.path).all()
    ensemble, state = tabled(np.full_like(outputs, np.nan))
    with pytest.raises(UserError, match=r"None of the 5 members can be chosen: each one predicts"):
        de.select(ensemble, state, data_of(labels))


def test_members_predict_once_and_examples_have_their_weights(monkeypatch):
    outputs, labels = drawn(2, 6)
    calls = []
    batches = Evaluator._batches
    monkeypatch.setattr(Evaluator, "_batches", lambda *a: calls.append(1) or batches(*a))
    ensemble, state = tabled(outputs)
    data = data_of(labels) | {"weights": np.arange(ROWS) % 3 * 1.0}
    found = de.select(ensemble, state, data, size=4, batch_size=25)
    assert len(calls) == 1
    counted = data["weights"] > 0
    twice = np.flatnonzero(counted).repeat(data["weights"][counted].astype(int))
    again = {"inputs": data["inputs"][twice], "labels": labels[twice]}
    assert found.choices == de.select(ensemble, state, again, size=4).choices


def test_the_chosen_members_are_trained_on():
    outputs, labels = drawn(4, 8)
    ensemble, state = tabled(outputs)
    chosen = de.select(ensemble, state, data_of(labels), size=3)
    assert chosen.state.member_id.tolist() == list(chosen.member_ids)
    result = de.fit(
        chosen.ensemble, data_of(labels), state=chosen.state, steps=2, batch_size=20, progress=False
    )
    assert result.state.member_id.tolist() == list(chosen.member_ids)
    assert result.state.step.tolist() == [2] * len(chosen.member_ids)
    scores = de.evaluate(ensemble, chosen.state, data_of(labels), weights=chosen.weights)
    assert scores.ensemble["nll"] == pytest.approx(chosen.path[-1], rel=1e-5)


def test_a_selection_that_cannot_be_made_is_refused_in_a_sentence():
    outputs, labels = drawn(0, 4)
    ensemble, state = tabled(outputs)
    data = data_of(labels)
    for options, sentence in [
        ({"size": 0}, "size is 0. Give a whole number from 1"),
        ({"metric": "nl"}, "metric='nl' is unknown. Did you mean 'nll'"),
        ({"metric": "entropy"}, "metric='entropy' is unknown. Choose one of accuracy, nll"),
        ({"method": "best"}, "method='best' is unknown"),
        ({"metric": "accuracy", "method": "stacking"}, "Stacking follows the slope of a mean"),
        ({"metric": "ece", "method": "stacking"}, "Stacking follows the slope of a mean"),
    ]:
        with pytest.raises(UserError, match=sentence):
            de.select(ensemble, state, data, **options)
    grouped = tabled(outputs, num_groups=2)
    both = {"inputs": np.stack([data["inputs"]] * 2), "labels": np.stack([labels] * 2)}
    both = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in both.items()}
    with pytest.raises(UserError, match="this ensemble has 2 groups"):
        de.select(*grouped, both)


# Weights in every pool.

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
    assert ensemble.programs.predict._cache_size() == 1
    assert ensemble.programs.evaluation["scores"][1].score_of_device._cache_size() == 1


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


def test_weighted_means_ignore_what_does_not_count():
    values = np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 6.0]])
    np.testing.assert_array_equal(mean_of_members(values, np.array([1.0, 0, 3.0])), [2.5, 5.0])
    mask = np.array([[1.0, 0], [0, 0], [0, 1.0]])
    np.testing.assert_array_equal(mean_of_members(values, mask), [1.0, 6.0])
    np.testing.assert_array_equal(mean_of_members(jax.numpy.array(values[::2])), [2.0, 4.0])


# The choice that a run keeps.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("chosen") / "run"
    data = test_trust.DIGITS | {"validation": 0.2}
    checkpoint = {"every_steps": 10, "keep": 5}
    options = {"num_members": 5, "steps": 20, "steps_per_call": 10, "checkpoint": checkpoint}
    train(test_trust.experiment(data, **options), workdir)
    return workdir


def command(*words):
    ended = dist_ens(*map(str, words))
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stdout.split())


@pytest.mark.slow
def test_a_choice_is_kept_in_the_run_and_used_until_all_members_are(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    x = load_digits().images[:9]
    np.save(tmp_path / "x.npy", x)
    predict = ["predict", f"--workdir={run}", f"--input={tmp_path / 'x.npy'}"]
    predict.append(f"--output={tmp_path / 'p.npz'}")
    opened = de.load(run)
    plain = opened.predict(x).mean
    of_all = opened.evaluate().ensemble["nll"]
    command("evaluate", f"--workdir={run}")
    told = command("members", run, "choose", "--size=3")
    source = open_source(opened.run.experiment.data)
    valid = Examples(source.valid, source.spec)
    chosen = de.select(opened.ensemble, opened.state, valid, size=3)
    assert 1 < len(chosen.member_ids) < 5
    listed = listed_weights(chosen.member_ids, chosen.weights)
    assert f"Chose {len(chosen.member_ids)} of 5 members of step 20, with weights: {listed}" in told
    # The page says that its scores were made before.
    command("report", run, f"--output={tmp_path / 'report.html'}")
    page = (tmp_path / "report.html").read_text()
    assert "5 more members would gain" in page
    assert "by greedy selection on the validation NLL; these scores were made before" in page
    opened = de.load(run)
    found = opened.predict(x)
    expected = opened.ensemble.predict(chosen.state, x, weights=chosen.weights)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)
    assert np.abs(np.asarray(found.mean) - plain).max() > 1e-3
    note = f"The ensemble is the chosen members, with weights: {listed}."
    assert note in command(*predict)
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["probs"], expected.mean, atol=1e-6)
    file = tmp_path / "scores.json"
    words = [f"--workdir={run}", f"--json={file}", "--calibration=temperature", "--conformal=lac"]
    told = command("evaluate", *words)
    assert note in told
    scores = json.loads(file.read_text())
    by_python = opened.evaluate()
    assert scores["test"]["nll"] == pytest.approx(by_python.ensemble["nll"], rel=1e-5)
    assert scores["test"]["nll"] != pytest.approx(of_all, rel=1e-4)
    assert scores["member_weights"] == pytest.approx(by_python.member_weights)
    assert {*scores["left_out_members"]} == {*range(5)} - {*chosen.member_ids}
    page = (run / "report.html").read_text()
    assert f"<dd>{listed}</dd>" in page
    assert "made before" not in page
    assert "more members would gain" not in page
    # A calibration of the chosen members is used with them, and refused with others.
    found = opened.predict(x, calibrated=True, conformal=0.9)
    command(*predict, "--calibrated", "--conformal=0.9")
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["probs"], found.mean, atol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npz")["sets"], found.sets)
    assert "All members of step 20 predict again" in command("members", run, "choose", "--size=all")
    np.testing.assert_array_equal(de.load(run).predict(x).mean, plain)
    with pytest.raises(UserError, match="The calibration was fitted for another prediction"):
        de.load(run).predict(x, calibrated=True)
    assert json.loads((run / "answers.json").read_text())["steps"]["20"]["answers"]["choice"] == {}
    assert command("members", run, "verify").endswith("Step 20: sound.")


@pytest.mark.slow
def test_a_choice_is_of_one_step_and_its_members(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    x = load_digits().images[:9]
    command("members", run, "choose", "--step=10", "--size=2", "--method=top", "--metric=accuracy")
    at_10 = de.load(run, step=10)
    assert len(at_10.choice.member_ids) == 2
    assert at_10.choice.weights == pytest.approx([0.5, 0.5])
    newest = de.load(run)
    assert newest.choice.member_ids == ()
    note = "All members of step 20 are used, because the choice of members is one of step 10."
    assert newest.choice.note.startswith(note)
    assert note in command("evaluate", f"--workdir={run}")
    np.testing.assert_array_equal(newest.predict(x).mean, de.load(finished).predict(x).mean)
    # Members that are asked for by their ids count equally.
    two = de.load(run, step=10, members=[0, 4])
    assert two.choice.member_ids == ()
    # The same step of other members has no choice.
    other = tmp_path / "other"
    copy_members([finished], other, member_ids=[0, 1, 2], step=10)
    shutil.copy(run / "answers.json", other / "answers.json")
    assert de.load(other).choice.member_ids == ()


@pytest.mark.slow
def test_a_choice_needs_validation_data_and_a_number(finished, tmp_path):
    workdir = tmp_path / "run"
    train(test_trust.experiment(test_trust.DIGITS, num_members=2, steps=2), workdir)
    ended = dist_ens("members", str(workdir), "choose")
    assert ended.returncode == 2
    assert "Members are chosen on validation data, and the run held none out" in ended.stderr
    ended = dist_ens("members", str(finished), "choose", "--size=few")
    assert "--size='few' is no number of choices. Try 5, or all." in ended.stderr


# How many members are worth it.


def test_the_gain_from_more_members_is_covered_by_its_interval():
    # Squared errors of an example: bias + b / M and noise that all ensembles of it share in part.
    sizes, rows, b, covered = [1, 2, 3, 4, 6, 8], 300, 0.8, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        shared = random.exponential(0.5, size=rows)
        slope = b * random.exponential(size=rows)
        own = random.normal(0, 0.05, size=(len(sizes), rows))
        values = shared + slope / np.array(sizes)[:, None] + own
        drawn = values @ bootstrap_weights(rows, 200, seed).T / rows
        found = gain_of_more(sizes, drawn, values.mean(1), "lower")
        assert found["more"] == 8
        covered += found["low"] <= b / 16 <= found["high"]
    assert 0.9 <= covered / 200 <= 0.99


def test_more_members_gain_in_accuracy_and_nothing_is_said_of_few():
    sizes, draws = [1, 2, 4, 8], np.linspace(-0.01, 0.01, 101)
    scores = 0.9 - 0.16 / np.array(sizes)
    found = gain_of_more(sizes, scores[:, None] + draws, scores, "higher")
    assert found["gain"] == pytest.approx(0.01)  # 0.16 / 8 - 0.16 / 16
    assert told_of_more({"accuracy": found}) == [
        "8 more members would gain 0.0100 ± 0.0000 accuracy."
    ]
    some = {"more": 8, "gain": 0.0002, "low": -0.0008, "high": 0.0012}
    assert told_of_more({"nll": some}) == [
        "8 more members would gain nothing that can be measured: 0.0002 ± 0.0010 NLL."
    ]
    assert gain_of_more([1, 2, 3], scores[:3, None] + draws, scores[:3], "lower") is None
    assert gain_of_more(sizes, np.array([]), scores, "lower") is None
    scores[1] = np.nan
    assert gain_of_more(sizes, scores[:, None] + draws, scores, "lower") is None


def scored(members, **options):
    outputs, labels = drawn(0, members, rows=400)
    ensemble, state = tabled(outputs)
    evaluator = Evaluator(ensemble, 200, **options)
    return evaluator.evaluate(
        state, ArraySplit(np.eye(400, dtype=np.float32), labels), by_size=True
    )


def test_scores_hold_the_gain_from_more_members_or_that_nothing_can_be_said():
    scores = scored(8).scores(intervals=True)
    gain = scores.to_dict()["more_members"]["nll"]
    assert gain["more"] == 8
    assert 0 < gain["low"] < gain["gain"] < gain["high"]
    assert scored(8).scores().more_members is None
    assert "more_members" not in scored(8).scores().to_dict()
    assert scored(2).scores(intervals=True).to_dict()["more_members"] == {}
    assert scored(8, weights=np.arange(8)).scores(intervals=True).more_members is None
