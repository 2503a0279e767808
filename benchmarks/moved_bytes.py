"""Bytes that devices exchange and hosts read, computed from a layout and its compiled program."""

from collections.abc import Iterable

import numpy as np

from dist_ens.data.feed import Placement, TrainingSet
from dist_ens.layout import DATA, ENSEMBLE, Layout
from dist_ens.plan import Collective


def slices_of(layout: Layout) -> np.ndarray:
    """Returns the slice of each device of a mesh, int[ensemble_axis, data_axis]."""
    return np.vectorize(lambda device: getattr(device, "slice_index", None) or 0, otypes=[int])(
        layout.mesh.devices
    )


def exchanged_bytes(collectives: Iterable[Collective], slices: np.ndarray) -> tuple[int, int]:
    """Returns the bytes that a device exchanges in a step inside its slice, and between slices.

    A collective over a mesh axis leaves its slice if the devices along that axis are in several.

    Args:
        collectives: Collectives of one step.
        slices: Slice of each device of the mesh, int[ensemble_axis, data_axis].
    """
    leaves = {
        DATA: bool((slices != slices[:, :1]).any()),
        ENSEMBLE: bool((slices != slices[:1]).any()),
        "both": bool((slices != slices[0, 0]).any()),
    }
    inside = between = 0
    for collective in collectives:
        if collective.axis == "none":
            continue
        if leaves[collective.axis]:
            between += collective.bytes
        else:
            inside += collective.bytes
    return inside, between


def host_input_bytes(
    training_set: TrainingSet, layout: Layout, batch_size: int, *, per_member: bool
) -> dict[Placement, int]:
    """Returns the bytes that the first host reads from the data set, by the placement of the set.

    A resident or sharded set is read once, at the start. A streamed one is read for each step.

    Args:
        training_set: Sizes of the training set.
        layout: Layout of the members and the data.
        batch_size: Number of examples in a step, over all hosts.
        per_member: Whether each member has its own order of the examples. The set is then never
            sharded, and the host reads a batch for each of its members.
    """
    rows = len(layout.host_rows(batch_size))
    times = len(layout.host_members) if per_member else 1
    read = {
        Placement.REPLICATED: training_set.num_examples * training_set.example_bytes,
        Placement.STREAMED: rows * times * training_set.example_bytes,
    }
    if not per_member and layout.data_axis > 1:
        part = -(-training_set.num_examples // layout.data_axis)
        read[Placement.SHARDED] = len(layout.host_columns) * part * training_set.example_bytes
    return read
