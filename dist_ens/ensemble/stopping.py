"""Members that a callback has stopped: they take no more updates, and stay in the ensemble."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.state import State, Stopping
from dist_ens.ground.types import Tree
from dist_ens.layout import copied_like, to_host


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


def stop(state: State, member_ids: Sequence[int], step: int) -> State:
    """Returns a state in which some members have stopped at a step, at their best parameters."""
    return _stopped(state, _among(state, member_ids), np.int32(step))


def keep_best(state: State, member_ids: Sequence[int]) -> State:
    """Returns a state whose parameters are now the best of some members."""
    return _kept(state, _among(state, member_ids))


def _among(state: State, member_ids: Sequence[int]) -> jax.Array:
    """Returns whether each member has one of the ids, bool[members]."""
    mine = np.isin(to_host(state.member_id), np.asarray(member_ids, np.int32))
    return copied_like(jnp.asarray(mine), state.step)


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
