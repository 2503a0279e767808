"""Members that a callback has stopped: they take no more updates, and stay in the ensemble."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.state import State, Stopping
from dist_ens.ground.types import Tree
from dist_ens.layout import MEMBERS, Waves, copied_like, copied_off_devices, to_host

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble


def with_stopping(state: State, *, stops: bool, keeps_best: bool = False) -> State:
    """Returns a state that holds which members have stopped, and each one's best parameters.

    It holds neither if no callback of the run `stops` members, and no best parameters unless one
    `keeps_best`.
    """
    held = state.stopping
    if not stops:
        return state if held == () else finished(state)
    step = (
        held.stopped_step if isinstance(held, Stopping) else jnp.zeros(state.step.shape, np.int32)
    )
    best = held.best if isinstance(held, Stopping) else ()
    if keeps_best and best == ():
        best = state.params, state.model_state
    best = copied_like(best, best) if keeps_best else ()
    return state._replace(stopping=Stopping(copied_like(step, state.step), best))


def finished(state: State) -> State:
    """Returns a state with each member's best parameters, if it holds them, and no record."""
    if not isinstance(state.stopping, Stopping):
        return state
    if state.stopping.best != ():
        params, model_state = state.stopping.best
        state = state._replace(params=params, model_state=model_state)
    return state._replace(stopping=())


def stopped_members(state: State) -> dict[int, int]:
    """Returns the step at which each member has stopped, by its id; every host calls it."""
    if not isinstance(state.stopping, Stopping):
        return {}
    steps, ids = to_host((state.stopping.stopped_step, state.member_id))
    return {int(ids[k]): int(steps[k]) for k in np.flatnonzero(steps)}


def stop(ensemble: "Ensemble", state: State, member_ids: Sequence[int], step: int) -> State:
    """Returns a state in which some members have stopped at a step, at their best parameters."""
    return _changed(ensemble, partial(_stopped, step=np.int32(step)), state, member_ids)


def keep_best(ensemble: "Ensemble", state: State, member_ids: Sequence[int]) -> State:
    """Returns a state whose parameters are now the best of some members."""
    return _changed(ensemble, _kept, state, member_ids)


def _changed(
    ensemble: "Ensemble",
    change: Callable[[State, jax.Array], State],
    state: State,
    member_ids: Sequence[int],
) -> State:
    """Returns a state after a change of the members that have one of the ids."""
    mine = np.isin(to_host(state.member_id), np.asarray(member_ids, np.int32))
    are_meant = copied_like(jnp.asarray(mine), state.step)
    if ensemble.waves == 1:
        return change(state, are_meant)
    waves = Waves(ensemble.layout, ensemble.waves)
    changed = (
        change(waves.take(state, n), waves.take(are_meant, n)) for n in range(ensemble.waves)
    )
    return waves.join(list(map(copied_off_devices, changed)), MEMBERS)


@partial(jax.jit, donate_argnums=0)
def _stopped(state: State, are_meant: jax.Array, step: jax.Array) -> State:
    held = state.stopping
    stops = are_meant & (held.stopped_step == 0)
    held = held._replace(stopped_step=jnp.where(stops, step, held.stopped_step))
    if held.best != ():
        params, model_state = _where(stops, held.best, (state.params, state.model_state))
        state = state._replace(params=params, model_state=model_state)
    return state._replace(stopping=held)


@partial(jax.jit, donate_argnums=0)
def _kept(state: State, are_meant: jax.Array) -> State:
    held = state.stopping
    best = _where(are_meant, (state.params, state.model_state), held.best)
    return state._replace(stopping=held._replace(best=best))


def _where(are_meant: jax.Array, new: Tree, old: Tree) -> Tree:
    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(are_meant.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(chosen, new, old)
