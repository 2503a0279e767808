"""An update that only some members take."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from dist_ens.ground.state import State
from dist_ens.ground.types import ModelState, OptState, Params, PyTree, Tree


class Updated(NamedTuple):
    """The parts of a state that an update changes, except the step; see `State`."""

    params: Params
    model_state: ModelState
    opt_state: OptState

    @classmethod
    def of(cls, state: State) -> Self:
        """Returns these parts of a state."""
        return cls(state.params, state.model_state, state.opt_state)

    def merged_into(self, state: State) -> State:
        """Returns a state with these parts."""
        return state._replace(**self._asdict())


def take_if_running(update: Callable[..., Updated], state: State, *args: PyTree) -> State:
    """Returns the state after an update, or the same one if the member has stopped."""
    old = Updated.of(state)
    if state.stopping == ():
        return update(old, *args).merged_into(state)
    holds = state.stopping.stopped_step < 0
    return apply_update(update, holds, old, *args).merged_into(state)


def apply_update(update: Callable[..., Tree], holds: jax.Array, old: Tree, *args: PyTree) -> Tree:
    """Returns a member's new values `update(old, *args)` if `holds`, bool[], or else the old ones.

    On an accelerator the update is always computed, and then the new or the old values are
    selected. XLA joins the selection with the update, which reads the old values anyway. A
    conditional would be slower, since the host of a GPU waits for its condition. On a CPU the
    update is conditional.
    """

    def selected(holds: jax.Array, old: Tree, *args: PyTree) -> Tree:
        return jax.tree.map(partial(jax.lax.select, holds), update(old, *args), old)

    return jax.lax.platform_dependent(holds, old, *args, cpu=_conditional(update), default=selected)


def _conditional(update: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns the function `of_one(holds, old, *args)` for CPUs; see `apply_update`.

    `jax.vmap` turns a conditional of one member into a selection between the old and the new
    arrays of all members. The selection costs several times as much as the update, since the arrays
    can no longer be updated in place. So under `vmap` the function has another form: if all members
    take the update, nothing is selected, and the arrays are updated in place.
    """

    def keep(old: Tree, *args: PyTree) -> Tree:
        return old

    @custom_vmap
    def of_one(holds: jax.Array, old: Tree, *args: PyTree) -> Tree:
        return jax.lax.cond(holds, update, keep, old, *args)

    @of_one.def_vmap
    def of_several(
        count: int, are_batched: list[PyTree], holds: jax.Array, old: Tree, *args: PyTree
    ) -> tuple[Tree, PyTree]:
        args = jax.tree.map(_in_row_major_layout, args)
        axes = tuple(jax.tree.map(lambda batched: 0 if batched else None, are_batched))[1:]
        update_all = jax.vmap(update, in_axes=axes, axis_size=count)
        keep_all = jax.vmap(keep, in_axes=axes, axis_size=count)

        def of_all(old: Tree) -> Tree:
            return update_all(old, *args)

        def of_some(old: Tree) -> Tree:
            # The members that take the update must have the bits that they have where all members
            # do. So it is compiled as it is there: as the body of a loop.
            new = _once_if(holds.any(), of_all, old)
            return jax.tree.map(partial(jax.vmap(jax.lax.select), holds), new, old)

        old = keep_all(old, *args)
        new = _once_if(holds.all(), of_all, old)
        new = _once_if(~holds.all(), of_some, new)
        return new, jax.tree.map(lambda _: True, new)

    return of_one


def _in_row_major_layout(leaf: jax.Array) -> jax.Array:
    """Returns an array in the layout that a loop needs; XLA would copy it at each of its uses."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return with_layout_constraint(leaf, Layout(major_to_minor=tuple(range(leaf.ndim))))


def _once_if(holds: jax.Array, change: Callable[[Tree], Tree], values: Tree) -> Tree:
    """Returns changed values if a condition holds, bool[], and the same values if not.

    It is a loop of one step or none. A loop changes its values in place. XLA compiles a conditional
    with two results such that its results have other memory, from which they are copied back.
    """

    def step(carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        return jnp.bool_(False), change(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], step, (holds, values))[1]
