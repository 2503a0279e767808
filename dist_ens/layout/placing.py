"""Transfer of arrays between a host and the devices of a mesh."""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.narrowing import generator_of
from dist_ens.ground.state import as_held
from dist_ens.ground.types import Array, Leaf, PyTree, Shapes, Specs, Tree
from dist_ens.layout.specs import DATA, ENSEMBLE, REPLICATED, axis_of, broadcast, is_spec

if TYPE_CHECKING:
    from dist_ens.layout.mesh import Layout

# JAX's name for the part of a host's memory that a device can read.
HOST_MEMORY = "pinned_host"


def put_batch(layout: "Layout", host_tree: PyTree, spec: PartitionSpec) -> PyTree:
    """Puts this host's part of a batch on the mesh. Every host must call this.

    With a data axis above 1, the batch axis holds the rows of `Layout.host_rows`, in their order.
    Where the spec has the members axis, it holds `Layout.host_members`.
    """
    axis = tuple(spec).index(DATA)
    _check_members(layout, host_tree, spec, "The array", jax_arrays_are_whole=False)
    check_rows(layout, host_tree, spec)
    sharding = layout.sharding(spec)
    members = axis_of(spec, ENSEMBLE)

    def put(host_array: np.ndarray) -> jax.Array:
        shape = list(host_array.shape)
        # For each sharded axis: the length of a part, and the positions of the parts of this host.
        sharded = {}
        if layout.data_axis > 1:
            per_column = shape[axis] // len(layout.host_columns)
            sharded[axis] = (per_column, layout.host_columns)
            shape[axis] = per_column * layout.data_axis
        if members is not None:
            sharded[members] = (layout.members_per_device, layout.host_mesh_rows)
            shape[members] = layout.num_members
        parts = []
        indices: dict[jax.Device, tuple[slice, ...]] = dict(
            sharding.addressable_devices_indices_map(tuple(shape))
        )
        for device, index in indices.items():
            here = [slice(None)] * host_array.ndim
            for along, (length, of_host) in sharded.items():
                start = of_host.index((index[along].start or 0) // max(1, length)) * length
                here[along] = slice(start, start + length)
            # On a CPU a JAX array may share the memory of a NumPy array, and changes with it when
            # a loader fills its buffer again. So the part is copied.
            parts.append(_on_device(np.array(host_array[tuple(here)]), device))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

    return jax.tree.map(put, as_held(host_tree))


def put_everywhere(layout: "Layout", host_tree: PyTree) -> PyTree:
    """Puts whole arrays, equal on every host, on every device of the mesh.

    On a CPU, they may share the memory of NumPy arrays, which must not change then.
    """
    everywhere = layout.sharding(REPLICATED)

    def put(leaf: Leaf) -> jax.Array:
        devices = everywhere.addressable_devices_indices_map(np.shape(leaf))  # In JAX's order.
        here = [_on_device(leaf, device) for device in devices]
        return jax.make_array_from_single_device_arrays(np.shape(leaf), everywhere, here)

    return jax.tree.map(put, as_held(host_tree))


def put_numbers(layout: "Layout", count: int) -> list[jax.Array]:
    """Returns the numbers from 0 to `count - 1` as int32[], each on every device, to count with."""
    return [put_everywhere(layout, np.int32(number)) for number in range(count)]


def put_members(layout: "Layout", tree: PyTree, spec: PartitionSpec) -> PyTree:
    """Puts arrays [members, ...] on the mesh. Every host gives the arrays of all members."""
    _check_members(layout, tree, spec, "The array", jax_arrays_are_whole=False)

    def put(leaf: Leaf, spec: PartitionSpec) -> jax.Array:
        sharding = layout.sharding(spec)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(leaf, sharding)
        whole = np.array(leaf)  # A copy, as in `put_batch`.
        return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])

    leaves, structure = jax.tree.flatten(as_held(tree))
    return jax.tree.unflatten(structure, map(put, leaves, layout.leaf_specs(spec, tree)))


def copy_of_numpy(leaf: Leaf) -> Array:
    """Returns a copy of an array in NumPy or of a number. JAX arrays are not copied."""
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def _on_device(array: Leaf, device: jax.Device) -> jax.Array:
    """Returns an array on a device. Keys in the host's memory become typed keys again."""
    generator = generator_of(array.dtype) if isinstance(array, np.ndarray) else None
    if generator is None:
        return jax.device_put(array, device)
    return jax.random.wrap_key_data(jax.device_put(array[generator], device), impl=generator)


