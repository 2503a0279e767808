"""Failed members of a running loop, and the responses of the host."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dist_ens.checkpoint import OpenCheckpoints, ids_text
from dist_ens.checkpoint.lineage import FAILED, Event
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failure_policy import OF_FIT
from dist_ens.ensemble.failures import (
    CAUSES,
    FAILED_UPDATES,
    IS_FROZEN,
    MOST_SKIPPED_IN_A_ROW,
    FailedMember,
    FailureRecord,
    failed_members,
    member_of,
    step_of,
)
from dist_ens.errors import RunError, counted
from dist_ens.exit_codes import ExitCode
from dist_ens.layout import to_host
from dist_ens.state import State
from dist_ens.training.finite_members import finite_members
from dist_ens.training.restart_members import MOST_RESTARTS, MemberRestarts

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


# Name of the file of a checkpoint that holds what the records of its members do not.
FAILURES_FILE = "failures"
_LOST, _DROPPED = "lost", "dropped"


class _Call(NamedTuple):
    """A call of the update in which members failed.

    Attributes:
        step: Number of steps taken after the call.
        failed: Position of each member that failed, and whether it is frozen after the call.
        are_all_frozen: Whether all members are frozen after the call.
    """

    step: int
    failed: list[tuple[int, bool]]
    are_all_frozen: bool


class FailedMembers:
    """The failed members of a running loop.

    The device sees a failed update and does not take it. The host reads the metrics of a call after
    the next call has been dispatched. What it does then depends on the steps alone, not on the time
    at which metrics arrive, so that it is the same on all hosts and in a run that is resumed.

    Args:
        ensemble: Ensemble of the run.
        restarts: Function that rolls members back or reseeds them.
        say: Function that reports a failure, also where nothing else is printed.
        opened: Checkpoints of the run, whose lineages of the members get what happened to them;
            None without checkpoints.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        restarts: MemberRestarts,
        say: Callable[[str], None],
        opened: OpenCheckpoints | None = None,
    ) -> None:
        self._ensemble = ensemble
        self._member_ids: Sequence[int] = ensemble.ids.tolist()
        self._policy = ensemble.failures
        self._restarts, self._say, self._opened = restarts, say, opened
        count = ensemble.num_members
        # A thread that saves may read metrics while the loop acts.
        self._reading = threading.Lock()
        self._failed_updates = np.zeros(count, np.int64)  # Of each member, at the last row read.
        self._calls: list[_Call] = []
        # Positions of members that were told of, with whether they were frozen then.
        self._told: set[tuple[int, bool]] = set()
        # Without a policy: number, first and last step of each member's losses that are not finite.
        self._lost = np.zeros((3, count), np.int64)
        # Members that were dropped, by id. They may have left the arrays since.
        self._dropped: dict[int, FailedMember] = {}
        # Members with lost losses, at the steps that are being saved.
        self._lost_at: dict[int, dict[int, list[int]]] = {}
        # Last steps of the calls after which no loss was finite, or all members were frozen.
        self._lost_steps: set[int] = set()
        self._tested_step = 0.0  # Last of these steps after which the parameters were read.
        self._was_finite = False  # Whether a member had finite parameters in a state to save.

    def restore(self, stored: bytes | None) -> None:
        """Restores what the run before knew of failures.

        Args:
            stored: Content of its file, which `file_at` returned. None if there is none.
        """
        if stored is None:
            return
        found = json.loads(stored)
        self._dropped = {each["member_id"]: FailedMember(**each) for each in found[_DROPPED]}
        for position, member_id in enumerate(self._member_ids):
            self._lost[:, position] = found[_LOST].get(str(member_id), 0)

    def file_at(self, step: int) -> Callable[[], dict[str, bytes]]:
        """Returns a function that returns the file to save, by its name; no file without failures.

        Args:
            step: Number of steps that the state to save has seen. The function is called when the
                metrics of this step have been read. Those of later steps may have been, too.
        """
        dropped = [member._asdict() for member in self._dropped.values()]
        with self._reading:
            self._lost_at[step] = self._lost_by_id()

        def file() -> dict[str, bytes]:
            with self._reading:
                lost = self._lost_at.pop(step)
            if not (lost or dropped):
                return {}
            return {FAILURES_FILE: json.dumps({_LOST: lost, _DROPPED: dropped}).encode()}

        return file

    def _lost_by_id(self) -> dict[int, list[int]]:
        """Returns number, first and last step of the losses that are not finite, by member id."""
        return {
            self._member_ids[position]: self._lost[:, position].tolist()
            for position in np.flatnonzero(self._lost[0]).tolist()
        }

    def begin(self, step: int, state: State) -> None:
        """Reads the record of the first state, which may hold failures of the run before.

        Args:
            step: Number of steps that the state has seen.
            state: First state of the run.
        """
        if not isinstance(state.failures, FailureRecord):
            return
        with jax.transfer_guard("allow"):
            record = to_host(state.failures)
        self._failed_updates = np.asarray(record.num_failures, np.int64)
        failed = _with_state(np.flatnonzero(record.num_failures), record.is_frozen)
        self._told = {(k, frozen) for k, frozen in failed if self._was_told(k, record)}
        # The run before may have ended before it could act for these members. A member that can
        # still be updated waits for nothing but the sentence of `skip`.
        skips = self._policy.policy == "skip"
        waiting = [each for each in failed if each[1] or (skips and each not in self._told)]
        if waiting:
            self._calls.append(_Call(step, waiting, bool(record.is_frozen.all())))

    def _was_told(self, position: int, record: FailureRecord) -> bool:
        """Returns whether the run before responded to the failure of a member.

        Its lineage says so. Without checkpoints a given state is taken to have been told of.

        Args:
            position: Position of a member that has failed.
            record: Record of all members.
        """
        if self._opened is None:
            return True
        lineage = self._opened.lineage_of(self._member_ids[position])
        steps = [event.step for event in lineage.events if event.what.startswith(FAILED)]
        if not record.is_frozen[position]:
            return bool(steps)
        if self._policy.policy == "drop" and lineage.dropped_step is None:
            return False
        return step_of(record.last_step[position]) in steps

    def read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Reads the metrics of a call. Any thread may call it, one at a time.

        Args:
            step: Number of steps taken after the call.
            metrics: Metrics by name, float32[steps, members].
        """
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

        A state in which no member has finite parameters must not replace the last good one. But a
        member may have infinite parameters by design, such as a mask. A state is only refused if
        an earlier one of this run was finite, or all members have failed.

        Args:
            step: Step of the state. The metrics of all steps until it have been read.
            has_finite_member: Whether a member has only finite parameters in it.
        """
        with self._reading:
            has_failed = step in self._lost_steps
        was_finite, self._was_finite = self._was_finite, self._was_finite or has_finite_member
        return has_finite_member or not (was_finite or has_failed)

    def _are_all_lost(self, step: float, state: State) -> bool:
        """Returns whether no member of a run without a policy can be trained further.

        That is so if no loss was finite after a call, and no member has finite parameters. With
        finite ones only a batch was bad, and the optimizer left its gradient out.

        Args:
            step: Last step of the calls that count.
            state: State of the ensemble at this step or a later one.
        """
        with self._reading:
            is_tested = all(lost <= self._tested_step or lost > step for lost in self._lost_steps)
        self._tested_step = step
        return not is_tested and not finite_members(state.params, self._ensemble).any()

    def act(self, read_step: int, step: int, state: State) -> tuple[State, bool]:
        """Does what the policy says for members that have failed.

        Args:
            read_step: Last step of the calls that count. Later ones may have been read already.
            step: Number of steps that the state has seen.
            state: State of the ensemble.

        Returns:
            The state, in which members may have been restarted, and whether all members have
            failed for good.

        Raises:
            RunError: If the policy is `raise`, or a checkpoint cannot be read.
        """
        if not self._policy.is_checked:
            return state, self._are_all_lost(read_step, state)
        with self._reading:
            due = [call for call in self._calls if call.step <= read_step]
            self._calls = self._calls[len(due) :]
        if not due:
            return state, False
        found = {each for call in due for each in call.failed}
        failed = sorted({position for position, _ in found})
        is_new = not found <= self._told
        if not (is_new or self._policy.policy in OF_FIT):
            return state, due[-1].are_all_frozen
        with jax.transfer_guard("allow"):
            record = to_host(state.failures)
        if self._policy.policy == "raise":
            raise RunError(
                f"{self._cause(failed[0], record)}. The policy for failures is 'raise', so the run "
                "ends. Look for NaN in the data, lower the learning rate, clip the gradients, or "
                "choose another policy, such as 'skip'.",
                exit_code=ExitCode.DIVERGED,
            )
        if self._policy.policy in OF_FIT:
            frozen = [position for position in failed if record.is_frozen[position]]
            state = self._restarted(frozen, step, state, record)
            return state, self._are_done(record)
        for each in _with_state(failed, record.is_frozen):
            if each not in self._told:
                policy, (position, is_frozen) = self._policy.policy, each
                ends = policy == "skip" and is_frozen
                self._tell(position, record, _FROZEN_AFTER_SKIPS if ends else _RESPONSES[policy])
                self._told.add(each)
        self._told |= found
        return state, bool(record.is_frozen.all())

    def end(self, step: int, state: State) -> bool:
        """Does what is left to do at the end of a run, and returns whether all members have failed.

        Args:
            step: Number of steps that the state has seen.
            state: Last state of the run.

        Raises:
            RunError: If the policy is `raise` and a member has failed.
        """
        if not self._policy.is_checked:
            return self._are_all_lost(float("inf"), state)
        if self._policy.policy in ("rollback", "reseed"):
            with jax.transfer_guard("allow"):
                record = to_host(state.failures)
            waiting = np.flatnonzero(record.is_frozen & (record.num_restarts < MOST_RESTARTS))
            if len(waiting):
                ids = ids_text(self._member_ids[position] for position in waiting.tolist())
                self._say(
                    f"The members {ids} failed too late to be restarted before the last step. A "
                    "run that is resumed with more steps restarts them."
                )
            return self._are_done(record)
        return self.act(step, step, state)[1]

    def told(self, state: State) -> list[FailedMember]:
        """Returns what happened to each member that failed, also if it was dropped.

        Args:
            state: Last state of the run. Every host must call this.
        """
        if self._policy.is_checked:
            with jax.transfer_guard("allow"):
                here = failed_members(state)
            gone = [m for k, m in self._dropped.items() if k not in self._member_ids]
            return sorted([*here, *gone])
        return [
            FailedMember(self._member_ids[position], CAUSES[1], *self._lost[:, position].tolist())
            for position in np.flatnonzero(self._lost[0]).tolist()
        ]

    def _restarted(
        self, positions: Sequence[int], step: int, state: State, record: FailureRecord
    ) -> State:
        """Returns a state in which members have been restarted, as far as they may be.

        Args:
            positions: Positions of frozen members.
            step: Number of steps that the state has seen.
            state: State of the ensemble.
            record: Record of all members in this state.
        """
        due = [k for k in positions if record.num_restarts[k] < MOST_RESTARTS]
        told: dict[int, str] = {}
        if due:
            with jax.transfer_guard("allow"):
                state, told = self._restarts.restart(self._policy.policy, due, step, state, record)
        for position in positions:
            if position in told:
                self._tell(position, record, told[position])
            elif (position, True) not in self._told:  # A resumed run need not say it again.
                count = counted(int(record.num_restarts[position]), "time")
                ended = f"it was restarted {count} before, so it takes no more updates."
                self._tell(position, record, ended)
        return state

    def _tell(self, position: int, record: FailureRecord, response: str) -> None:
        """Says what happened to a member, and adds it to its lineage.

        Args:
            position: Position of the member.
            record: Record of all members.
            response: Second clause of the sentence, which says what was done.
        """
        self._say(f"{self._cause(position, record)}; {response}")
        if self._policy.policy == "drop":
            member = member_of(record, position, self._member_ids[position])
            self._dropped[member.member_id] = member
        if self._opened is not None:
            step = step_of(record.last_step[position])
            what = f"{FAILED}{CAUSES[record.cause[position]]}; {response.rstrip('.')}"
            self._opened.add_event(
                self._member_ids[position],
                Event(step, what),
                is_dropped=self._policy.policy == "drop",
            )

    def _are_done(self, record: FailureRecord) -> bool:
        """Returns whether all members are frozen for good, given the record before restarts."""
        return bool((record.is_frozen & (record.num_restarts >= MOST_RESTARTS)).all())

    def _cause(self, position: int, record: FailureRecord) -> str:
        """Returns the clause that says which member failed, when and why."""
        return (
            f"Member {self._member_ids[position]} failed at step "
            f"{step_of(record.last_step[position]):,}: {CAUSES[record.cause[position]]}"
        )


def _with_state(positions: Iterable[int], is_frozen: np.ndarray) -> list[tuple[int, bool]]:
    """Returns positions of members, each with whether that member is frozen."""
    return [(int(position), bool(is_frozen[position])) for position in positions]
