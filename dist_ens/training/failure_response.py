"""The service that responds to members whose updates fail."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.callbacks import STOP, StepInfo
from dist_ens.callbacks.protocol import Service, Stop, StopMembers, stop_members
from dist_ens.checkpoint import Leaf as SavedLeaf
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.checkpoint.lineage import FAILED, Event
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import (
    CAUSES,
    FAILED_UPDATES,
    IS_FROZEN,
    MOST_SKIPPED_IN_A_ROW,
    FailedMember,
    FailureRecord,
    failed_members,
    frozen_positions,
)
from dist_ens.ensemble.stopping import stopped_members
from dist_ens.ground.errors import ExitCode, RunError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Leaf, PyTree
from dist_ens.layout import MEMBERS, Waves, to_host

# What happens to a failed member, by policy, as the second clause of a sentence.
_RESPONSES = {
    "skip": f"the update was skipped. {MOST_SKIPPED_IN_A_ROW} failed updates in a row freeze it.",
    "freeze": "it takes no more updates and is left out of the scores of the ensemble.",
    "drop": "it is dropped: it takes no more updates and is left out of the scores.",
}
_FROZEN_AFTER_SKIPS = (
    f"{MOST_SKIPPED_IN_A_ROW} updates in a row failed, so it takes no more updates and is left out "
    "of the scores of the ensemble."
)


class _Call(NamedTuple):
    """A call of the update in which members failed."""

    step: int
    failed: list[tuple[int, bool]]  # Position of each member that failed, and whether it is frozen.
    are_all_frozen: bool


class FailureResponse(Service):
    """The failed members of a running loop.

    The device sees a failed update and does not take it. The host reads the metrics of a call after
    the next call has been dispatched. What it does then depends on the steps alone, not on the time
    at which metrics arrive, so that it is the same on all hosts and in a run that is resumed.
    The record of the first state may hold failures of the run before. The lineages of the members
    in the checkpoints get what happens to them.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        step: int,
        state: State,
        warn: Callable[[str], None],
        opened: OpenCheckpoints | None = None,
        joined: Callable[[State], State] = lambda state: state,
    ) -> None:
        self._joined = joined  # Returns the state of all members.
        self._ensemble, self._policy = ensemble, ensemble.failure_policy
        self._member_ids: Sequence[int] = ensemble.ids.tolist()
        self._warn, self._opened, self._step = warn, opened, step
        self.have_all_failed = False
        count = ensemble.num_members
        # A thread that saves may read metrics while the loop goes on.
        self._reading = threading.Lock()
        self._failed_updates = np.zeros(count, np.int64)  # Of each member, at the last row read.
        self._calls: list[_Call] = []
        # Positions of members that were reported, with whether they were frozen then.
        self._reported: set[tuple[int, bool]] = set()
        # Without a policy: number, first and last step of each member's losses that are not finite.
        self._lost = np.zeros((3, count), np.int64)
        # The same by member id, at the steps that are being saved.
        self._lost_at: dict[int, dict[int, list[int]]] = {}
        self._dropped: list[int] = []  # Ids of the members to be stopped, as they are dropped.
        self.stops_members = self._policy.policy == "drop"
        # Last steps of the calls after which no loss was finite, or all members were frozen.
        self._lost_steps: set[int] = set()
        self._tested_step = 0  # Last of these steps after which the parameters were read.
        self._was_finite = False  # Whether a member had finite parameters in a state to save.
        if isinstance(state.failures, FailureRecord):
            with jax.transfer_guard("allow"):
                self._begin(step, to_host(state.failures))
                if self.stops_members:  # A state that is given has no stops.
                    frozen = {self._member_ids[k] for k in frozen_positions(state)}
                    self._dropped = sorted(frozen - stopped_members(state).keys())

    def _begin(self, step: int, record: FailureRecord) -> None:
        """Reads the record of the first state."""
        self._failed_updates = np.asarray(record.num_failures, np.int64)
        failed = _with_state(np.flatnonzero(record.num_failures), record.is_frozen)
        self._reported = {(k, frozen) for k, frozen in failed if self._was_reported(k, record)}
        # The run before may have ended before it could respond to these. A member that can still
        # be updated waits for nothing but the sentence of `skip`.
        skips = self._policy.policy == "skip"
        waiting = [each for each in failed if each[1] or (skips and each not in self._reported)]
        if waiting:
            self._calls.append(_Call(step, waiting, bool(record.is_frozen.all())))

    def _was_reported(self, position: int, record: FailureRecord) -> bool:
        """Returns whether the run before responded to a failure, by the lineage of the member."""
        if self._opened is None:
            return True
        lineage = self._opened.lineage_of(self._member_ids[position])
        steps = [event.step for event in lineage.events if event.what.startswith(FAILED)]
        if not record.is_frozen[position]:
            return bool(steps)
        if self._policy.policy == "drop" and lineage.dropped_step is None:
            return False
        return int(record.last_step[position]) in steps

    def state(self) -> Callable[[], JsonDict | None]:
        """Returns a function, called later, of what the records of the members do not hold."""
        step = self._step
        with self._reading:
            self._lost_at[step] = self._lost_by_id()

        def late() -> JsonDict | None:
            with self._reading:
                lost = self._lost_at.pop(step)
            return {"lost": lost} if lost else None

        return late

    def restore(self, state: JsonDict) -> None:
        """Restores a state that `state` returned."""
        for position, member_id in enumerate(self._member_ids):
            self._lost[:, position] = state["lost"].get(str(member_id), 0)

    def _lost_by_id(self) -> dict[int, list[int]]:
        """Returns number, first and last step of the losses that are not finite, by member id."""
        return {
            self._member_ids[position]: self._lost[:, position].tolist()
            for position in np.flatnonzero(self._lost[0]).tolist()
        }

    def read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Reads the metrics of a call, float32[steps, members]. Any thread may call it."""
        if FAILED_UPDATES not in metrics:
            if "loss" in metrics:
                self._read_losses(step, metrics["loss"])
            return
        counts = metrics[FAILED_UPDATES][-1].astype(np.int64)
        is_frozen = metrics[IS_FROZEN][-1]
        failed = _with_state(np.flatnonzero(counts > self._failed_updates), is_frozen)
        self._failed_updates = counts
        with self._reading:
            if is_frozen.all():
                self._lost_steps.add(step)
            if failed:
                self._calls.append(_Call(step, failed, bool(is_frozen.all())))

    def _read_losses(self, step: int, losses: np.ndarray) -> None:
        """Reads the losses of a call without a policy, float32[steps, members]."""
        is_lost = ~np.isfinite(losses)
        if not is_lost.any():
            return
        steps = np.arange(step - len(losses) + 1, step + 1)[:, None]
        number, first, last = self._lost
        here = np.where(is_lost, steps, step + 1).min(axis=0)
        first[:] = np.where((number == 0) & is_lost.any(axis=0), here, first)
        last[:] = np.maximum(last, np.where(is_lost, steps, 0).max(axis=0))
        number += is_lost.sum(axis=0)
        with self._reading:
            if is_lost[-1].all():
                self._lost_steps.add(step)
            if step in self._lost_at:
                self._lost_at[step] = self._lost_by_id()

    def may_replace_checkpoints(self, step: int, *, has_finite_member: bool) -> bool:
        """Returns whether a state may be saved, which may delete an older checkpoint.

        A member may have infinite parameters by design, such as a mask. A state without a finite
        member is only refused if an earlier one had one, or all members have failed.
        """
        with self._reading:
            has_failed = step in self._lost_steps
        was_finite, self._was_finite = self._was_finite, self._was_finite or has_finite_member
        return has_finite_member or not (was_finite or has_failed)

    def __call__(self, info: StepInfo) -> Stop | StopMembers | None:
        """Does what the policy says, and returns which members or whether all are to stop.

        It responds to the calls before the one that was just dispatched, and to all at the end.
        """
        read_step, self._step = (info.step if info.is_last else self._step), info.step
        respond = self._respond if self._policy.is_checked else self._are_all_lost
        self.have_all_failed |= respond(read_step, info.state)
        dropped, self._dropped = self._dropped, []
        if dropped:  # If no other member is left, this stops the run too.
            return stop_members(dropped)
        return STOP if self.have_all_failed else None

    def _are_all_lost(self, read_step: int, state: State) -> bool:
        """Returns whether no member of a run without a policy can be trained further.

        If a member has finite parameters, only a batch was bad.
        """
        with self._reading:
            is_tested = all(
                lost <= self._tested_step or lost > read_step for lost in self._lost_steps
            )
        self._tested_step = read_step
        return not is_tested and not finite_members(state.params, self._ensemble).any()

    def _respond(self, read_step: int, state: State) -> bool:
        """Responds to the failures until a step, and returns whether all members are frozen."""
        with self._reading:
            due = [call for call in self._calls if call.step <= read_step]
            self._calls = self._calls[len(due) :]
        if not due:
            return False
        found = {each for call in due for each in call.failed}
        raises = self._policy.policy == "raise"
        if found <= self._reported and not (raises or due[-1].are_all_frozen):
            return False
        with jax.transfer_guard("allow"):
            record = to_host(self._joined(state).failures)
        failed = sorted({position for position, _ in found})
        if raises:
            raise RunError(
                f"{self._cause(failed[0], record)}. The policy for failures is 'raise', so the run "
                "ends. Look for NaN in the data, lower the learning rate, clip the gradients, or "
                "choose another policy, such as 'skip'.",
                exit_code=ExitCode.DIVERGED,
            )
        for each in _with_state(failed, record.is_frozen):
            if each not in self._reported:
                self._report(each[0], record)
        self._reported |= found
        return bool(record.is_frozen.all())

    def _report(self, position: int, record: FailureRecord) -> None:
        """Prints what happened to a member, and adds it to its lineage."""
        policy, is_frozen = self._policy.policy, bool(record.is_frozen[position])
        self._reported.add((position, is_frozen))
        response = _RESPONSES[policy]
        if policy == "skip" and is_frozen:
            response = _FROZEN_AFTER_SKIPS
        elif policy != "skip" and not is_frozen:
            response = "a callback has restarted it."
        self._warn(f"{self._cause(position, record)}; {response}")
        is_dropped = policy == "drop" and is_frozen
        if is_dropped:
            self._dropped.append(self._member_ids[position])
        if self._opened is not None:
            what = f"{FAILED}{CAUSES[record.cause[position]]}; {response.rstrip('.')}"
            event = Event(int(record.last_step[position]), what)
            self._opened.add_event(self._member_ids[position], event, is_dropped=is_dropped)

    def reported(self, state: State) -> list[FailedMember]:
        """Returns what happened to each member that failed. Every host must call this."""
        if self._policy.is_checked:
            with jax.transfer_guard("allow"):
                return failed_members(state)
        return [
            FailedMember(self._member_ids[position], CAUSES[1], *self._lost[:, position].tolist())
            for position in np.flatnonzero(self._lost[0]).tolist()
        ]

    def _cause(self, position: int, record: FailureRecord) -> str:
        """Returns the clause that says which member failed, when and why."""
        return (
            f"Member {self._member_ids[position]} failed at step "
            f"{int(record.last_step[position]):,}: {CAUSES[record.cause[position]]}"
        )


def _with_state(positions: Iterable[int], is_frozen: Leaf) -> list[tuple[int, bool]]:
    """Returns positions of members, each with whether that member is frozen."""
    return [(int(position), bool(is_frozen[position])) for position in positions]


def finite_members(tree: PyTree, ensemble: Ensemble) -> np.ndarray:
    """Returns which members have only finite numbers in a part of the state, bool[members].

    Every host must call this.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        return np.ones(ensemble.num_members, bool)
    waves = Waves(ensemble.layout, ensemble.waves)
    with jax.transfer_guard("allow"):
        if waves.count == 1:
            return np.asarray(to_host(_are_finite(leaves)))
        parts = [_are_finite(waves.take(leaves, number)) for number in range(waves.count)]
        return np.asarray(to_host(waves.join(parts, MEMBERS)))


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether all numbers of each member are finite, bool[members]."""
    flags = [jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim))) for leaf in leaves]
    return jnp.stack(flags).all(axis=0)


def has_finite_member(saved: Mapping[str, SavedLeaf]) -> bool:
    """Returns whether a member has only finite parameters in a state that one host saves."""
    leaves = [
        leaf
        for name, leaf in saved.items()
        if name.split(".")[0] == "params" and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    members = range(leaves[0].shape[0]) if leaves else range(1)
    return any(  # As a rule, the first one is finite.
        all(np.isfinite(part).all() for part in itertools.chain(*(_of(leaf, k) for leaf in leaves)))
        for k in members
    )


def _of(leaf: SavedLeaf, position: int) -> Iterator[np.ndarray]:
    """Yields the parts of a leaf that belong to the member at a position."""
    for piece in leaf.pieces:
        start, stop, _ = piece.index[0].indices(leaf.shape[0])
        if start <= position < stop:
            yield np.asarray(piece.array)[position - start]