def device_bytes(tree: PyTree) -> int:
    """Returns the bytes that arrays, or abstract arrays, take on one device, without padding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def copied(tree: Tree, like: Tree | None = None) -> Tree:
    """Returns copies of global arrays, in the memory of those of `like` or in their own."""
    # The method `copy` of an array would compile a program for each shape.
    return jax.tree.map(
        lambda leaf, other: _copied_to(leaf, other.sharding), tree, tree if like is None else like
    )


def copied_like(tree: Tree, like: Shapes) -> Tree:
    """Returns copies of arrays of any layout, each with the sharding of another array or shape."""

    def copy_of(leaf: Leaf, other: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        # JAX copies between equal shardings only. Between others a device keeps what it has.
        if not isinstance(leaf, jax.Array):
            leaf = jnp.array(leaf)
        elif leaf.sharding != other.sharding:
            leaf = _copied_to(leaf, leaf.sharding)
        return jax.device_put(leaf, other.sharding, may_alias=False)

    return jax.tree.map(copy_of, tree, like)


def copied_off_devices(tree: Tree) -> Tree:
    """Begins copies of global arrays to the hosts; the arrays may be donated at once."""
    return jax.tree.map(
        lambda leaf: _copied_to(leaf, resting_sharding(leaf.sharding, leaf.dtype)), tree
    )


def resting_sharding(sharding: Sharding, dtype: DTypeLike) -> Sharding:
    """Returns a sharding in the hosts' memory, but for keys, which only JAX can slice."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return sharding if is_key else sharding.with_memory_kind(HOST_MEMORY)


def _copied_to(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns a copy of a global array in the memory of a sharding with the same parts."""
    parts = [
        jax.device_put(
            shard.data,
            SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind),
            may_alias=False,
        )
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def to_host(tree: PyTree) -> PyTree:
    """Returns global arrays as whole NumPy arrays, on every host. Every host must call this.

    Arrays of NumPy stay as they are.
    """
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    with jax.transfer_guard("allow"):  # This transfer to the host is intended.
        return multihost_utils.process_allgather(tree, tiled=True)


def check_lengths(layout: "Layout", tree: PyTree, specs: Specs, where: str) -> None:
    """Raises a `UserError` unless arrays hold the members of a layout, and rows for its columns."""

    jax.tree.map(
        lambda spec, branch: _check_members(layout, branch, spec, where, jax_arrays_are_whole=True),
        specs,
        tree,
        is_leaf=is_spec,
    )
    check_rows(layout, tree, specs)


def check_rows(layout: "Layout", tree: PyTree, specs: Specs) -> None:
    """Raises a `UserError` unless the rows of each leaf of a batch divide over the columns.

    JAX arrays hold the rows of all hosts, others those of this host.
    """
    if layout.data_axis == 1:
        return
    axes = [axis_of(spec, DATA) for spec in broadcast(specs, tree)]
    for number, (leaf, axis) in enumerate(zip(jax.tree.leaves(tree), axes, strict=True)):
        columns = layout.data_axis if isinstance(leaf, jax.Array) else len(layout.host_columns)
        shape = np.shape(leaf)
        if axis is not None and (len(shape) <= axis or shape[axis] % columns):
            raise UserError(
                f"Leaf {_name_of(tree, number) or '(the whole)'} of the batch has the shape "
                f"{list(shape)}, and its axis {axis} is divided over {columns} columns of the mesh "
                f"{layout}. Use a multiple of {columns} rows. If the leaf holds no rows, give the "
                "Ensemble batch_specs={...: 'shared'}, or lift the spec 'shared'."
            )


def _check_members(
    layout: "Layout", tree: PyTree, spec: PartitionSpec, where: str, *, jax_arrays_are_whole: bool
) -> None:
    """Raises a `UserError` unless the members axis of every leaf has the right length.

    If the spec has the data axis, each host gives the members of its rows. Otherwise every host
    gives all members, as JAX arrays do if they are whole.
    """
    axis = axis_of(spec, ENSEMBLE)
    if axis is None:
        return
    of_host = layout.num_members
    if axis_of(spec, DATA) is not None:
        of_host = len(layout.host_mesh_rows) * layout.members_per_device
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        is_jax = isinstance(leaf, jax.Array)
        count = layout.num_members if jax_arrays_are_whole and is_jax else of_host
        # `np.shape` of a JAX array would take longer than all the rest of this check, which runs
        # in every update.
        shape = leaf.shape if is_jax else np.shape(leaf)
        if shape[axis : axis + 1] != (count,):
            raise UserError(
                f"{where}{_name_of(tree, number)} has the shape {list(shape)}, and its axis {axis} "
                f"should hold {counted(count, 'member')}. Give one row for each member."
            )


def _name_of(tree: PyTree, number: int) -> str:
    return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[number][0])


def global_shapes(layout: "Layout", host_shapes: Shapes, specs: Specs) -> Shapes:
    """Returns the shapes of a batch over all hosts, from those of this host's part."""
    leaves, structure = jax.tree.flatten(host_shapes)
    columns, of_host = layout.data_axis, len(layout.host_columns)
    whole = [
        leaf.update(shape=(leaf.shape[0] * columns // of_host, *leaf.shape[1:]))
        if columns > of_host and DATA in tuple(spec)
        else leaf
        for leaf, spec in zip(leaves, broadcast(specs, host_shapes), strict=True)
    ]
    return jax.tree.unflatten(structure, whole)
