"""Division of global arrays into the parts of the mesh's rows, and the inverse."""

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from dist_ens.ground.types import PyTree, Specs, Tree
from dist_ens.layout.mesh import Layout, lines_of, numbers_of
from dist_ens.layout.specs import ENSEMBLE, REPLICATED, axis_of, is_spec


def layout_of_row(layout: Layout, row: int, num_members: int) -> Layout:
    """Returns a layout of some members on the devices of one row of a mesh."""
    devices = layout.mesh.devices[row].tolist()
    return Layout.make(num_members, ensemble_axis=1, devices=devices)


def part_of_row(layout: Layout, tree: Tree, row: int, specs: Specs) -> Tree:
    """Returns one row's part of global arrays as arrays of that row's layout, without copies."""
    of_row = layout_of_row(layout, row, layout.members_per_device)

    def part(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = list(leaf.shape)
        members = axis_of(spec, ENSEMBLE)
        if members is not None:
            shape[members] = layout.members_per_device
        here = [shards[d] for d in layout.mesh.devices[row] if d in shards]
        # Some leaves of a batch may be shared, which their own sharding tells.
        sharding = of_row.sharding(getattr(leaf.sharding, "spec", REPLICATED))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, here)

    return jax.tree.map(
        lambda spec, branch: jax.tree.map(lambda leaf: part(spec, leaf), branch),
        specs,
        tree,
        is_leaf=is_spec,
    )


def join_rows(layout: Layout, trees: Sequence[Tree], specs: Specs) -> Tree:
    """Returns global arrays made from the parts of this host's rows; it inverts `part_of_row`."""

    def whole(spec: PartitionSpec, *branches: PyTree) -> PyTree:
        sharding, axis = layout.sharding(spec), axis_of(spec, ENSEMBLE)

        def join(*parts: jax.Array) -> jax.Array:
            shape = list(parts[0].shape)
            if axis is not None:
                shape[axis] = layout.num_members
            here = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, here)

        return jax.tree.map(join, *branches)

    return jax.tree.map(whole, specs, *trees, is_leaf=is_spec)


def holdings(layout: Layout) -> list[str]:
    """Returns for each process which members and columns of the data its devices hold."""
    held, grid = [], layout.mesh.devices
    for process_id in range(jax.process_count()):
        rows, columns = lines_of(grid, process_id), lines_of(grid.T, process_id)
        if rows:
            members = numbers_of(rows, layout.members_per_device).tolist()
            held.append(f"members {_ranges(members)}, data columns {_ranges(columns)}")
        else:
            held.append("no member")
    return held


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers, where neighbours are written as a range.

    >>> _ranges([0, 1, 2, 5])
    '0 to 2, 5'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    spans = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(spans)
