"""Objectives: each beside a hand computation, and one of a user's in a single class."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import gammaln
from scipy.stats import norm

import networks
from dist_ens import losses
from dist_ens.data import ArraySplit, Spec
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluator, curves_of
from dist_ens.evaluation.out_of_bag import held_out_scores
from dist_ens.evaluation.scoring import evaluate
from dist_ens.layout import BATCHES, Layout
from dist_ens.losses import Distribution, Objective, Prediction
from dist_ens.members import from_functions
from dist_ens.metrics import Metric

pytestmark = pytest.mark.quick

# softplus(RAW) + 1e-6 is 4.
RAW = np.log(np.expm1(4 - 1e-6))


def linear(*shape):
    return from_functions(lambda key: {"w": jax.random.normal(key, shape)}, lambda p, x: x @ p["w"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "outputs", "label", "loss", "scores"),
    [
        # p = (1/4, 3/4): -log(1/4).
        (losses.categorical(2), [0.0, np.log(3)], 0, np.log(4), {"accuracy": 0}),
        (losses.class_mean_categorical(2), [0.0, np.log(3)], 0, np.log(4) / 2, {"accuracy": 0}),
        # sigmoid(0) = 1/2 of class 0, which is not the label, and sigmoid(log 3) = 3/4 of class 1.
        (losses.one_vs_rest(2), [0.0, np.log(3)], 1, np.log(2) + np.log(4 / 3), {"accuracy": 1}),
        # Variance 4, two beside the mean: (log(2 pi 4) + 4 / 4) / 2.
        (losses.gaussian(), [1.0, RAW], 3.0, (np.log(8 * np.pi) + 1) / 2, {"squared_error": 4}),
        # The same times 4 ** 0.5.
        (losses.beta_gaussian(0.5), [1.0, RAW], 3.0, np.log(8 * np.pi) + 1, {"squared_error": 4}),
        (losses.squared_error(), [1.0], 3.0, 4, {"squared_error": 4}),
        # Errors 3, 2 and 1: (0.1 * 3 + 0.5 * 2 + 0.9 * 1) / 3.
        (losses.quantiles((0.1, 0.5, 0.9)), [0.0, 1.0, 2.0], 3.0, 2.2 / 3, {"squared_error": 4}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_objective_has_the_loss_and_scores_worked_by_hand(
    objective, outputs, label, loss, scores
):
    outputs, labels = jnp.array([outputs], jnp.float32), jnp.array([label])
    assert objective.num_outputs == outputs.shape[-1]
    np.testing.assert_allclose(objective.example_loss(outputs, labels), [loss], rtol=1e-5)
    got = objective.training_scores(outputs, labels)
    assert {name: float(values[0]) for name, values in got.items()} == pytest.approx(scores)
    # The distribution reads what the loss trains.
    found = objective.distribution.predict(outputs[None])
    assert found.mean.shape == ((1, 2) if objective.num_classes else (1,))


def test_the_gaussian_loss_is_the_density_of_a_normal_distribution():
    outputs = jax.random.normal(jax.random.key(0), (50, 2)).at[0].set([0, -200])
    targets = jax.random.normal(jax.random.key(1), (50,)).at[0].set(1)
    nll = losses.gaussian_nll(outputs, targets)
    scale = np.sqrt(np.log1p(np.exp(outputs[:, 1], dtype=np.float64)) + 1e-6)
    np.testing.assert_allclose(nll, -norm.logpdf(targets, outputs[:, 0], scale), rtol=1e-5)
    # The least variance is 1e-6: (log(2 pi) - 6 log(10)) / 2 + 1 / 2e-6.
    assert float(nll[0]) == pytest.approx(499_994.0, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        losses.categorical(3),
        losses.gaussian(standardize=True),
        pytest.param(losses.beta_gaussian(0.5), marks=pytest.mark.long),
        pytest.param(losses.quantiles((0.1, 0.5, 0.9)), marks=pytest.mark.long),
    ],
    ids=lambda objective: objective.name,
)
def test_weighted_scores_do_not_depend_on_how_the_set_is_divided(objective):
    random, count = np.random.default_rng(0), 21
    labels = random.integers(0, 3, count) if objective.num_classes else random.normal(size=count)
    data = {
        "inputs": random.normal(size=(count, 4)).astype(np.float32),
        "labels": labels.astype(np.int32 if objective.num_classes else np.float32),
        # Nearly all of the weight is in the last batch of 8.
        "weights": np.where(np.arange(count) < 16, 0.01, random.random(count)).astype(np.float32),
    }
    member = linear(4, objective.num_outputs)
    layout = Layout.make(2, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble = Ensemble(member, optax.identity(), objective, num_members=2, layout=layout)
    state = ensemble.init(data)
    parts, whole = (evaluate(ensemble, state, data, batch_size=size) for size in (8, count))
    assert parts.ensemble == pytest.approx(whole.ensemble, rel=1e-5)
    for found, expected in zip(parts.members, whole.members, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Poisson(Distribution):
    """Counts, whose logarithmic rate is the output: what a user writes in one file."""

    metrics = (
        Metric("nll", label="NLL", unit="nats", direction="lower"),
        Metric("excess", direction="lower", statistics=("squared_error",)),
    )
    uncertainty_statistic = "variance"

    def from_outputs(self, outputs):
        return {"mean": jnp.exp(outputs[..., 0]).mean(axis=0)}

    def pool(self, predictions):
        return {"mean": predictions["mean"].mean(axis=0)}

    def row_statistics(self, prediction, labels):
        rate = prediction["mean"]
        nll = rate - labels * jnp.log(rate) + jax.scipy.special.gammaln(labels + 1)
        return {"nll": nll, "squared_error": jnp.square(labels - rate), "variance": rate}

    def predict(self, outputs, *, has_samples=False):
        rates = jnp.exp(outputs[..., 0])
        rates = rates.mean(axis=1) if has_samples else rates
        mean, epistemic = rates.mean(axis=0), jnp.var(rates, axis=0)
        return Prediction(mean, mean + epistemic, mean, epistemic, rates)


def poisson():
    def loss(outputs, labels):
        return jnp.exp(outputs[..., 0]) - labels * outputs[..., 0]

    return Objective("poisson", loss, Poisson(), lambda outputs, labels: {}, num_outputs=1)


@pytest.mark.slow
def test_a_loss_with_a_distribution_of_a_users_is_one_file():
    objective, random = poisson(), np.random.default_rng(0)
    inputs = random.normal(size=(24, 2)).astype(np.float32)
    counts = ArraySplit(inputs, random.poisson(np.exp(inputs[:, 0])).astype(np.float32))
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble = networks.ensemble_of(linear(2, 1), optax.sgd(0.1), layout, objective)
    state = networks.begin(ensemble, jax.ShapeDtypeStruct((1, 2), np.float32))
    batch = {"inputs": counts.inputs[None], "labels": counts.labels[None]}
    state, metrics = ensemble.update_steps(state, layout.put(batch, BATCHES))
    assert metrics["loss"].shape == (1, 4)
    spec = Spec((2,), "float32", (), None)
    evaluator = Evaluator(ensemble, 8, spec, objective.distribution)
    evaluation = evaluator.evaluate(state, counts, by_size=True)
    scores = evaluation.scores(intervals=True)
    weights = np.asarray(state.params["w"], np.float64)
    rates = np.exp(np.einsum("nf,mfo->mn", counts.inputs, weights))
    y = counts.labels

    def nll(rate):
        return (rate - y * np.log(rate) + gammaln(y + 1)).mean()

    assert scores.ensemble["nll"] == pytest.approx(nll(rates.mean(0)), rel=1e-5)
    assert scores.ensemble["excess"] == pytest.approx(np.square(y - rates.mean(0)).mean(), rel=1e-5)
    for member, rate in zip(scores.members, rates, strict=True):
        assert member["nll"] == pytest.approx(nll(rate), rel=1e-5)
    low, high = scores.intervals["members"][0]["nll"]
    assert low < scores.members[0]["nll"] < high
    assert scores.to_dict()["metrics"]["excess"]["direction"] == "lower"
    curves = curves_of(evaluation)
    of_all = curves["score_against_members"]["nll"]["mean"][-1]
    assert of_all == pytest.approx(scores.ensemble["nll"], rel=1e-5)
    assert len(curves["hardest"]) == len(curves["most_uncertain"]) == 12
    shown = evaluator.predict(state, counts.inputs)
    np.testing.assert_allclose(shown["mean"], rates.mean(0), rtol=1e-5)
    np.testing.assert_allclose(shown["member_mean"], rates, rtol=1e-5)
    # Two members left the first half out, the other two the second.
    out_of_bag = np.repeat([[True, False], [True, False], [False, True], [False, True]], 12, axis=1)
    held_out = held_out_scores(evaluator, state, counts, out_of_bag)
    rate = np.where(out_of_bag, rates, 0).sum(0) / 2
    assert held_out["scores"]["nll"] == pytest.approx(nll(rate), rel=1e-5)
    # A member that predicts NaN is found.
    weights[1] = np.nan
    state = state._replace(params={"w": layout.put(np.float32(weights), "members")})
    assert evaluator.evaluate(state, counts).broken_members == [1]
