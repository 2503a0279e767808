"""Scores and predictions of an ensemble, against NumPy's."""

import jax
import numpy as np
import optax
import pytest

import networks
from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation import Evaluator
from dist_ens.experiment import Experiment, OwnParts
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.layout import BATCH, BATCHES, MEMBER_BATCH, MEMBERS, Layout
from dist_ens.losses import class_mean_cross_entropy
from dist_ens.members import from_functions
from dist_ens.plan import collectives
from scored import linear_members

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def two_networks():
    """Two members that disagree, and 10 examples, which fill no batch of 8."""
    random = np.random.default_rng(0)
    ensemble, state, _ = linear_members(Layout.make(2, ensemble_axis=2), 3)
    inputs, labels = random.normal(size=(10, 4)), random.integers(0, 3, 10)
    return ensemble, state, ArraySplit(np.float32(inputs), np.int32(labels))


def _apply(params, inputs):
    return inputs @ params["w"]


@pytest.mark.parametrize("batch_size", [8, 4, 100])
def test_the_scores_are_those_of_the_averaged_probabilities_of_every_example(
    two_networks, batch_size
):
    ensemble, state, split = two_networks
    logits = np.einsum("nf,mfc->mnc", split.inputs, np.asarray(state.params["w"], np.float64))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    evaluator = Evaluator(ensemble, batch_size)
    predicted = evaluator.predict(state, split.inputs)
    np.testing.assert_allclose(predicted["member_probs"], probs, rtol=1e-4)
    np.testing.assert_allclose(predicted["probs"], probs.mean(0), rtol=1e-4)
    scores = evaluator.evaluate(state, split).scores()
    for scored, p in [(scores.ensemble, probs.mean(0)), *zip(scores.members, probs, strict=True)]:
        assert scored["nll"] == pytest.approx(-np.log(p[range(10), split.labels]).mean(), rel=1e-4)
        assert scored["accuracy"] == pytest.approx((p.argmax(-1) == split.labels).mean())
        brier = np.square(p - np.eye(3)[split.labels]).sum(-1).mean()
        assert scored["brier"] == pytest.approx(brier, rel=1e-4)


@pytest.mark.slow
def test_an_experiments_loss_and_scaling_are_what_its_ensemble_has():
    values = {"steps": 1, "loss": {"name": "class_mean_categorical"}}
    values["data"] = {"mean": (1.0,), "std": (2.0,)}
    run = Run(Experiment.from_dict(values), Spec((4,), "float32", (), 3), 10)
    of_inputs = from_functions(lambda key: {"w": np.ones(1)}, lambda params, inputs: inputs)
    ensemble = build_ensemble(run, Layout.make(1), OwnParts(member=of_inputs))
    outputs, _ = ensemble.member.apply({}, (), np.full((1, 4), 5.0, np.float32), None, False)
    np.testing.assert_array_equal(outputs, np.full((1, 4), 2.0))  # (5 - 1) / 2
    assert ensemble.objective.example_loss is class_mean_cross_entropy


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [3, None], ids=["classes", "real_targets"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_scores_and_predictions_take_one_collective_each(num_classes, num_groups):
    # Two of them, or one in a loop, wait for each other without end where devices share threads.
    layout = Layout.make(8, ensemble_axis=4)
    num_outputs = num_classes or 2
    member = from_functions(lambda key: {"w": np.ones((4, num_outputs))}, _apply)
    ensemble = networks.ensemble_of(member, optax.identity(), layout, num_groups=num_groups)
    spec = Spec((4,), "float32", (), num_classes, num_groups)
    programs = Evaluator(ensemble, 8, spec).programs
    labels_spec = BATCHES if num_groups > 1 else BATCH
    outputs, labels, mask = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(at))
        for shape, dtype, at in (
            ((8, 8, num_outputs), "float32", MEMBER_BATCH),
            ((2, 8) if num_groups > 1 else (8,), spec.label_dtype, labels_spec),
            ((8,), "bool", BATCH),
        )
    )
    group = jax.ShapeDtypeStruct((8,), "int32", sharding=layout.sharding(MEMBERS))
    for program in (
        programs.score_of_device.lower(outputs, group, labels, mask, None),
        programs.score_by_size.lower(outputs, labels, mask, None),
        programs.predictions.lower(outputs),
        programs.pooled_predictions.lower(outputs),
    ):
        loops, outside = program.compile().as_text().split("\nENTRY ")
        assert not collectives(loops, layout.mesh.device_ids)
        found = collectives(outside, layout.mesh.device_ids)
        assert [(each.kind, each.axis) for each in found] == [("all-gather", "ensemble")]
