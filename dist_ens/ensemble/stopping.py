"""Members that a callback has stopped: they take no more updates, and stay in the ensemble."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.failures import FailureRecord, no_failures
from dist_ens.ensemble.optimizer import evaluates_others
from dist_ens.ground.state import State, Stopping
from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout import MEMBERS, Waves, copied_like, copied_off_devices, to_host

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble

_RUNS = -1  # In place of the step at which a member has stopped, or was best.


def saved_structures(abstract: State) -> tuple[State, ...]:
    """Returns the structures that a saved state may have, first its own.

    The others are of runs with another policy, or with callbacks that may stop members.
    """
    record = jax.eval_shape(partial(no_failures, abstract.step.shape))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=abstract.step.sharding), record)
    is_checked = isinstance(abstract.failures, FailureRecord)
    policies = (abstract.failures, () if is_checked else like)
    step = abstract.step
    stops = ((), Stopping(step), Stopping(step, step, _evaluated_parts(abstract)))
    return tuple(
        abstract._replace(failures=failures, stopping=stopping)
        for stopping in stops
        for failures in policies
    )


def with_stopping(state: State, *, stops: bool, keeps_best: bool = False) -> State:
    """Returns a state that holds which members have stopped, and each one's best parameters.

    It holds neither if no callback of the run `stops` members, and no best parameters unless one
    `keeps_best`.
    """
    held = state.stopping
    if not stops:
        return state if held == () else finished(state)
    runs = jnp.full(state.step.shape, _RUNS, np.int32)
    held = held if isinstance(held, Stopping) else Stopping(runs)
    if not keeps_best:
        held = held._replace(best_step=(), best=())
    elif held.best == ():
        held = held._replace(best_step=runs, best=_evaluated_parts(state))
    like = Stopping(state.step, () if held.best == () else state.step, held.best)
    return state._replace(stopping=copied_like(held, like))


def finished(state: State) -> State:
    """Returns a state with each member's best parameters, if it holds them, and no record."""
    if not isinstance(state.stopping, Stopping):
        return state
    held = state.stopping
    if held.best != ():
        state = _with_best(state, held.best_step != _RUNS)
    return state._replace(stopping=())


def stopped_members(state: State) -> dict[int, int]:
    """Returns the step at which each member has stopped, by its id; every host calls it."""
    if not isinstance(state.stopping, Stopping):
        return {}
    steps, ids = to_host((state.stopping.stopped_step, state.member_id))
    return {int(ids[k]): int(steps[k]) for k in np.flatnonzero(steps != _RUNS)}


def stop(ensemble: "Ensemble", state: State, member_ids: Sequence[int], step: int) -> State:
    """Returns a state in which some members have stopped at a step, at their best parameters."""
    return _changed(ensemble, partial(_stopped, step=np.int32(step)), state, member_ids)


def keep_best(ensemble: "Ensemble", state: State, member_ids: Sequence[int], step: int) -> State:
    """Returns a state whose parameters are now the best of some members."""
    return _changed(ensemble, partial(_kept, step=np.int32(step)), state, member_ids)


def _evaluated_parts(state: State) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the parts of a state by which a member is evaluated."""
    opt_state = state.opt_state if evaluates_others(state.opt_state) else ()
    return state.params, state.model_state, opt_state


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
    stops = are_meant & (held.stopped_step == _RUNS)
    if held.best != ():
        state = _with_best(state, stops & (held.best_step != _RUNS))
    held = held._replace(stopped_step=jnp.where(stops, step, held.stopped_step))
    if isinstance(state.failures, FailureRecord):
        # Without further updates, a member whose last one failed would never become frozen, and
        # its NaN would reach the scores of the ensemble.
        failed = stops & (state.failures.num_in_a_row > 0)
        is_frozen, in_a_row = state.failures.is_frozen | failed, state.failures.num_in_a_row
        failures = state.failures._replace(
            is_frozen=is_frozen, num_in_a_row=jnp.where(failed, 0, in_a_row)
        )
        state = state._replace(failures=failures)
    return state._replace(stopping=held)


@partial(jax.jit, donate_argnums=0)
def _kept(state: State, are_meant: jax.Array, step: jax.Array) -> State:
    held = state.stopping
    best = _where(are_meant, _evaluated_parts(state), held.best)
    best_step = jnp.where(are_meant, step, held.best_step)
    return state._replace(stopping=held._replace(best_step=best_step, best=best))


def _with_best(state: State, are_meant: jax.Array) -> State:
    """Returns a state with the best parameters of some members in place of the present ones."""
    present = _evaluated_parts(state)
    params, model_state, opt_state = _where(are_meant, state.stopping.best, present)
    if present[2] != ():
        state = state._replace(opt_state=opt_state)
    return state._replace(params=params, model_state=model_state)


def _where(are_meant: jax.Array, new: Tree, old: Tree) -> Tree:
    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(are_meant.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(chosen, new, old)
