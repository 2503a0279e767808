"""`OpenCheckpoints`: the checkpoints of a folder that is locked for one run."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dist_ens.checkpoint.cadence import Cadence
from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.lineage import Event, Lineage, ids_text
from dist_ens.checkpoint.record import STRICT, seed_of
from dist_ens.checkpoint.snapshot import Leaf, Snapshot, UnwantedError, leaves_off_devices
from dist_ens.checkpoint.store import FOLDER, CheckpointStore
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, RunError, SaveError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Tree
from dist_ens.processes import cluster


class OpenCheckpoints:
    """The checkpoints of a folder that is locked for one run; made by `Checkpoints.open`.

    It begins at the newest checkpoint. A damaged one is set aside: its folder gets another name,
    and the one before it is used.

    Attributes:
        saved_step: Step of the checkpoint that the run resumes; 0 if there is none.
        saved_record: Record of that checkpoint; None if there is none.
        notes: Sentences about differences that did not prevent resuming.
        members: Lineage of each member of that checkpoint, in the order of its state.
        member_score: Name of the score of each member that is to be saved; None for none.
    """

    saved_step: int
    saved_record: JsonDict | None
    notes: list[str]
    members: tuple[Lineage, ...]

    def __init__(
        self,
        store: CheckpointStore,
        record: Mapping[str, Json],
        *,
        cadence: Callable[[int], Cadence],
        check: Callable[[JsonDict], list[str]],
        resume: str,
        say: Callable[[str], None],
        member_score: str | None,
        require_same_folder: Callable[[], None],
    ) -> None:
        self._store, self._folder, self._record = store, store.workdir, record
        self._cadence_from, self._check, self._resume = cadence, check, resume
        self.member_score = member_score
        self._say, self._require_same_folder = say, require_same_folder
        # Cause of the last save that failed, which was said; None if the last save did not fail.
        self._said: str | None = None
        self._lineages: dict[int, Lineage] = {}
        self._begin_at_newest()

    # The members

    def lineage_of(self, member_id: int) -> Lineage:
        """Returns the lineage of a member, with the events that no save has written yet."""
        begun = Lineage(member_id, seed_of(self._record), run=str(self._folder.resolve()))
        return self._lineages.get(member_id, begun)

    def add_event(self, member_id: int, event: Event, *, is_dropped: bool = False) -> None:
        """Adds an event to the lineage of a member, which the next save writes."""
        lineage = self.lineage_of(member_id).after(event)
        if is_dropped:
            lineage = dataclasses.replace(lineage, dropped_step=event.step)
        self._lineages[member_id] = lineage

    # Saving

    def is_due(self, step: int) -> bool:
        """Returns whether to save now, the same on every host; see `Cadence.is_due`."""
        return self._cadence.is_due(step)

    def is_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Returns whether a step is to be kept for its scores; see `CheckpointStore.is_best`."""
        return self._store.is_best(step, scores)

    def save(
        self,
        step: int,
        state: State,
        *,
        record: Mapping[str, Json] | None = None,
        scores: Mapping[str, float] | None = None,
        host_files: Mapping[str, bytes] | None = None,
        before: Callable[[Mapping[str, Leaf]], Mapping[str, bytes] | None] = lambda _: {},
        is_last: bool = False,
        kept_step: int | None = None,
    ) -> None:
        """Starts to save a checkpoint; see `CheckpointStore.save` and `Snapshot`.

        The caller may donate or delete the state right after this call. A step that is already
        saved is not saved again. A save that cannot be written is reported at once. It ends the run
        only if it is the last. The writing thread calls `before` with the leaves. It returns more
        host files, or None, on all hosts, to write nothing.
        """
        if step == self.saved_step:  # The run may have been killed before it deleted older ones.
            self._store.delete_oldest(kept_step)
            return
        self._wait_in_silence()
        if step == self._store.newest_step:
            return
        leaves = leaves_off_devices(state)

        def checked_before() -> Mapping[str, bytes]:
            self._require_same_folder()
            files = before(leaves)
            if files is None:
                raise UnwantedError
            return files

        snapshot = Snapshot(
            step,
            leaves,
            self._record if record is None else record,
            scores=scores or {},
            host_files=host_files or {},
            lineages=dict(self._lineages),  # The thread that writes is late; later events come.
            kept_step=kept_step,
            before=checked_before,
        )
        failed = (lambda _: None) if is_last else partial(self._say_failure, step)
        self._store.save(snapshot, failed=failed)

    def wait(self) -> None:
        """Waits until the last save is on disk; a `SaveError` says that it could not be written."""
        if self._store.wait() and self._said is not None:
            self._said = None
            self._report(
                f"Saving in {quoted(self._folder)} works again. {self._store.last_saved()}"
            )

    def _wait_in_silence(self) -> None:
        with contextlib.suppress(SaveError):  # It was said when it happened.
            self.wait()

    def _say_failure(self, step: int, error: BaseException) -> None:
        """Says that a save could not be written, unless the one before it had the same cause."""
        why = explained(error)
        if why.what != self._said:
            self._report(
                f"Could not write the checkpoint of step {step} in {quoted(self._folder)}: "
                f"{why.what}. {self._store.last_saved()} Training continues, and the next save "
                f"tries again. {why.remedy}."
            )
        self._said = why.what

    # Restoring

    def restore_state(
        self, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None = None
    ) -> Tree | None:
        """Returns the state at `saved_step`; see `SavedStep.state`. Every host must call this.

        If the checkpoint is damaged on some host, it is set aside, and the result is None. Then
        `saved_step`, `saved_record` and `notes` are those of an older one.
        """
        state, damage = self._state_at(self.saved_step, abstract, *others, member_ids=member_ids)
        if self._is_set_aside(self.saved_step, damage):
            self._begin_at_newest()
            return None
        return state

    def restore_at(
        self, step: int, abstract: Tree, *others: Tree, member_ids: Sequence[int]
    ) -> Tree | None:
        """Returns the state of any step, on every host; None if it is not saved, or is damaged."""
        self._wait_in_silence()
        if not cluster.as_main_sees(step in self._store.steps()):
            return None
        state, error = self._state_at(step, abstract, *others, member_ids=member_ids)
        return None if cluster.any_host(error is not None) else state

    def restore_host_file(self, name: str, *, is_shared: bool = False) -> bytes | None:
        """Returns this host's bytes at `saved_step`; see `SavedStep.host_file`."""
        return self._store.at(self.saved_step).host_file(name, is_shared=is_shared)

    def _state_at(
        self, step: int, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None
    ) -> tuple[Tree | None, RunError | None]:
        """Returns the state at a step, and this host's error of reading; one of them is None."""
        try:
            saved = self._store.at(step)
            return saved.state(abstract, *others, member_ids=member_ids), None
        except RunError as error:
            return None, error

    def _begin_at_newest(self) -> None:
        """Finds the newest checkpoint whose record and files are sound, and reads its record."""
        while True:
            step = cluster.as_main_sees(self._store.latest_step() or 0)
            saved, error = None, None
            if step:
                try:
                    saved = self._store.at(step)
                except RunError as raised:
                    error = raised
            if not self._is_set_aside(step, error):
                break
        record, members = (saved.run, saved.members) if saved else (None, ())
        self.saved_step, self.saved_record, self.members = step, record, members
        self._lineages = {member.member_id: member for member in members}
        self.notes = [] if record is None else self._check(record)
        seed = seed_of(record or {})
        of_others = [each.member_id for each in members if each.is_of_other_run(seed)]
        if of_others:
            self.notes.append(
                f"The members {ids_text(of_others)} were trained in other runs. From here on they "
                "see the examples in the order that their ids have in this run."
            )
        self._cadence = self._cadence_from(step)

    def _is_set_aside(self, step: int, damage: RunError | None) -> bool:
        """Sets a checkpoint aside if a host found it damaged, and returns whether it did.

        Every host must call this, with its own error of reading.
        """
        hosts = _hosts_with_damage(step, damage)
        if not hosts:
            return False
        older = cluster.as_main_sees(max((s for s in self._store.steps() if s < step), default=0))
        if self._resume == STRICT or not older:
            remedy = (
                f"Run without --resume=strict (resume='strict' in Python) to resume from step "
                f"{older}, or restore the files from a copy."
                if older
                else "No older step is saved. Restore the files from a copy, or move the folder "
                "away to train anew."
            )
            raise RunError(
                f"The newest checkpoint {quoted(self._folder.resolve() / FOLDER / str(step))} is "
                f"damaged: {_why(hosts, damage)}. {remedy}",
                exit_code=ExitCode.DAMAGED,
            ) from damage
        moved = self._store.set_aside(step)
        self._report(
            f"The checkpoint of step {step} is damaged: {_why(hosts, damage)}. It is kept as "
            f"{quoted(moved)}. The run resumes from step {older}."
        )
        return True

    def _report(self, sentence: str) -> None:
        """Prints a sentence on process 0, and logs it on the others."""
        if cluster.is_main():
            self._say(sentence)
        else:
            logging.warning(sentence)


def _why(hosts: Sequence[int], damage: RunError | None) -> str:
    """Returns why a checkpoint is damaged, as a clause, given the error of this host."""
    return f"process {hosts[0]} found it" if damage is None else explained(damage).what


def _hosts_with_damage(step: int, error: RunError | None) -> list[int]:
    """Returns the hosts that found a checkpoint damaged; other errors are raised on all hosts."""
    is_damage = error is not None and error.exit_code == ExitCode.DAMAGED
    hosts = cluster.hosts_with(error is not None)
    if not hosts:
        return []
    unreadable = cluster.hosts_with(error is not None and not is_damage)
    if unreadable:
        if error is not None and not is_damage:
            raise error
        raise RunError(
            f"Process {unreadable[0]} could not read the checkpoint of step {step}. Look at its "
            "output, then run the same command again to resume."
        )
    return hosts
