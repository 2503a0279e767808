"""The state of an ensemble before its first step, on the devices, and the scale of its labels."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from dist_ens.ensemble.failures import no_failures
from dist_ens.ensemble.optimizer import optimizer_of, optimizer_state
from dist_ens.ground.errors import UserError, counted, kind_of
from dist_ens.ground.narrowing import dtype_in_jax
from dist_ens.ground.randomness import INIT, member_key, pinned_generator
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State, stack_members, without_weak_types
from dist_ens.ground.types import (
    Batch,
    Inputs,
    Key,
    Leaf,
    ModelState,
    OptimizerOfMember,
    Params,
    PyTree,
    Shapes,
    Specs,
)
from dist_ens.layout import MEMBERS, Layout, Waves, copied_off_devices, to_host
from dist_ens.layout.placing import resting_sharding
from dist_ens.losses import Objective
from dist_ens.members import Member, with_compute_dtype
from dist_ens.members.member import (
    INPUTS_RULE,
    MEAN,
    NETWORK,
    STD,
    explained_network,
    has_label_scale,
    with_label_scale,
)

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble

# Standard deviations of labels whose square float32 holds.
_LEAST_STD, _MOST_STD = 1e-18, 1e18


def network_for(member: Member, objective: Objective | None, dtype: str | None) -> Member:
    """Returns the member that is trained: with its compute type, and the scale of its labels."""
    network = with_compute_dtype(member, dtype or "float32")
    if objective is None or not objective.standardize:
        return network
    return with_label_scale(network, objective.label_shape)


def state_of_one(
    member: Member, optimizer: OptimizerOfMember, shapes: Shapes, *, is_checked: bool
) -> Callable[..., State]:
    """Returns `make((member_id, hyper), seed, shared)` of one member, given shapes of inputs."""

    @pinned_generator()
    def make(of_member: tuple[jax.Array, PyTree], seed: jax.Array, shared: Shared) -> State:
        member_id, hyper = of_member
        key = member_key(seed, member_id)
        inputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        what = f"The network ({member.name}) could not be initialised on"
        with explained_network(what, shapes, f"It is given {INPUTS_RULE}."):
            network = member.given(hyper, shared)
            params, model_state = network.init(jax.random.fold_in(key, INIT), inputs)
        return _at_step_0(optimizer, is_checked, member_id, key, hyper, params, model_state)

    return make


def _at_step_0(
    optimizer: OptimizerOfMember,
    is_checked: bool,
    member_id: jax.Array,
    key: Key,
    hyper: PyTree,
    params: Params,
    model_state: ModelState,
) -> State:
    """Returns the state of one member with some parameters and model state."""
    params = without_weak_types(params)
    return without_weak_types(
        State(
            step=jnp.zeros((), jnp.int32),
            member_id=member_id,
            key=key,
            params=params,
            model_state=model_state,
            opt_state=optimizer_state(optimizer_of(optimizer, hyper), params, key),
            failures=no_failures() if is_checked else (),
            hyper=hyper,
        )
    )


class Initializer:
    """The program that makes the state of all members on the devices; of waves, on the hosts.

    Attributes:
        make: The function of one member; see `state_of_one`.
    """

    def __init__(
        self,
        make: Callable[..., State],
        layout: Layout,
        waves: int,
        hyper: Collection[str],
        shared: Shared,
    ) -> None:
        self.make, self._names, self._shared = make, sorted(hyper), shared
        self._layout, self._waves = layout, Waves(layout, waves)
        self._of_wave = layout if waves == 1 else self._waves.layout_of_one
        self._program = self._of_wave.init_program(make)

    @cached_property
    def compiled(self) -> Future[jax.stages.Compiled]:
        """The compiled program, on which XLA works in a thread from the first access on."""
        lowered = self._program.lower(*self._arguments)
        pool = ThreadPoolExecutor(1)
        # LLVM's highest level takes three times as long for the unrolled rounds of a random
        # generator. The level below gives the same numbers at the same speed.
        level: dict[str, str | bool] = {"xla_backend_optimization_level": "2"}
        options = level if self._layout.platform == "cpu" else None
        compiled = pool.submit(lowered.compile, options)
        pool.shutdown(wait=False)
        return compiled

    @property
    def _arguments(self) -> Shapes:
        """Shapes, types and shardings of the program's arguments: members, seed, shared arrays."""

        def of_members(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
            shape, sharding = (self._of_wave.num_members,), self._of_wave.sharding(MEMBERS)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        hyper = {name: of_members(np.float32) for name in self._names} or ()
        return (of_members(np.int32), hyper), jax.ShapeDtypeStruct((), np.uint32), self._shared

    def __call__(self, ids: np.ndarray, seed: int, hyper: Mapping[str, np.ndarray]) -> State:
        """Returns the state at step 0 of the members with some ids, int32[members].

        `hyper` holds their settings by name, float32[members] each.
        """
        count, program = self._waves.count, self.compiled.result()

        def of_wave(values: np.ndarray, number: int) -> np.ndarray:
            return values.reshape(self._layout.ensemble_axis, count, -1)[:, number].ravel()

        members = ids, {name: hyper[name] for name in self._names} or ()
        of_waves = (jax.tree.map(partial(of_wave, number=n), members) for n in range(count))
        states = (
            program(self._of_wave.put(wave, MEMBERS), np.uint32(seed), self._shared)
            for wave in of_waves
        )
        if count == 1:
            return next(states)
        return self._waves.join([copied_off_devices(state) for state in states], MEMBERS)

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, types and shardings of the state."""
        of_wave = jax.eval_shape(self._program, *self._arguments)

        def placed(leaf: jax.ShapeDtypeStruct, spec: Specs) -> jax.ShapeDtypeStruct:
            sharding: jax.sharding.Sharding = self._layout.sharding(spec)
            if self._waves.count > 1:
                sharding = resting_sharding(sharding, leaf.dtype)
            shape = (self._layout.num_members, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        leaves, structure = jax.tree.flatten(of_wave)
        specs = self._layout.leaf_specs(MEMBERS, of_wave)
        return jax.tree.unflatten(structure, map(placed, leaves, specs))


def state_from(
    ensemble: "Ensemble",
    params: Sequence[Params],
    model_states: Sequence[ModelState] | None,
    member: Member,
) -> State:
    """Returns the state of networks that were trained elsewhere; see `Ensemble.state_of`."""
    for name, given in (("params", params), ("model_states", model_states or params)):
        count = len(given) if isinstance(given, list | tuple) else 0
        if count != ensemble.num_members:
            raise UserError(
                f"{name} has {counted(count, 'member')}, and the ensemble has "
                f"{ensemble.num_members}. Give a list with one pytree for each member. "
                "unstack_members makes the list from stacked parameters."
            )
    parts = list(map(member.parts_of, params, model_states or [None] * len(params)))
    stacked = [stack_members([each[part] for each in parts]) for part in range(2)]
    ids, hyper = jnp.asarray(ensemble.ids), dict(ensemble.hyper) or ()
    keys = jax.vmap(partial(member_key, ensemble.seed))(ids)
    make = partial(_at_step_0, ensemble.optimizer, ensemble.failure_policy.is_checked)
    with pinned_generator():
        state = jax.vmap(make)(ids, keys, hyper, *stacked)
    state = ensemble.layout.put(state, MEMBERS)
    return state if ensemble.waves == 1 else copied_off_devices(state)


def inputs_of(ensemble: "Ensemble", batch: Batch) -> Inputs | Batch:
    """Returns what the network of an ensemble is initialised with: `batch["inputs"]`.

    With a loss function, a batch that is no dict with this key is the inputs itself. With a step of
    the user's own, it is the batch.
    """
    if ensemble.own_step is not None:
        return batch
    objective = ensemble.objective
    key = Objective.INPUTS if objective is None else objective.INPUTS
    if isinstance(batch, dict) and key in batch:
        return batch[key]
    if objective is None:
        return batch
    keys = ", ".join(map(repr, batch)) if isinstance(batch, dict) else kind_of(batch)
    raise UserError(
        f"The objective {objective.name} takes batches with the key {key!r}: got {keys}. Give a "
        f"dict with {key!r} and {objective.LABELS!r}, or use a loss function for other batches."
    )


def shapes_of(tree: PyTree) -> Shapes:
    """Returns the shapes and types that arrays and numbers have in JAX, which uses 32 bits."""

    def shape_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        array = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
        return jax.ShapeDtypeStruct(array.shape, dtype_in_jax(array.dtype))

    return jax.tree.map(shape_of, tree)


def begin_label_scale(layout: Layout, state: State, shape: tuple[int, ...]) -> State:
    """Returns a state whose model state also holds a scale of labels, its own if it has one."""
    given = state.model_state
    if has_label_scale(given):
        return state
    held = _held(layout, np.zeros(shape), np.ones(shape))
    return state._replace(model_state={NETWORK: given, **held})


def set_label_scale(
    layout: Layout,
    state: State,
    labels: np.ndarray,
    shape: tuple[int, ...],
    weights: np.ndarray | None = None,
) -> State:
    """Returns a state that standardises labels by the statistics of all training labels.

    `shape` is (targets,) if each target has statistics of its own, and () otherwise. `weights` are
    those of the examples, or of the rows of their labels.
    """
    values = np.asarray(labels, np.float64)
    rows = values.shape[: values.ndim - len(shape)]
    if weights is not None:
        of_rows = weights.reshape(weights.shape + (1,) * (len(rows) - weights.ndim))
        weights = np.broadcast_to(of_rows, rows).ravel()
    values = values.reshape(-1, *shape)
    mean = np.average(values, axis=0, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    if (odd := std[(std > 0) & ((std < _LEAST_STD) | (std > _MOST_STD))]).size:
        raise UserError(
            f"The labels have a standard deviation of {odd.flat[0]:.3g}, and float32 does not hold "
            "the variances of their predictions. Change their unit."
        )
    held = _held(layout, mean, std)
    return state._replace(model_state={**state.model_state, **held})


def _held(layout: Layout, mean: np.ndarray, std: np.ndarray) -> dict[str, jax.Array]:
    """Returns the mean and std as every member holds them, float32[members, ...]."""
    return {
        name: layout.put(np.stack([value.astype(np.float32)] * layout.num_members), MEMBERS)
        for name, value in ((MEAN, mean), (STD, std))
    }


def label_scale(state: State) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels' mean and std that a state holds, float64[] or float64[targets]."""
    mean, std = to_host((state.model_state[MEAN], state.model_state[STD]))
    return mean[0].astype(np.float64), std[0].astype(np.float64)
