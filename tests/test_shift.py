"""Shifted inputs of every type: the shift is that of float inputs, and never that of rounding."""

import numpy as np
import pytest

from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation.shift import shifted_splits
from dist_ens.experiment import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    open_source,
)
from dist_ens.experiment.assess import assess
from dist_ens.experiment.assessment import (
    EvaluationRequest,
)
from dist_ens.experiment.build import evaluator_of_run
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train

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
