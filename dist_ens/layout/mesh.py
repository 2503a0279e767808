"""The mesh, what lies on it how, and how arrays get there."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dist_ens.errors import UserError
from dist_ens.state import as_held

ENSEMBLE = "ensemble"
DATA = "data"

# How the trees that enter and leave a lifted function lie on the mesh.
MEMBERS = P(ENSEMBLE)  # [members, ...]: the state
BATCHES = P(None, DATA)  # [steps, batch, ...]: the batches of one call
MEMBER_BATCHES = P(ENSEMBLE, None, DATA)  # [members, steps, batch, ...]: each member's own
BATCH = P(DATA)  # [batch, ...]: one batch
MEMBER_METRICS = P(None, ENSEMBLE)  # [steps, members]
MEMBER_BATCH = P(ENSEMBLE, DATA)  # [members, batch, ...]: predictions
REPLICATED = P()

# As JAX calls the part of a host's memory that a device can read.
HOST_MEMORY = "pinned_host"


def data_mean(tree: Any) -> Any:
    """Returns the mean over the data axis of every floating or complex leaf; others stay.

    Only inside a function lifted by `Layout.shard_map`.
    """
    if data_size() == 1:
        # XLA:CPU would keep the collective of one device, and then no longer run a tiny program's
        # operations one after another in one thread: for small networks a third of a step.
        return tree

    def mean(leaf: jax.Array) -> jax.Array:
        return jax.lax.pmean(leaf, DATA) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(mean, tree)


def data_sum(tree: Any) -> Any:
    """Returns the sum over the data axis of every leaf of a pytree of floating-point arrays.

    Only inside a function lifted by `Layout.shard_map`.
    """
    return tree if data_size() == 1 else jax.lax.psum(tree, DATA)


def data_size() -> int:
    """Returns the number of columns. Only inside a function lifted by `Layout.shard_map`."""
    return jax.lax.axis_size(DATA)


def all_members(member_leaf: jax.Array) -> jax.Array:
    """All members' parts of an array [members, ...] of which each device of a column has its own.

    Only inside a function lifted by `Layout.shard_map`, and not in an update: there members do not
    meet.
    """
    if jax.lax.axis_size(ENSEMBLE) == 1:
        return member_leaf
    return jax.lax.all_gather(member_leaf, ENSEMBLE, tiled=True)


def data_index() -> jax.Array:
    """Returns the column of this device, int32[], in a function lifted by `Layout.shard_map`."""
    # Of one column the index is a constant, with which the function needs no mesh.
    return jnp.int32(0) if data_size() == 1 else jax.lax.axis_index(DATA)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where members and data lie. Made by `make_layout`.

    Attributes:
        mesh: Axes `("ensemble", "data")`.
        num_members: Members of the ensemble; a multiple of the ensemble axis.
    """

    mesh: Mesh
    num_members: int

    @property
    def ensemble_axis(self) -> int:
        """Rows of the mesh."""
        return self.mesh.shape[ENSEMBLE]

    @property
    def data_axis(self) -> int:
        """Columns of the mesh."""
        return self.mesh.shape[DATA]

    @property
    def members_per_device(self) -> int:
        """Members that one device holds."""
        return self.num_members // self.ensemble_axis

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform

    def __str__(self) -> str:
        return f"{self.ensemble_axis} x {self.data_axis} ({ENSEMBLE} x {DATA})"

    def sharding(self, spec: P) -> NamedSharding:
        """One of this file's specs, on this mesh."""
        return NamedSharding(self.mesh, spec)

    def shard_map(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`fn` on each device's own part of its arguments.

        Members are independent by construction here, where a partitioner would be free to gather
        them (it does, for vmapped convolutions). The check of varying axes is off because it
        refuses the member of a user who starts a `scan` from zeros.
        """
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={ENSEMBLE, DATA},
            check_vma=False,
        )

    def check_batch_size(self, field: str, global_batch_size: int) -> None:
        """Raises a `UserError` unless the batch divides over the data axis."""
        if global_batch_size % self.data_axis:
            smaller = global_batch_size // self.data_axis * self.data_axis
            hosts = len({d.process_index for d in self.mesh.devices.flat})
            over = f"{self.mesh.size} devices of {hosts} host{'s' if hosts > 1 else ''}"
            raise UserError(
                f"Every column of the mesh takes the same number of examples. Received: "
                f"{field}={global_batch_size} over a data axis of {self.data_axis} "
                f"({over}, mesh {self}). "
                + (
                    f"Try {field}={smaller or self.data_axis} or {smaller + self.data_axis}."
                    if smaller
                    else f"Those are more devices than {self.num_members} members x "
                    f"{global_batch_size} examples can use: start fewer hosts, or try "
                    f"{field}={self.data_axis}."
                )
            )

    def free_bytes(self) -> float:
        """What is free on a device of this host; on a CPU its share of the memory."""
        if self.platform == "cpu":
            return psutil.virtual_memory().available / len(self.mesh.local_devices)
        stats = self.mesh.local_devices[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else math.inf

    @cached_property
    def host_columns(self) -> tuple[int, ...]:
        """Columns of the mesh in which this host has a device, ascending: its share of the data."""
        return _lines_of_host(self.mesh.devices.T)

    def host_rows(self, global_batch_size: int) -> np.ndarray:
        """Positions in the global batch of the examples that this host feeds: int64[host_batch]."""
        per_column = global_batch_size // self.data_axis
        return np.concatenate(
            [np.arange(c * per_column, (c + 1) * per_column) for c in self.host_columns]
        )

    @property
    def host_members(self) -> np.ndarray:
        """Positions of the members on this host's rows of the mesh, int64[host_members]."""
        count = self.members_per_device
        return np.concatenate(
            [np.arange(row * count, (row + 1) * count) for row in self.host_mesh_rows]
        )

    def put(self, host_tree: Any, global_batch_size: int, spec: P) -> Any:
        """This host's part of a batch as global arrays.

        Args:
            host_tree: Arrays whose batch axis holds the examples of `host_rows`, in their order.
            global_batch_size: Length of the batch axis of the result.
            spec: `BATCHES` (the batch axis is 1), `BATCH` (it is 0) or `MEMBER_BATCHES` (it is 2,
                and axis 0 holds `host_members`).

        Returns:
            The tree as global arrays on the mesh; every host must call this.

        Raises:
            UserError: If the batch axis of a leaf is not as long as `host_rows`.
        """
        self.check_batch_size("global_batch_size", global_batch_size)
        axis = tuple(spec).index(DATA)
        host_batch_size = global_batch_size // self.data_axis * len(self.host_columns)
        for path, leaf in jax.tree_util.tree_leaves_with_path(host_tree):
            if np.shape(leaf)[axis : axis + 1] != (host_batch_size,):
                raise UserError(
                    f"A host puts its {host_batch_size} of {global_batch_size} examples on its "
                    f"devices, along axis {axis} of every leaf. Received: leaf "
                    f"{jax.tree_util.keystr(path) or '(the whole)'} of shape "
                    f"{list(np.shape(leaf))}. Batches of a call are [steps, batch, ...], with "
                    "BATCHES; one batch is [batch, ...], with BATCH; Layout.host_rows says which "
                    "examples."
                )
        sharding = self.sharding(spec)
        per_column = global_batch_size // self.data_axis
        # Along each axis that is parted, a part's length and the parts that this host has.
        parted = {axis: (per_column, self.host_columns)}
        if ENSEMBLE in spec:
            of_row = (self.members_per_device, self.host_mesh_rows)
            parted[tuple(spec).index(ENSEMBLE)] = of_row

        def put(host_array: np.ndarray) -> jax.Array:
            shape = list(host_array.shape)
            shape[axis] = global_batch_size
            if ENSEMBLE in spec:
                shape[tuple(spec).index(ENSEMBLE)] = self.num_members

            parts = []
            indices: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(tuple(shape)))
            for device, index in indices.items():
                here = [slice(None)] * host_array.ndim
                for along, (length, of_host) in parted.items():
                    start = of_host.index((index[along].start or 0) // length) * length
                    here[along] = slice(start, start + length)
                parts.append(jax.device_put(host_array[tuple(here)], device))
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

        return jax.tree.map(put, as_held(host_tree))

    @cached_property
    def host_mesh_rows(self) -> tuple[int, ...]:
        """Rows of the mesh in which this host has a device, ascending."""
        return _lines_of_host(self.mesh.devices)

    def row(self, row: int, num_members: int) -> "Layout":
        """A layout of some members on the devices of one row of this mesh."""
        return make_layout(num_members, 1, self.mesh.devices[row].tolist())

    def of_row(self, tree: Any, row: int, specs: Any) -> Any:
        """One row's part of global arrays, as arrays of that row's layout; nothing is copied.

        Args:
            tree: Global arrays on this mesh.
            row: Its number.
            specs: How they lie on it: one spec, or a tree of them that is a prefix of `tree`.
        """
        of_row = self.row(row, self.members_per_device)

        def part(spec: P, leaf: jax.Array) -> jax.Array:
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            shape = list(leaf.shape)
            if ENSEMBLE in spec:
                shape[tuple(spec).index(ENSEMBLE)] = self.members_per_device
            here = [shards[d] for d in self.mesh.devices[row] if d in shards]
            return jax.make_array_from_single_device_arrays(
                tuple(shape), of_row.sharding(spec), here
            )

        return jax.tree.map(
            lambda spec, branch: jax.tree.map(partial(part, spec), branch), specs, tree
        )

    def from_rows(self, trees: dict[int, Any], spec: P) -> Any:
        """The global arrays whose rows' parts these are; the inverse of `of_row`.

        Args:
            trees: For each of `host_mesh_rows` its part.
            spec: `MEMBERS` or `MEMBER_METRICS`.

        Returns:
            The tree as global arrays.
        """
        sharding, axis = self.sharding(spec), tuple(spec).index(ENSEMBLE)

        def whole(*parts: jax.Array) -> jax.Array:
            shape = list(parts[0].shape)
            shape[axis] = self.num_members
            here = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, here)

        return jax.tree.map(whole, *trees.values())

    def put_everywhere(self, host_tree: Any) -> Any:
        """Host arrays, equal on every host, whole on every device of the mesh."""
        everywhere = self.sharding(REPLICATED)

        def put(leaf: Any) -> jax.Array:
            here = [jax.device_put(leaf, device) for device in everywhere.addressable_devices]
            return jax.make_array_from_single_device_arrays(np.shape(leaf), everywhere, here)

        return jax.tree.map(put, as_held(host_tree))

    def put_numbers(self, count: int) -> list[jax.Array]:
        """0, 1, … as int32[] everywhere on the mesh: to count with where nothing is transferred."""
        return [self.put_everywhere(np.int32(number)) for number in range(count)]

    def on_one_device(self) -> "Layout":
        """A layout of the same members, all on this one's first device."""
        return make_layout(self.num_members, 1, [self.mesh.devices.flat[0]])

    def moved(self, tree: Any, specs: Any) -> Any:
        """Global arrays of another layout of this host's devices, as arrays of this one.

        Args:
            tree: The arrays.
            specs: As `of_row` takes them.
        """
        return jax.tree.map(
            lambda spec, branch: jax.device_put(branch, self.sharding(spec)), specs, tree
        )

    def put_members(self, tree: Any) -> Any:
        """Host arrays `[members, ...]`, the whole of them on every host, as the members' state."""
        sharding = self.sharding(MEMBERS)

        def put(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.device_put(leaf, sharding)
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])

        return jax.tree.map(put, as_held(tree))


