"""The bytes of the page on scale, against layouts whose bytes are counted by hand."""

import jax
import numpy as np
import pytest

from benchmarks.moved_bytes import exchanged_bytes, host_input_bytes
from dist_ens.data.feed import Placement, TrainingSet
from dist_ens.layout import Layout
from dist_ens.plan import Collective
from dist_ens.sampling import Order

OVER_DATA = Collective("all-reduce", "data", 100)
OVER_ENSEMBLE = Collective("all-gather", "ensemble", 20)
OVER_BOTH = Collective("all-reduce", "both", 3)
ALONE = Collective("all-reduce", "none", 1000)
ALL = [OVER_DATA, OVER_ENSEMBLE, OVER_BOTH, ALONE]

# 103 examples of 10 bytes, in steps of 16.
TRAINING_SET = TrainingSet(Order(103, 16), example_bytes=10, call_examples=16)


@pytest.mark.parametrize(
    ("slices", "inside", "between"),
    [
        ([[0, 0], [0, 0]], 123, 0),
        # The ensemble axis is the outermost: the batch of a row stays in its slice.
        ([[0, 0], [1, 1]], 100, 23),
        # The data axis crosses the slices, and the members of a column share one.
        ([[0, 1], [0, 1]], 20, 103),
        ([[0, 1], [1, 0]], 0, 123),
        # One row of four chips in two slices.
        ([[0, 0, 1, 1]], 20, 103),
    ],
)
def test_a_collective_leaves_its_slice_if_its_axis_does(slices, inside, between):
    assert exchanged_bytes(ALL, np.array(slices)) == (inside, between)


def test_a_host_reads_the_examples_of_its_columns_or_those_of_each_of_its_members():
    # One host has all four rows and both columns.
    layout = Layout.make(8, ensemble_axis=4, devices=jax.devices()[:8])
    shared = host_input_bytes(TRAINING_SET, layout, 16, per_member=False)
    assert shared == {
        Placement.REPLICATED: 103 * 10,
        Placement.STREAMED: 16 * 10,
        Placement.SHARDED: 2 * 52 * 10,  # 103 examples in two parts of 52
    }
    own = host_input_bytes(TRAINING_SET, layout, 16, per_member=True)
    assert own == {Placement.REPLICATED: 103 * 10, Placement.STREAMED: 8 * 16 * 10}
