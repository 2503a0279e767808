"""Shifted inputs of every type: the shift is that of float inputs, and never that of rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens.data import ArraySplit, Spec
from dist_ens.errors import UserError
from dist_ens.evaluation import Evaluator
from dist_ens.evaluation.shift import require_float_inputs, shifted_splits
from dist_ens.experiment import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    open_source,
)
from dist_ens.experiment.assess import EvaluationRequest, assess
from dist_ens.experiment.build import evaluator_of_run
from dist_ens.experiment.train import train
from dist_ens.experiment.workdir import open_finished
from dist_ens.layout import Layout
from dist_ens.members import from_functions

RANDOM = np.random.default_rng(0)
ON = RANDOM.random((20, 8, 8)) < 0.295


def shifted(inputs):
    """By name and strength the shifted inputs of a split."""
    split = ArraySplit(inputs, np.zeros(len(inputs), np.int32))
    found = shifted_splits(split, Spec(inputs.shape[1:], inputs.dtype.name, (), 2))
    return {
        (name, each.strength): each.take(np.arange(len(inputs)))["inputs"]
        for name, splits in found.items()
        for each in splits
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    "inputs",
    [
        ON,
        ON.astype(np.uint8),
        RANDOM.integers(0, 17, (20, 8, 8)).astype(np.uint8),
        RANDOM.integers(-3, 4, (20, 8, 8)).astype(np.int8),
        # In float16 numbers from 2048 on are even: four steps are no range for noise of 0.64.
        (2048 + 2 * RANDOM.integers(0, 5, (20, 8, 8))).astype(np.float16),
    ],
    ids=["bool", "0 and 1", "0 to 16", "-3 to 3", "float16 far from 0"],
)
def test_inputs_of_a_coarse_type_are_shifted_as_floats_are(inputs):
    as_floats = shifted(inputs.astype(np.float32))
    for name, values in shifted(inputs).items():
        assert values.dtype == np.float32, name
        np.testing.assert_array_equal(values, as_floats[name], str(name))


@pytest.mark.quick
def test_a_contrast_of_three_quarters_leaves_booleans_apart():
    # A pixel that is on becomes mean + 0.75 (1 - mean), one that is off 0.25 mean.
    worse = shifted(ON)["contrast", 1]
    mean = ON.mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(worse, mean + 0.75 * (ON - mean), rtol=1e-6)


@pytest.mark.quick
def test_types_whose_steps_are_small_beside_the_noise_are_kept():
    # The least noise has 0.08 of the range and rounding 0.29 of a step, at most 5 % of it: a range
    # of 0.2887 / (0.05 * 0.08) = 72.2 steps is enough.
    for inputs in (
        RANDOM.integers(0, 256, (20, 8, 8)).astype(np.uint8),
        np.resize([100, 173], (20, 8, 8)).astype(np.int16),
        RANDOM.normal(size=(20, 8, 8)).astype(np.float16),
        np.resize(np.array([0, 2**32 - 1], np.uint32), (20, 8, 8)),
    ):
        for values in shifted(inputs).values():
            assert values.dtype == inputs.dtype
            assert values.min() >= inputs.min()
            assert values.max() <= inputs.max()
    of_72 = np.resize([100, 172], (20, 8, 8)).astype(np.int16)
    assert shifted(of_72)["blur", 1].dtype == np.float32


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_inputs_that_even_float32_is_too_coarse_for_are_refused(dtype):
    # float32 has steps of 8 at 1e8; the least noise of a range of 16 is 1.28.
    inputs = np.resize([100_000_000, 100_000_016], (4, 3)).astype(dtype)
    with pytest.raises(UserError, match=r"float32 has steps of 8 there.*deviation of 1\.28\."):
        shifted(inputs)


def evaluator_of(apply, inputs, num_outputs=3):
    """An evaluator of two members, their state, and a split of booleans, shifted."""
    member = from_functions(
        lambda key: {"w": jax.random.normal(key, (inputs.shape[1], num_outputs))}, apply
    )
    ensemble = networks.ensemble_of(
        member, optax.identity(), Layout.make(2, ensemble_axis=1, devices=jax.devices()[:1])
    )
    state = networks.begin(ensemble, jax.ShapeDtypeStruct((1, *inputs.shape[1:]), inputs.dtype))
    spec = Spec(inputs.shape[1:], inputs.dtype.name, (), num_outputs)
    split = ArraySplit(inputs, np.zeros(len(inputs), np.int32))
    return Evaluator(ensemble, 8, spec), state, shifted_splits(split, spec)["gaussian_noise"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda p, x: p["w"][x.astype(x.dtype)].sum(1), "does not take its uint8 inputs as float"),
        (
            lambda p, x: (x / 16 if x.dtype == jnp.uint8 else x) @ p["w"],
            "predicts something else for its uint8 inputs",
        ),
        (lambda p, x: x.astype(jnp.int32) @ p["w"], "rounds its inputs: it does not see fractions"),
        (lambda p, x: p["w"][x.astype(jnp.int32)].sum(1), "rounds its inputs"),
    ],
    ids=["embedding", "by type", "truncating", "embedding of floats"],
)
def test_a_network_that_takes_no_fractions_is_not_shifted(apply, message):
    inputs = RANDOM.integers(0, 17, (30, 17)).astype(np.uint8)
    with pytest.raises(UserError, match=message):
        require_float_inputs(*evaluator_of(apply, inputs))


@pytest.mark.quick
@pytest.mark.parametrize(
    "apply",
    [
        lambda p, x: x.astype(jnp.float32) @ p["w"],
        lambda p, x: jnp.zeros((len(x), 1)) @ p["w"][:1],
    ],
    ids=["linear", "constant"],
)
def test_a_network_that_takes_floats_is_shifted(apply):
    require_float_inputs(*evaluator_of(apply, ON.reshape(20, 64)))


def test_a_run_on_booleans_has_the_scores_of_one_on_floats(tmp_path):
    digits = open_source(DataConfig(source="digits"))
    taken = {s: getattr(digits, s).take(np.arange(300)) for s in ("train", "test")}
    arrays = {f"{s}_images": t["inputs"] > 7.5 for s, t in taken.items()}
    np.savez(
        tmp_path / "digits.npz", **arrays, **{f"{s}_labels": t["labels"] for s, t in taken.items()}
    )
    config = Experiment(
        num_members=2,
        steps=40,
        steps_per_call=20,
        execution="vmap",
        data=DataConfig(source=f"npz:{tmp_path / 'digits.npz'}", global_batch_size=64),
        model=ModelConfig(name="mlp", options={"hidden_sizes": (16,)}),
        optimizer=OptimizerConfig(learning_rate=0.01),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
    train(config, tmp_path / "run")
    run, ensemble, state, *_ = open_finished(tmp_path / "run")
    assert run.spec.input_dtype == "bool"
    evaluator, source = evaluator_of_run(run, ensemble), open_source(run.experiment.data)
    told = assess(run, evaluator, state, source, EvaluationRequest(shift=True)).to_dict()
    floats = ArraySplit(arrays["test_images"].astype(np.float32), taken["test"]["labels"])
    for name, splits in shifted_splits(floats, Spec((8, 8), "float32", (), 10)).items():
        for each, found in zip(splits[::4], told["shift"][name][::4], strict=True):
            expected = evaluator.evaluate(state, each).scores().ensemble
            assert found["test"] == pytest.approx(expected, rel=1e-6)
    # All pixels were on under contrast before: a picture of any digit looked the same.
    contrast = [at["test"]["accuracy"] for at in told["shift"]["contrast"]]
    assert contrast[0] > 0.8 * told["test"]["accuracy"] > 0.4
