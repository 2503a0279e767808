"""Division of global arrays into the parts of the mesh's rows, and the inverse."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dist_ens.ground.types import Specs, Tree
from dist_ens.layout.mesh import Layout, lines_of, numbers_of
from dist_ens.layout.specs import DATA, ENSEMBLE, REPLICATED, axis_of


def layout_of_row(layout: Layout, row: int, num_members: int) -> Layout:
    """Returns a layout of some members on the devices of one row of a mesh."""
    return Layout.make(
        num_members,
        ensemble_axis=1,
        model_axis=layout.model_axis,
        model_rules=layout.model_rules,
        devices=layout.mesh.devices[row].ravel().tolist(),
    )


def part_of_row(layout: Layout, tree: Tree, row: int, specs: Specs) -> Tree:
    """Returns one row's part of global arrays as arrays of that row's layout, without copies."""
    of_row = layout_of_row(layout, row, layout.members_per_device)

    def part(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = list(leaf.shape)
        members = axis_of(spec, ENSEMBLE)
        if members is not None:
            shape[members] = layout.members_per_device
        here = [shards[d] for d in layout.mesh.devices[row].flat if d in shards]
        # Some leaves of a batch may be shared, which their own sharding tells.
        if layout.model_axis == 1 or axis_of(spec, DATA) is not None:
            spec = getattr(leaf.sharding, "spec", REPLICATED)
        return jax.make_array_from_single_device_arrays(tuple(shape), of_row.sharding(spec), here)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(part, leaves, layout.leaf_specs(specs, tree)))


def join_rows(layout: Layout, trees: Sequence[Tree], specs: Specs) -> Tree:
    """Returns global arrays made from the parts of this host's rows; it inverts `part_of_row`."""

    flat, structure = zip(*map(jax.tree.leaves, trees), strict=True), jax.tree.structure(trees[0])

    def join(spec: PartitionSpec, parts: Sequence[jax.Array]) -> jax.Array:
        shape, axis = list(parts[0].shape), axis_of(spec, ENSEMBLE)
        if axis is not None:
            shape[axis] = layout.num_members
        here = [shard.data for part in parts for shard in part.addressable_shards]
        sharding = layout.sharding(spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, here)

    return jax.tree.unflatten(structure, map(join, layout.leaf_specs(specs, trees[0]), flat))


def sharding_of_member(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of an array of one member from that of one with a members axis."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def holdings(layout: Layout) -> list[str]:
    """Returns for each process which members and columns of the data its devices hold."""
    held, grid = [], layout.mesh.devices
    for process_id in range(jax.process_count()):
        rows = lines_of(grid, process_id)
        columns = lines_of(grid.swapaxes(0, 1), process_id)
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
