"""`OpenCheckpoints`: the checkpoints of a folder that is locked for one run."""

import contextlib
import dataclasses
import errno
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dist_ens import cluster
from dist_ens.checkpoint.cadence import Cadence
from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.lineage import Event, Lineage, ids_text
from dist_ens.checkpoint.manifest import Manifest
from dist_ens.checkpoint.record import STRICT, seed_of
from dist_ens.checkpoint.store import FOLDER, CheckpointStore
from dist_ens.checkpoint.writing import Leaf
from dist_ens.commands import quoted
from dist_ens.errors import RunError, SaveError, UserError
from dist_ens.exit_codes import ExitCode
from dist_ens.json_text import Json, JsonDict
from dist_ens.state import State
from dist_ens.types import Tree


class OpenCheckpoints:
    """The checkpoints of a folder that is locked for one run; made by `Checkpoints.open`.

    It begins at the newest checkpoint. A damaged one is set aside: its folder gets another name,
    and the one before it is used.

    Args:
        store: Checkpoints of the folder.
        folder: Folder of the run.
        record: Description of the run that is about to train.
        cadence: Function that returns the rule for when to save, given the first step.
        check: Function of a saved record that raises a `UserError` if the run must not resume it,
            and returns sentences on differences that do not prevent resuming.
        resume: Rule of `Checkpoints`.
        say: Function that prints a sentence.
        member_score: Name of the score of each member that is to be saved; None for none.
        require_same_folder: Function that raises an `OSError` if the folder of the run was removed
            or replaced.

    Attributes:
        saved_step: Step of the checkpoint that the run resumes; 0 if there is none.
        saved_record: Record of that checkpoint; None if there is none.
        notes: Sentences about differences between that record and this run's which did not prevent
            resuming, such as other versions of JAX.
        members: Lineage of each member of that checkpoint, in the order of its state; empty if
            there is none.

    Raises:
        UserError: If the folder holds another run.
        RunError: If the newest checkpoint is damaged and there is no older one, or `resume` is
            "strict".
    """

    def __init__(
        self,
        store: CheckpointStore,
        folder: pathlib.Path,
        record: Mapping[str, Json],
        *,
        cadence: Callable[[int], Cadence],
        check: Callable[[JsonDict], list[str]],
        resume: str,
        say: Callable[[str], None],
        member_score: str | None,
        require_same_folder: Callable[[], None],
    ) -> None:
        self._store, self._folder, self._record = store, folder, record
        self._cadence_from, self._check, self._resume = cadence, check, resume
        self.member_score = member_score
        self._say, self._require_same_folder = say, require_same_folder
        # Cause of the last save that failed, which was said; None if the last save did not fail.
        self._said: str | None = None
        self.saved_step: int
        self.saved_record: JsonDict | None
        self.notes: list[str]
        self._lineages: dict[int, Lineage]
        self._place = self._place_of_steps()
        self._begin_at_newest()

    def add_event(self, member_id: int, event: Event, *, is_dropped: bool = False) -> None:
        """Adds an event to the lineage of a member, which the next save writes.

        Args:
            member_id: Id of the member.
            event: Event to add.
            is_dropped: Whether a run that is resumed may leave the member out.
        """
        lineage = self.lineage_of(member_id).after(event)
        if is_dropped:
            lineage = dataclasses.replace(lineage, dropped_step=event.step)
        self._lineages[member_id] = lineage

    def lineage_of(self, member_id: int) -> Lineage:
        """Returns the lineage of a member, with the events that no save has written yet.

        It begins in this run if the saved one says nothing else.

        Args:
            member_id: Id of the member.
        """
        return self._lineage_in(self._lineages, member_id)

    def _lineage_in(self, lineages: Mapping[int, Lineage], member_id: int) -> Lineage:
        """Returns the lineage of a member, given those that the run knows; see `lineage_of`."""
        known = lineages.get(member_id, Lineage(member_id))
        return known.begun_in(str(self._folder.resolve()), seed_of(self._record))

    def restore_state(
        self, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None = None
    ) -> Tree | None:
        """Returns the state at `saved_step`; see `CheckpointStore.restore_state`.

        Every host must call this.

        Args:
            abstract: The state's structure with shapes, types and shardings as leaves.
            others: Other structures that the state may have.
            member_ids: Ids of the members to restore. Default: all.

        Returns:
            The state. None if the checkpoint is damaged on some host. It is then set aside, and
            `saved_step`, `saved_record` and `notes` are those of an older one.

        Raises:
            RunError: If the checkpoint cannot be used, and there is no older one.
        """
        state, damage = self._state_at(self.saved_step, abstract, *others, member_ids=member_ids)
        if self._is_set_aside(self.saved_step, damage):
            self._begin_at_newest()
            return None
        return state

    def restore_at(
        self, step: int, abstract: Tree, *others: Tree, member_ids: Sequence[int]
    ) -> Tree | None:
        """Returns the state of any step; None if it is not saved, or is damaged on some host.

        The function waits for the last save. Every host must call this.

        Args:
            step: Step of the state.
            abstract: The state's structure with shapes, types and shardings as leaves.
            others: Other structures that the state may have.
            member_ids: Ids of the members to restore.
        """
        with contextlib.suppress(SaveError):  # It was said when it happened.
            self.wait()
        if not cluster.as_main_sees(step in self._store.steps()):
            return None
        state, error = self._state_at(step, abstract, *others, member_ids=member_ids)
        return None if cluster.any_host(error is not None) else state

    def is_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Returns whether a step is to be kept for its scores; see `CheckpointStore.is_best`."""
        return self._store.is_best(step, scores)

    def restore_host_file(self, name: str, *, is_shared: bool = False) -> bytes | None:
        """Returns this host's bytes at `saved_step`; see `CheckpointStore.restore_host_file`."""
        return self._store.restore_host_file(self.saved_step, name, is_shared=is_shared)

    def is_due(self, step: int) -> bool:
        """Returns whether to save now, the same on every host.

        Every host must ask at every call boundary, also where it saves for another reason.

        Args:
            step: Number of updates that the state has seen.
        """
        return self._cadence.is_due(step)

    def save(
        self,
        step: int,
        state: State,
        *,
        record: Mapping[str, Json] | None = None,
        scores: Mapping[str, float] | None = None,
        host_files: Mapping[str, bytes] | None = None,
        after: Callable[[], None] = lambda: None,
        late_files: Callable[[], Mapping[str, bytes]] = dict,
        is_wanted: Callable[[Mapping[str, Leaf]], bool] = lambda _: True,
        is_last: bool = False,
        kept_step: int | None = None,
    ) -> None:
        """Starts to save a checkpoint; see `CheckpointStore.save`.

        A step that is already saved is not saved again. A save that cannot be written is reported
        at once. It ends the run only if it is the last.

        Args:
            step: Number of updates that the state has seen.
            state: Pytree of arrays on a mesh, `[members, ...]`.
            record: Description of the run. Default: the one that the folder was opened with.
            scores: Scores of the ensemble at this step, by name. Default: none.
            host_files: Bytes that belong to this host, by name (`[a-z_]+`).
            after: Function that the writing thread calls before it writes.
            late_files: Function that returns more host files, which the writing thread calls after
                `after`.
            is_wanted: Function of the leaves that returns whether to write them; see
                `CheckpointStore.save`.
            is_last: Whether the run ends with this save.
            kept_step: Step that is kept in any case. None for none.
        """
        if step == self.saved_step:
            return
        with contextlib.suppress(SaveError):  # It was said when it happened.
            self.wait()

        def checked_after() -> None:
            self._require_same_folder()
            if cluster.is_main():
                self._require_own_steps()
            after()

        self._store.save(
            step,
            state,
            self._record if record is None else record,
            scores=scores,
            host_files=host_files,
            # The thread that writes is late, and later events are of later steps.
            lineage_of=partial(self._lineage_in, dict(self._lineages)),
            after=checked_after,
            late_files=late_files,
            is_wanted=is_wanted,
            failed=(lambda _: None) if is_last else partial(self._say_failure, step),
            kept_step=kept_step,
        )

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            SaveError: If the save could not be written.
        """
        if self._store.wait() and self._said is not None:
            self._said = None
            self._tell(f"Saving in {quoted(self._folder)} works again. {self._store.last_saved()}")

    def _require_own_steps(self) -> None:
        """Raises an `OSError` if the folder of the steps is that of another run by now.

        Steps that were only removed are said, and the run saves its next one there.
        """
        newest, steps, place = self._store.newest_step, self._store.steps(), self._place_of_steps()
        is_removed = newest is not None and newest not in steps
        if place == self._place and not is_removed:
            return
        try:
            if steps:
                last = self._folder / FOLDER / str(steps[-1])
                self._check(dict(Manifest.read(last).run))
        except (UserError, RunError):
            what = f"its folder {FOLDER} was replaced by that of another run"
            raise OSError(errno.ESTALE, what) from None
        self._place = place
        if is_removed:
            self._tell(
                f"The checkpoint of step {newest} in {quoted(self._folder)} was removed. Training "
                "continues, and the next save is written there."
            )

    def _place_of_steps(self) -> tuple[int, int] | None:
        """Returns the numbers by which the disk knows the folder of the steps; None if it cannot.

        They change where it is replaced. On some disks they also change by themselves.
        """
        try:
            status = (self._folder / FOLDER).stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _state_at(
        self, step: int, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None
    ) -> tuple[Tree | None, RunError | None]:
        """Returns the state at a step, and this host's error of reading; one of them is None."""
        try:
            state = self._store.restore_state(step, abstract, *others, member_ids=member_ids)
            return state, None
        except RunError as error:
            return None, error

    def _begin_at_newest(self) -> None:
        """Finds the newest checkpoint whose record and files are sound, and reads its record."""
        while True:
            step = cluster.as_main_sees(self._store.latest_step() or 0)
            record, error = None, None
            members: tuple[Lineage, ...] = ()
            if step:
                try:
                    record, members = self._store.restore_run(step), self._store.members(step)
                except RunError as raised:
                    error = raised
            if not self._is_set_aside(step, error):
                break
        self.saved_step, self.saved_record = step, record
        self.members = members
        self._lineages = {member.member_id: member for member in members}
        self.notes = self._store.unread_steps()
        self.notes += [] if record is None else self._check(record)
        if step and (added := self._store.added_files(step)):
            self.notes.append(
                f"The checkpoint of step {step} has files that do not belong to it, and that are "
                f"not read: {', '.join(map(quoted, added[:5]))}."
            )
        of_others = self._trained_elsewhere()
        if of_others:
            self.notes.append(
                f"The members {ids_text(of_others)} were trained in other runs. From here on they "
                "see the examples in the order that their ids have in this run."
            )
        self._cadence = self._cadence_from(step)

    def _trained_elsewhere(self) -> list[int]:
        """Returns the ids of the members that another run trained, with another seed or id."""
        seed = seed_of(self.saved_record or {})
        return [member.member_id for member in self.members if member.is_of_other_run(seed)]

    def _is_set_aside(self, step: int, damage: RunError | None) -> bool:
        """Sets a checkpoint aside if a host found it damaged, and returns whether it did.

        Every host must call this.

        Args:
            step: Step of the checkpoint.
            damage: This host's error of reading it; None if it read all that it needs.

        Raises:
            RunError: If no older checkpoint can be used instead. Also if a host cannot read the
                checkpoint for another reason than damage.
        """
        hosts = _hosts_with_damage(step, damage)
        if not hosts:
            return False
        path = self._folder / FOLDER / str(step)
        why = _why(hosts, damage)
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
                f"The newest checkpoint {quoted(path)} is damaged: {why}. {remedy}",
                exit_code=ExitCode.DAMAGED,
            ) from damage
        moved = self._store.set_aside(step)
        self._tell(
            f"The checkpoint of step {step} is damaged: {why}. It is kept as {quoted(moved)}. The "
            f"run resumes from step {older}."
        )
        return True

    def _say_failure(self, step: int, error: BaseException) -> None:
        """Says that a save could not be written, unless the one before it had the same cause."""
        why = explained(error)
        if why.what != self._said:
            self._tell(
                f"Could not write the checkpoint of step {step} in {quoted(self._folder)}: "
                f"{why.what}. {self._store.last_saved()} Training continues, and the next save "
                f"tries again. {why.remedy}."
            )
        self._said = why.what

    def _tell(self, sentence: str) -> None:
        """Prints a sentence on process 0, and logs it on the others."""
        if cluster.is_main():
            self._say(sentence)
        else:
            logging.warning(sentence)


def _why(hosts: Sequence[int], damage: RunError | None) -> str:
    """Returns why a checkpoint is damaged, as a clause.

    Args:
        hosts: Hosts that found damage.
        damage: Damage that this host found; None if it found none.
    """
    return f"process {hosts[0]} found it" if damage is None else explained(damage).what


def _hosts_with_damage(step: int, error: RunError | None) -> list[int]:
    """Returns the numbers of the hosts that found a checkpoint damaged. Every host must call this.

    Args:
        step: Step of the checkpoint.
        error: This host's error of reading it; None if it read all that it needs.

    Raises:
        RunError: If a host cannot read it for another reason. All hosts raise an error then.
    """
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
