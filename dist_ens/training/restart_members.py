"""Restart of single members from their last checkpoint, or from a new seed."""

from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import FailureRecord, saved_structures, step_of
from dist_ens.layout import MEMBERS, Layout, Waves
from dist_ens.members.label_scale import has_label_scale
from dist_ens.state import State
from dist_ens.training.finite_members import finite_members
from dist_ens.types import Shapes

# Number of times that a member may be restarted. A member that fails again is frozen.
MOST_RESTARTS = 3


class MemberRestarts:
    """Restarts of single members of a run.

    Args:
        ensemble: Ensemble of the run.
        batch: Shapes and types of a batch.
        opened: Checkpoints of the run; None without checkpoints.
    """

    def __init__(self, ensemble: Ensemble, batch: Shapes, opened: OpenCheckpoints | None) -> None:
        self._ensemble, self._batch, self._opened = ensemble, batch, opened
        self._waves = Waves(ensemble.layout, ensemble.waves)
        # Without waves, the layout of one wave is the whole layout.
        self._exchange = _exchange(self._waves.layout_of_one)

    def restart(
        self, policy: str, positions: Sequence[int], step: int, state: State, record: FailureRecord
    ) -> tuple[State, dict[int, str]]:
        """Returns the state in which some members have been restarted, and a clause about each.

        The other members are unchanged. A member keeps the step and its place in the data.

        Args:
            policy: `rollback` or `reseed`.
            positions: Positions of the members.
            step: Number of steps that the state has seen.
            state: State of the ensemble.
            record: Record of all members in this state, in NumPy.

        Returns:
            The state, and a clause for each position.

        Raises:
            RunError: If a checkpoint cannot be read.
        """
        if policy == "reseed":
            return self._reseeded(positions, step, state, record)
        return self._rolled_back(positions, step, state, record)

    def _reseeded(
        self, positions: Sequence[int], step: int, state: State, record: FailureRecord
    ) -> tuple[State, dict[int, str]]:
        """Returns the state and the clauses of `restart` for `reseed`."""
        ensemble, told = self._ensemble, {}
        for position in positions:  # Each member has a seed of its own.
            count = int(record.num_restarts[position])
            seed = seed_of_restart(ensemble.seed, int(ensemble.ids[position]), count)
            other = ensemble.replace(seed=seed).init(self._batch)
            state = self._exchanged(state, _with_label_scale_of(state, other), {position})
            told[position] = f"it starts again from the seed {seed} after step {step:,}."
        return state, told

    def _rolled_back(
        self, positions: Sequence[int], step: int, state: State, record: FailureRecord
    ) -> tuple[State, dict[int, str]]:
        """Returns the state and the clauses of `restart` for `rollback`.

        A member takes its newest finite state before its failure. An update may have made a
        parameter infinite one step before a loss showed it, and that step may be saved. If no saved
        state of the member is finite, its newest one is taken: a member may have infinite
        parameters by design, such as a mask.
        """
        ensemble = self._ensemble
        failed_steps = {position: step_of(record.last_step[position]) for position in positions}
        newest: dict[int, int] = {}  # Step of the newest state of each member, finite or not.
        told = dict.fromkeys(
            positions, "no earlier step is saved, so it continues with the next batch."
        )
        waiting, before = {*positions}, max(failed_steps.values())
        while waiting and (saved := self._saved_before(before)) is not None:
            other, before = saved
            read = (other.params, other.model_state)
            are_earlier = {k for k in waiting if failed_steps[k] > before}
            newest |= {k: before for k in are_earlier - newest.keys()}
            taken = are_earlier & {*np.flatnonzero(finite_members(read, ensemble)).tolist()}
            state = self._taken_from(before, state, other, taken, step, told)
            waiting -= taken
        for before in sorted({newest[k] for k in waiting if k in newest}):
            taken = {k for k in waiting if newest.get(k) == before}
            saved = self._saved_before(before + 1)
            if saved is not None:
                state = self._taken_from(saved[1], state, saved[0], taken, step, told)
                waiting -= taken
        return (self._exchanged(state, state, waiting) if waiting else state), told

    def _taken_from(
        self,
        from_step: int,
        state: State,
        other: State,
        taken: set[int],
        step: int,
        told: dict[int, str],
    ) -> State:
        """Returns a state with some members of a saved one, and tells where they come from."""
        if not taken:
            return state
        clause = f"it continues after step {step:,} from its state at step {from_step:,}."
        told |= dict.fromkeys(taken, clause)
        return self._exchanged(state, other, taken)

    def _saved_before(self, step: int) -> tuple[State, int] | None:
        """Returns the newest saved state of an earlier step than a given one, with its step."""
        if self._opened is None:
            return None
        ensemble = self._ensemble
        structures = saved_structures(ensemble.abstract_state(self._batch))
        saved = self._opened.restore_before(step, *structures, member_ids=ensemble.ids.tolist())
        return None if saved is None else (ensemble.with_record(saved[0]), saved[1])

    def _exchanged(self, state: State, other: State, positions: Collection[int]) -> State:
        """Returns a state in which the members at some positions are those of another state.

        Args:
            state: State of the ensemble.
            other: State with the new members, of the same layout.
            positions: Positions of the members.
        """
        layout, waves = self._ensemble.layout, self._waves
        chosen = layout.put(np.isin(np.arange(layout.num_members), list(positions)), MEMBERS)
        if waves.count == 1:
            return self._exchange(state, other, chosen)
        parts = []
        for number in range(waves.count):
            of_wave = self._exchange(
                waves.take(state, number), waves.take(other, number), waves.take(chosen, number)
            )
            parts.append(waves.off_devices(of_wave))
        return waves.join(parts, MEMBERS)


