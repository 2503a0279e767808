"""Shifted inputs of every type: the shift is that of float inputs, and never that of rounding."""

import numpy as np
import pytest

from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation.shift import shifted_splits

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
