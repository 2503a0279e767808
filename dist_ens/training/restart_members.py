"""Restart of single members from their last checkpoint, or from a new seed."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import FailureRecord, saved_structures
from dist_ens.layout import MEMBERS, Layout, Waves, to_host
from dist_ens.members.label_scale import has_label_scale
from dist_ens.state import State
from dist_ens.types import Shapes

# Number of times that a member may be restarted. A member that fails again is frozen.
MOST_RESTARTS = 3


class MemberRestarts:
    """Restarts of single members of a run.

    Args:
        ensemble: Ensemble of the run.
        batch: Shapes and types of one column's part of a batch.
        opened: Checkpoints of the run; None without checkpoints.
    """

    def __init__(self, ensemble: Ensemble, batch: Shapes, opened: OpenCheckpoints | None) -> None:
        self._ensemble, self._batch, self._opened = ensemble, batch, opened
        self._waves = Waves(ensemble.layout, ensemble.waves)
        # Without waves, the layout of one wave is the whole layout.
        self._exchange = _exchange(self._waves.layout_of_one)

    def restart(
        self, policy: str, position: int, step: int, state: State, count: int
    ) -> tuple[State, str]:
        """Returns the state in which one member has been restarted, and a clause about it.

        The other members are unchanged. The member keeps the step and its place in the data.

        Args:
            policy: `rollback` or `reseed`.
            position: Position of the member.
            step: Number of steps that the state has seen.
            state: State of the ensemble.
            count: Number of earlier restarts of the member.

        Raises:
            RunError: If a checkpoint cannot be read.
        """
        ensemble = self._ensemble
        member_id = int(ensemble.ids[position])
        if policy == "reseed":
            seed = seed_of_restart(ensemble.seed, member_id, count)
            other = dataclasses.replace(ensemble, seed=seed).init(self._batch)
            other = _with_label_scale_of(state, other)
            told = f"it starts again from the seed {seed} after step {step:,}."
            return self._exchanged(state, other, position), told
        saved = None
        if self._opened is not None:
            failed_step = int(to_host(state.failures.last_step)[position])
            structures = saved_structures(ensemble.abstract_state(self._batch))
            saved = self._opened.restore_before(
                failed_step, *structures, member_ids=ensemble.ids.tolist()
            )
        if saved is None:
            told = "no earlier step is saved, so it continues with the next batch."
            return self._exchanged(state, state, position), told
        other, from_step = ensemble.with_record(saved[0]), saved[1]
        told = f"it continues after step {step:,} from its state at step {from_step:,}."
        return self._exchanged(state, other, position), told

    def _exchanged(self, state: State, other: State, position: int) -> State:
        """Returns a state in which the member at a position is that of another state.

        Args:
            state: State of the ensemble.
            other: State with the new member, of the same layout.
            position: Position of the member.
        """
        layout, waves = self._ensemble.layout, self._waves
        chosen = layout.put(np.arange(layout.num_members) == position, MEMBERS)
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