def seed_of_restart(seed: int, member_id: int, count: int) -> int:
    """Returns the seed of a member that starts again, in [0, 2**32).

    Args:
        seed: Seed of the ensemble.
        member_id: Id of the member.
        count: Number of earlier restarts of the member.

    >>> seed_of_restart(0, 3, 0) == seed_of_restart(0, 3, 1)
    False
    """
    return int(np.random.SeedSequence([seed, member_id, count + 1]).generate_state(1)[0])


def _exchange(layout: Layout) -> Callable[[State, State, jax.Array], State]:
    """Returns the program that takes chosen members from another state, over the mesh."""

    def exchanged(state: State, other: State, chosen: jax.Array) -> State:
        def taken(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        parts = jax.tree.map(
            taken,
            (other.key, other.params, other.model_state, other.opt_state),
            (state.key, state.params, state.model_state, state.opt_state),
        )
        key, params, model_state, opt_state = parts
        return state._replace(
            key=key,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            failures=_restarted_record(state.failures, chosen),
        )

    mapped = layout.shard_map(exchanged, in_specs=(MEMBERS, MEMBERS, MEMBERS), out_specs=MEMBERS)
    return jax.jit(mapped)


def _restarted_record(record: FailureRecord, chosen: jax.Array) -> FailureRecord:
    """Returns the record of failed updates after some members have been restarted.

    Their losses are forgotten, and what is known of their failures is kept.

    Args:
        record: Record of the members.
        chosen: Whether each member is restarted, bool[members].
    """
    begins = FailureRecord(
        is_frozen=jnp.zeros_like(record.is_frozen),
        num_failures=record.num_failures,
        num_in_a_row=jnp.zeros_like(record.num_in_a_row),
        cause=record.cause,
        first_step=record.first_step,
        last_step=record.last_step,
        num_restarts=record.num_restarts + 1,
        num_losses=jnp.zeros_like(record.num_losses),
        loss_mean=jnp.zeros_like(record.loss_mean),
        loss_variance=jnp.zeros_like(record.loss_variance),
    )
    return jax.tree.map(lambda new, old: jnp.where(chosen, new, old), begins, record)


def _with_label_scale_of(state: State, other: State) -> State:
    """Returns another state that standardises labels as a state does, if it standardises them."""
    if not has_label_scale(state.model_state):
        return other
    scale = {name: leaf for name, leaf in state.model_state.items() if name != "network"}
    return other._replace(model_state={**other.model_state, **scale})
