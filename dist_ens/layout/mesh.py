"""`Layout`: the mesh of an ensemble, and the arrays on it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import numpy as np
import psutil
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dist_ens.ground.errors import ExitCode, UserError, counted
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.randomness import INIT, member_key, pinned_generator
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import as_held
from dist_ens.ground.types import Key, Leaf, PyTree, Specs, Tree
from dist_ens.layout.collectives import without_axes
from dist_ens.layout.mapping import mapped_over_rows
from dist_ens.layout.model_axis import FSDP, Rules, checked_rules, has_rules, specs_by_rule
from dist_ens.layout.placing import (
    check_lengths,
    copy_of_numpy,
    put_batch,
    put_everywhere,
    put_members,
)
from dist_ens.layout.specs import (
    AXES,
    DATA,
    ENSEMBLE,
    MEMBERS,
    MODEL,
    REPLICATED,
    axis_of,
    broadcast,
    is_spec,
    named_specs,
    without_data,
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of members and data on a mesh of devices; made by `Layout.make`.

    Attributes:
        mesh: Mesh with the axes `("ensemble", "data")`, and `"model"` if it is above 1.
        num_members: Number of members, a multiple of the ensemble axis.
        is_fixed: Whether the user chose the number of rows. If not, and if the devices are the
            cores of one CPU, `fit` may use one device instead.
        model_rules: How the arrays of a member are divided over the model axis: "fsdp", "tensor",
            or pairs of a pattern of names and the axes of such a parameter.

    >>> layout = Layout.make(6, devices=jax.devices()[:4])
    >>> layout.ensemble_axis, layout.data_axis, layout.members_per_device
    (2, 2, 3)
    """

    mesh: Mesh
    num_members: int
    is_fixed: bool = dataclasses.field(default=True, compare=False)
    model_rules: Rules = FSDP

    @classmethod
    def make(
        cls,
        num_members: int,
        *,
        ensemble_axis: int | None = None,
        model_axis: int = 1,
        model_rules: str | Sequence[tuple[str, Sequence[str | None]]] = FSDP,
        devices: Sequence[jax.Device] | None = None,
    ) -> "Layout":
        """Returns the layout of an ensemble on devices that are all used.

        Args:
            num_members: Number of members, at least 1.
            ensemble_axis: Number of rows of the mesh, at least 1. Default: the largest number that
                divides the members and the devices; with a model axis, the groups of so many
                devices.
            model_axis: Number of devices that share the arrays of one member, at least 1.
            model_rules: Rules by which the state of an ensemble is divided over them; other arrays
                with members are whole on each device of a row. With "fsdp" each has a part of
                every large array and of the examples, and the parts of the parameters are gathered
                for the two passes of a step. Pairs such as `[("mlp/*/kernel", (None, "model"))]`
                give the axes of the parameters whose name fits a pattern, without the axis of the
                members. The first that fits is taken, and the compiler divides the work of the
                network as these arrays are divided. "tensor" takes the axes from the partitioning
                metadata of a network of Flax, `with_partitioning(init, (None, "model"))`.
            devices: Devices of the mesh. Default: `jax.devices()`, the devices of all hosts.

        Returns:
            The layout, with `ensemble_axis` rows. Each has `len(devices) / ensemble_axis` devices,
            in columns of `model_axis`.

        Raises:
            UserError: If the axes do not divide the members and the devices, or a rule names
                another axis.

        >>> str(Layout.make(10, devices=jax.devices()[:8]))
        '2 x 4 (ensemble x data)'
        """
        devices = jax.devices() if devices is None else list(devices)
        num_members = whole_number("num_members", num_members, least=1)
        model_axis = whole_number("model_axis", model_axis, least=1)
        if len(devices) % model_axis:
            raise UserError(
                f"The model axis must divide the number of devices: got model_axis={model_axis} "
                f"for {counted(len(devices), 'device')}. Use a divisor.",
                exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
            )
        count = len(devices) // model_axis
        largest = math.gcd(num_members, count)
        is_fixed = ensemble_axis is not None or model_axis > 1
        if ensemble_axis is None:
            ensemble_axis = largest
        ensemble_axis = whole_number("ensemble_axis", ensemble_axis, least=1)
        if count % ensemble_axis or num_members % ensemble_axis:
            good = [str(k) for k in range(1, largest + 1) if largest % k == 0]
            raise UserError(
                "The ensemble axis must divide the number of devices and num_members: got "
                f"ensemble_axis={ensemble_axis} for {counted(len(devices), 'device')}"
                f"{'' if model_axis == 1 else f', a model axis of {model_axis}'} and "
                f"num_members={num_members}. Use ensemble_axis={' or '.join(good)}, or another "
                f"number of members{'' if model_axis == 1 else ' or model axis'}.",
                exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
            )
        shape = [ensemble_axis, count // ensemble_axis, *([model_axis] if model_axis > 1 else [])]
        grid = np.array(devices).reshape(shape)
        mesh = Mesh(grid, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
        return cls(mesh, num_members, is_fixed, checked_rules(model_rules))

    @property
    def ensemble_axis(self) -> int:
        """Number of rows of the mesh."""
        return self.mesh.shape[ENSEMBLE]

    @property
    def data_axis(self) -> int:
        """Number of columns of the mesh."""
        return self.mesh.shape[DATA]

    @property
    def model_axis(self) -> int:
        """Number of devices that share the arrays of one member."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def is_fsdp(self) -> bool:
        """Whether the devices of a column gather the parameters, and share the examples."""
        return self.model_axis > 1 and self.model_rules == FSDP

    @property
    def members_per_device(self) -> int:
        """Number of members that one device holds, or holds its parts of."""
        return self.num_members // self.ensemble_axis

    @property
    def platform(self) -> str:
        """Platform of the devices: `cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform

    def __str__(self) -> str:
        names = self.mesh.axis_names
        return f"{' x '.join(map(str, self.mesh.shape.values()))} ({' x '.join(names)})"

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Returns the sharding of a spec on this mesh.

        Nothing is divided over a data axis of 1, so that a batch there may be any pytree of arrays.
        """
        return NamedSharding(self.mesh, spec if self.data_axis > 1 else without_data(spec))

    def leaf_specs(self, specs: Specs, tree: PyTree) -> list[PartitionSpec]:
        """Returns the spec of each leaf of a tree from a tree prefix of specs.

        If the mesh has a model axis, the spec "members" of a `State` stands for those by its rules,
        and so does any spec of `Shared` arrays.
        """
        if self.model_axis == 1:
            return broadcast(specs, tree)

        found: list[PartitionSpec] = []

        def add(spec: PartitionSpec, branch: PyTree) -> None:
            for part in jax.tree.leaves(branch, is_leaf=has_rules):
                is_by_rule = isinstance(part, Shared) or (spec == MEMBERS and has_rules(part))
                found.extend(specs_by_rule(self, part) if is_by_rule else [spec] * _count(part))

        jax.tree.map(add, specs, tree, is_leaf=is_spec)
        return found

    def shard_map(self, fn: Callable, in_specs: Specs, out_specs: Specs) -> Callable:
        """Returns a function that runs `fn` on each device's own part of its arguments.

        With `shard_map`, members communicate only where `fn` says so. The partitioner of `jit`
        could gather them, as it does for vmapped convolutions. The check of varying axes is off,
        because it rejects a member that starts a `scan` from zeros.

        Specs are a tuple of tree prefixes of the arguments, and a tree prefix of the results.
        """
        if self.data_axis == 1:  # As in `sharding`.
            in_specs, out_specs = jax.tree.map(without_data, (in_specs, out_specs), is_leaf=is_spec)
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.mesh.axis_names},
            check_vma=False,
        )

    def map_rows(self, fn: Callable, in_specs: Specs, out_specs: Specs) -> Callable:
        """Returns a function that runs `fn` on each row's members and the whole batch.

        The compiler divides the work of a row over its columns and inserts the sums over the data
        axis. So `fn` has the results of one device, whatever it computes from a batch: sums, batch
        statistics, pairs of examples, random numbers. With one column this is `shard_map`. There
        `fn` may contain operations that the compiler cannot divide, such as `io_callback`.

        Specs are as in `shard_map`.
        """
        fn = without_axes(fn)
        if self.data_axis == self.model_axis == 1:
            return self.shard_map(fn, in_specs, out_specs)
        # With a model axis, one row is a mesh of its own: its program is a plain `jit`.
        is_mesh = self.model_axis > 1 and self.ensemble_axis == 1
        return mapped_over_rows(self, fn, in_specs, out_specs, is_mesh=is_mesh)

    def _map_manually(self, fn: Callable, in_specs: Specs, out_specs: Specs) -> Callable:
        """Returns the function of `map_rows` with a program that depends on no number of rows.

        A member then begins with the same bits in any number of rows.
        """
        return mapped_over_rows(self, without_axes(fn), in_specs, out_specs, is_mesh=False)

    def put(self, tree: PyTree, spec: Specs = "batch") -> PyTree:
        """Puts arrays on the mesh.

        Args:
            tree: Pytree of arrays. If the spec has the data axis, each host gives its own part of
                the batch, which is the whole batch on one host. Otherwise every host gives the
                whole array.
            spec: Spec of the arrays: "members" ([members, ...]), "batch" ([batch, ...], the same
                for all members), "member_batch" ([members, batch, ...]) or "shared" ([...]), or a
                tree prefix of these. With a data axis of 1, a batch may be any pytree of arrays.

        Returns:
            The tree as global arrays. Every host must call this.

        Raises:
            UserError: If an array does not fit the mesh, or a number does not fit in 32 bits.

        >>> layout = Layout.make(2, devices=jax.devices()[:2])
        >>> layout.put({"x": np.zeros((4, 3))})["x"].shape
        (4, 3)
        """
        specs = named_specs(spec)

        def put(spec: PartitionSpec, branch: PyTree) -> PyTree:
            if DATA in tuple(spec):
                return put_batch(self, branch, spec)
            if axis_of(spec, ENSEMBLE) == 0:
                return put_members(self, branch, spec)
            # A copy, as in `put_batch`.
            return put_everywhere(self, jax.tree.map(copy_of_numpy, as_held(branch)))

        return jax.tree.map(put, specs, tree, is_leaf=is_spec)

    def init(self, fn: Callable[[Key], Tree], key: Key) -> Tree:
        """Returns the states of all members, each created on the device that will hold it.

        Member `i` is given the key `fold_in(fold_in(key, i), 0)`. With `jax.random.key(seed)`, it
        is the key with which an `Ensemble` of this seed initialises its member `i`.

        Args:
            fn: Function that makes one member's state, any pytree of arrays, from a key.
            key: JAX PRNG key, [].

        Returns:
            One pytree with leaves [members, ...] on the mesh.

        >>> layout = Layout.make(4, devices=jax.devices()[:2])
        >>> layout.init(lambda key: jax.random.normal(key, (3,)), jax.random.key(0)).shape
        (4, 3)
        """

        def make(number: jax.Array) -> Tree:
            return fn(jax.random.fold_in(jax.random.fold_in(key, number), INIT))

        return self.init_on_mesh(pinned_generator()(make))

    def member_keys(self, seed: int) -> jax.Array:
        """Returns a key for each member: `fold_in(key(seed), member_id)`, keys[members].

        Args:
            seed: Seed, in [0, 2**32).
        """
        make = pinned_generator()(lambda number: member_key(np.uint32(seed), number))
        return self.init_on_mesh(make)

    def init_on_mesh(self, fn: Callable[[jax.Array], Tree]) -> Tree:
        """Returns what `fn(number)` makes of every member's number, created on their devices."""
        numbers = np.arange(self.num_members, dtype=np.int32)
        return self.init_program(fn)(put_members(self, numbers, MEMBERS))

    def init_program(self, fn: Callable[..., Tree]) -> jax.stages.Wrapped:
        """Returns the jitted `fn(number, *arrays)` of the numbers of all members."""

        def make(numbers: jax.Array, *arrays: PyTree) -> Tree:
            # The members are made one after another. This runs only once, and batched random
            # numbers would double the compilation time on a CPU.
            mapped = self.shard_map if self.model_axis == 1 else self._map_manually
            return mapped(
                lambda own, *arrays: jax.lax.map(lambda number: fn(number, *arrays), own),
                in_specs=(MEMBERS, *(REPLICATED for _ in arrays)),
                out_specs=MEMBERS,
            )(numbers, *arrays)

        return jax.jit(make)

    def check_batch_size(self, field: str, global_batch_size: int) -> None:
        """Raises a `UserError` that names a field unless the batch divides over the data axis."""
        parts, axes = self.data_axis, f"a data axis of {self.data_axis}"
        if self.is_fsdp:
            parts *= self.model_axis
            axes += f" whose examples the model axis of {self.model_axis} divides again"
        if global_batch_size % parts:
            raise UserError(
                f"{field} must be a multiple of {parts}: got {field}={global_batch_size} "
                f"and {axes} ({counted(self.mesh.size, 'device')}, mesh "
                f"{self}). Use a multiple, or fewer devices.",
                exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
            )

    def free_bytes(self) -> float:
        """Returns the free memory of a device of this host, in bytes; CPU devices share it."""
        if self.platform == "cpu":
            return psutil.virtual_memory().available / len(self.mesh.local_devices)
        stats = self.mesh.local_devices[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else math.inf

    @cached_property
    def host_columns(self) -> tuple[int, ...]:
        """Columns of the mesh in which this host has a device, ascending. The host feeds them."""
        return lines_of(self.mesh.devices.swapaxes(0, 1), jax.process_index())

    @cached_property
    def host_mesh_rows(self) -> tuple[int, ...]:
        """Rows of the mesh in which this host has a device, ascending."""
        return lines_of(self.mesh.devices, jax.process_index())

    def host_rows(self, global_batch_size: int) -> np.ndarray:
        """Returns the positions in the global batch that this host feeds, int64[host_batch]."""
        return numbers_of(self.host_columns, global_batch_size // self.data_axis)

    @property
    def host_members(self) -> np.ndarray:
        """Positions of the members on this host's rows of the mesh, int64[host_members]."""
        return numbers_of(self.host_mesh_rows, self.members_per_device)

    def on_one_device(self) -> "Layout":
        """Returns a layout of the same members on the first device of this layout."""
        return Layout.make(self.num_members, ensemble_axis=1, devices=[self.mesh.devices.flat[0]])

    def moved(self, tree: Tree, specs: Specs) -> Tree:
        """Moves arrays from another layout to this one. Both must be on this host's devices."""
        leaves, structure = jax.tree.flatten(tree)
        shardings = map(self.sharding, self.leaf_specs(specs, tree))
        return jax.tree.unflatten(structure, jax.device_put(leaves, [*shardings]))

    def placed(self, tree: PyTree, specs: Specs, where: str) -> PyTree:
        """Puts the arguments of a function on this mesh. Arrays that are there are not copied.

        Args:
            tree: Pytree of arrays.
            specs: Specs of the arrays, a tree prefix.
            where: Name of the arguments, for error messages.

        Raises:
            UserError: If an array has another number of members or examples, or does not fit in
                numbers of 32 bits.
        """
        leaves, structure = jax.tree.flatten(tree)
        if all(map(self.holds, leaves)) and self.model_axis == 1:
            check_lengths(self, tree, specs, where)
            return tree
        leaves = jax.tree.leaves(as_held(tree, where))
        check_lengths(self, tree, specs, where)

        def put(leaf: Leaf, spec: PartitionSpec) -> jax.Array:
            if self.holds(leaf) and self.divides(leaf, spec):
                return leaf
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf, self.sharding(spec))
            if MODEL in tuple(spec) and axis_of(spec, ENSEMBLE) is None:
                whole = np.array(leaf)  # A copy, as in `put_batch`.
                sharding = self.sharding(spec)
                return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
            return self.put(leaf, spec)

        return jax.tree.unflatten(structure, map(put, leaves, self.leaf_specs(specs, tree)))

    def divides(self, leaf: jax.Array, spec: PartitionSpec) -> bool:
        """Returns whether an array on this mesh is divided over the model axis as a spec says."""
        if self.model_axis == 1 or axis_of(spec, DATA) is not None:
            return True
        return leaf.sharding.is_equivalent_to(self.sharding(spec), leaf.ndim)

    def holds(self, leaf: Leaf) -> bool:
        """Returns whether an array is on this mesh, so that a program can use it without a copy."""
        if not isinstance(leaf, jax.Array):
            return False
        sharding = leaf.sharding
        if getattr(sharding, "mesh", None) is self.mesh:
            return True
        return self.mesh.size == 1 and sharding.device_set == {self.mesh.devices.flat[0]}


def _count(tree: PyTree) -> int:
    return len(jax.tree.leaves(tree))


def lines_of(grid: np.ndarray, process_id: int) -> tuple[int, ...]:
    """Returns the positions along the first axis of a grid at which a process has a device."""
    return tuple(
        position
        for position, devices in enumerate(grid)
        if any(device.process_index == process_id for device in devices.flat)
    )


def numbers_of(lines: Sequence[int], count: int) -> np.ndarray:
    """Returns the numbers on some lines, each of which has `count` of all, int64[numbers]."""
    return (np.array(lines, np.int64)[:, None] * count + np.arange(count)).ravel()
