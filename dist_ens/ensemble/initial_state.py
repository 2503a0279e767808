"""The state of an ensemble before its first step, created on the devices that hold it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.failures import no_failures
from dist_ens.ensemble.optimizer import optimizer_state
from dist_ens.errors import UserError, counted, first_line, kind_of
from dist_ens.host_keys import dtype_in_jax
from dist_ens.layout import MEMBERS, Layout, Waves
from dist_ens.members import Member
from dist_ens.members.member import INPUTS_RULE
from dist_ens.randomness import INIT, member_key, pinned_generator
from dist_ens.state import (
    State,
    described,
    differing,
    leaf_types,
    stack_members,
    without_weak_types,
)
from dist_ens.types import Leaf, ModelState, Optimizer, Params, PyTree, Shapes


def state_of_one(
    member: Member, optimizer: Optimizer, shapes: Shapes, *, is_checked: bool = False
) -> Callable[..., State]:
    """Returns the function that makes one member's state, `make(member_id, seed) -> State`.

    Args:
        member: Network of one member.
        optimizer: Optimizer of one member.
        shapes: Shapes and types of the inputs of the network's `init`, a pytree.
        is_checked: Whether the state has a record of failed updates.
    """

    @pinned_generator()
    def make(member_id: jax.Array, seed: jax.Array) -> State:
        key = member_key(seed, member_id)
        inputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        try:
            params, model_state = member.init(jax.random.fold_in(key, INIT), inputs)
        except (UserError, RuntimeError):  # A device may be full.
            raise
        except Exception as error:  # The network of a user may raise anything.
            raise UserError(
                f"The network ({member.name}) could not be initialised on {described(shapes)}: "
                f"{type(error).__name__}: {first_line(error)} It is given {INPUTS_RULE}. Correct "
                "the network or the data, or take the inputs out of the batch in two functions: "
                "as_member(init=..., apply=...)."
            ) from error
        params = without_weak_types(params)
        return without_weak_types(
            State(
                step=jnp.zeros((), jnp.int32),
                member_id=member_id,
                key=key,
                params=params,
                model_state=model_state,
                opt_state=optimizer_state(optimizer, params, key),
                failures=no_failures() if is_checked else (),
            )
        )

    return make


class Initializer:
    """The program that makes the state of all members, each on the device that will hold it.

    Args:
        make: Function that makes one member's state.
        layout: Layout of the members.
        waves: Number of waves. If it is above 1, the state is in the hosts' memory.
    """

    def __init__(self, make: Callable[..., State], layout: Layout, waves: int) -> None:
        self._layout, self._waves = layout, Waves(layout, waves)
        self._of_wave = layout if waves == 1 else self._waves.layout_of_one
        self._program = self._of_wave.born_by(make)

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
        """Shapes, types and shardings of the program's arguments, the ids and the seed."""
        ids = jax.ShapeDtypeStruct(
            (self._of_wave.num_members,), np.int32, sharding=self._of_wave.sharding(MEMBERS)
        )
        return ids, jax.ShapeDtypeStruct((), np.uint32)

    def __call__(self, ids: np.ndarray, seed: int) -> State:
        """Returns the state at step 0, leaves [members, ...].

        Args:
            ids: Ids of the members, int32[members].
            seed: Seed, in [0, 2**32).
        """
        count, program = self._waves.count, self.compiled.result()
        by_wave = ids.reshape(self._layout.ensemble_axis, count, -1).swapaxes(0, 1)
        states = (
            program(self._of_wave.put(wave.ravel(), MEMBERS), np.uint32(seed)) for wave in by_wave
        )
        if count == 1:
            return next(states)
        return self._waves.join([self._waves.off_devices(state) for state in states], MEMBERS)

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, types and shardings of the state."""
        of_wave = jax.eval_shape(self._program, *self._arguments)

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            waits = self._waves.count > 1 and self._waves.resting_sharding(leaf.dtype)
            sharding = waits or self._layout.sharding(MEMBERS)
            shape = (self._layout.num_members, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(placed, of_wave)


def state_from(
    params: Sequence[Params],
    model_states: Sequence[ModelState] | None,
    *,
    member: Member,
    optimizer: Optimizer,
    layout: Layout,
    ids: np.ndarray,
    seed: int,
    waves: int,
    is_checked: bool = False,
) -> State:
    """Returns the state of networks that were trained elsewhere; see `Ensemble.state_of`.

    Args:
        params: Parameters, or networks that hold them, one for each member.
        model_states: Model states, one for each member; None if the networks have or hold none.
        member: Network of one member.
        optimizer: Optimizer of one member.
        layout: Layout of the members.
        ids: Ids of the members, int32[members].
        seed: Seed, in [0, 2**32).
        waves: Number of waves. If it is above 1, the state is in the hosts' memory.
        is_checked: Whether the state has a record of failed updates.

    Raises:
        UserError: If the members cannot be stacked, their number is not that of the ids, or they do
            not fit the network.
    """
    if not isinstance(params, list | tuple):
        raise UserError(
            f"params is {kind_of(params)}, not a list. Give a list with one pytree of "
            "parameters for each member. unstack_members makes the list from stacked parameters."
        )
    if len(params) != len(ids):
        raise UserError(
            f"params has {counted(len(params), 'member')}, and the ensemble has {len(ids)}. Make "
            f"the ensemble with num_members={len(params)}."
        )
    if model_states is not None and len(model_states) != len(params):
        raise UserError(
            f"params has {counted(len(params), 'member')}, and model_states has "
            f"{len(model_states)}. Give one model state for each member."
        )
    parts = list(map(member.parts_of, params, model_states or [None] * len(params)))
    stacked, model_state = without_weak_types(
        (stack_members([own for own, _ in parts]), stack_members([own for _, own in parts]))
    )
    check_parts(member, *parts[0])
    keys = jax.vmap(partial(member_key, seed))(jnp.asarray(ids))
    with pinned_generator():
        opt_state = jax.vmap(partial(optimizer_state, optimizer))(stacked, keys)
    state = layout.put(
        without_weak_types(
            State(
                step=jnp.zeros(len(ids), jnp.int32),
                member_id=jnp.asarray(ids),
                key=keys,
                params=stacked,
                model_state=model_state,
                opt_state=opt_state,
                failures=no_failures((len(ids),)) if is_checked else (),
            )
        ),
        MEMBERS,
    )
    return state if waves == 1 else Waves(layout, waves).off_devices(state)


def check_parts(member: Member, params: Params, model_state: ModelState) -> None:
    """Checks that parameters and a model state are those of a network, as far as that is known.

    Nothing is checked if the shapes of the network depend on its inputs, as those of flax.linen do.

    Args:
        member: Network of one member.
        params: Parameters of one member.
        model_state: Model state of one member; `()` if it has none.

    Raises:
        UserError: If a leaf is absent, or has another type or shape than in the network.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        expected = jax.eval_shape(lambda key: member.init(key, None), key)
    except Exception:  # The network needs its inputs, and may raise anything without them.
        return
    for name, found, of_network in zip(
        ("params", "model_states"), (params, model_state), expected, strict=True
    ):
        there, here = leaf_types(found), leaf_types(of_network)
        for leaf in differing(here, there):
            raise UserError(
                f"{name} does not fit the network {member.name}: leaf {leaf} is "
                f"{there.get(leaf, 'absent')} in {name}[0] and {here.get(leaf, 'absent')} in the "
                f"network. Give the {name} of networks like this one."
            )


def shapes_of(tree: PyTree) -> Shapes:
    """Returns the shapes and types that a pytree has in JAX, which holds numbers in 32 bits.

    Args:
        tree: Pytree of arrays, numbers, or shapes and types (`jax.ShapeDtypeStruct`).
    """

    def shape_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        array = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
        return jax.ShapeDtypeStruct(array.shape, dtype_in_jax(array.dtype))

    return jax.tree.map(shape_of, tree)