def device_bytes(tree: Any) -> int:
    """Unpadded, of the part of a tree of arrays, or of abstract ones, that is on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def copied(tree: Any) -> Any:
    """Global arrays again, where they are: what uses the copy up leaves the first alone."""
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


def to_host(tree: Any) -> Any:
    """Global arrays as whole NumPy arrays; every host must call this, and has all of them."""
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    with jax.transfer_guard("allow"):  # to bring it to the host is what is asked for
        return multihost_utils.process_allgather(tree, tiled=True)


def make_layout(
    num_members: int,
    ensemble_axis: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Layout:
    """The mesh for an ensemble on the devices at hand, none of them idle.

    Args:
        num_members: Members of the ensemble.
        ensemble_axis: Rows of the mesh; None for the largest number that divides both the members
            and the devices.
        devices: Default: all of `jax.devices()`, of every host.

    Returns:
        The layout: `ensemble_axis` rows, `len(devices) / ensemble_axis` columns.

    Raises:
        UserError: If the ensemble axis does not divide the members and the devices.

    >>> str(make_layout(num_members=10, devices=jax.devices()[:8]))
    '2 x 4 (ensemble x data)'
    """
    _check_device_flag()
    devices = jax.devices() if devices is None else list(devices)
    largest = math.gcd(num_members, len(devices))
    ensemble_axis = ensemble_axis or largest
    good = ", ".join(str(k) for k in range(1, largest + 1) if largest % k == 0)
    if num_members % ensemble_axis:
        raise UserError(
            "Every device on the ensemble axis must hold the same number of members. Received: "
            f"num_members={num_members}, ensemble axis={ensemble_axis} "
            f"({num_members % ensemble_axis} left over). Try an ensemble axis of {good}, or "
            f"num_members={math.ceil(num_members / ensemble_axis) * ensemble_axis}."
        )
    if len(devices) % ensemble_axis:
        raise UserError(
            "The ensemble axis must divide the number of devices, so that none is idle. Received: "
            f"{len(devices)} devices, ensemble axis={ensemble_axis}. "
            f"Try an ensemble axis of {good}."
        )
    grid = np.array(devices).reshape(ensemble_axis, len(devices) // ensemble_axis)
    return Layout(Mesh(grid, (ENSEMBLE, DATA), axis_types=(AxisType.Auto,) * 2), num_members)


def _lines_of_host(grid: np.ndarray) -> tuple[int, ...]:
    """Positions along the first axis of devices at which one of them is this host's."""
    here = jax.process_index()
    return tuple(
        position
        for position, devices in enumerate(grid)
        if any(device.process_index == here for device in devices)
    )


def _check_device_flag() -> None:
    """Says so when `XLA_FLAGS` asks for CPU devices that JAX, already started, does not have."""
    asked = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if asked and jax.default_backend() == "cpu" and jax.local_device_count() < int(asked[-1]):
        raise UserError(
            f"XLA_FLAGS must be set before JAX starts. Received: a flag for {asked[-1]} CPU "
            f"devices, but JAX had started with {jax.local_device_count()}. "
            "Export XLA_FLAGS in the shell, or set it before the first import of jax."
        )
