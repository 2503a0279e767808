"""`OpenCheckpoints`: the checkpoints of a folder that is locked for one run."""

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Self

import jax

from dist_ens.checkpoint.lineage import Event, Lineage, ids_text
from dist_ens.checkpoint.manifest import Manifest, seal_of, steps_in
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.checkpoint.record import STRICT, seed_of
from dist_ens.checkpoint.retention import Retention
from dist_ens.checkpoint.snapshot import Snapshot
from dist_ens.checkpoint.writing import (
    FOLDER,
    give_up_checkpoint,
    remove_unfinished,
    set_aside,
    wait_for_writing,
    write_checkpoint,
)
from dist_ens.ground.causes import explained
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, RunError, SaveError, code_of_write
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.types import Tree
from dist_ens.processes import cluster
from dist_ens.storage import Place


class OpenCheckpoints:
    """The checkpoints of a folder that is locked for one run; made by `Checkpoints.open`.

    It begins at the newest checkpoint. A damaged one is set aside: its folder gets another name,
    and the one before it is used. As a context it waits for the last save at its end. The files of
    a deleted checkpoint stay until the next save, or until the context ends.

    Attributes:
        saved_step: Step of the checkpoint that the run resumes; 0 if there is none.
        saved_record: Record of that checkpoint; None if there is none.
        notes: Sentences about differences that did not prevent resuming.
        member_score: Name of the score of each member that is to be saved; None for none.
    """

    saved_step: int
    saved_record: JsonDict | None
    notes: list[str]

    def __init__(
        self,
        run: Place,
        record: Mapping[str, Json],
        *,
        keep: Retention,
        notes_on: Callable[[JsonDict], list[str]],
        resume: str,
        say: Callable[[str], None],
        renew: Callable[[], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._run, self._record, self._keep = run, record, keep
        self._folder = run / FOLDER
        self._notes_on, self._resume = notes_on, resume
        self._say, self._renew, self._is_lost = say, renew, is_lost
        self.member_score = keep.best_of_members
        self._writing: futures.Future[None] | None = None
        self._writing_step = 0  # Step of the last save that has begun.
        self._newest_step: int | None = None  # Step of the last save that has been written.
        self._saves = 0
        # Cause of the last save that failed, which was said; None if the last save did not fail.
        self._said: str | None = None
        self._opened: SavedStep | None = None
        self._lineages: dict[int, Lineage] = {}
        wait_for_writing()
        if cluster.is_main():
            self._folder.make()
            remove_unfinished(self._folder)
        # No host writes before the folder is ready, as all of them wait for process 0 here.
        self._token = cluster.bytes_of_main(os.urandom(4)).hex()
        self._begin_at_newest()
        # Scores and seals of the saved steps. A step with another seal was saved by another run.
        self._scores: dict[int, Mapping[str, float]] = {}
        self._seals = {step: seal_of(self._folder / str(step)) for step in steps_in(self._folder)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # A second Ctrl-C must end the process at once.
            return
        if kind is None or jax.process_count() == 1:
            # After an error of one host alone, the other hosts never finish their part of a save,
            # so that waiting for it would not end.
            self.wait()
            self._sweep()

    # The members

    def lineage_of(self, member_id: int) -> Lineage:
        """Returns the lineage of a member, with the events that no save has written yet."""
        begun = Lineage(member_id, seed_of(self._record), run=self._run.address)
        return self._lineages.get(member_id, begun)

    def add_event(self, member_id: int, event: Event, *, is_dropped: bool = False) -> None:
        """Adds an event to the lineage of a member, which the next save writes."""
        lineage = self.lineage_of(member_id).after(event)
        if is_dropped:
            lineage = dataclasses.replace(lineage, dropped_step=event.step)
        self._lineages[member_id] = lineage

    # Saving

    def is_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Returns whether a step is to be kept for its scores. Every host must call this."""
        if not self._keep.uses_scores:
            return False
        steps = {*self._steps(), step}
        if self._writing is not None and not self._writing.done():
            steps.add(self._writing_step)
        known = {each: self._scores_at(each) or {} for each in steps - {step}} | {step: scores}
        return bool(cluster.as_main_sees(step in self._keep.best_of(sorted(steps), known)))

    def is_free(self, secs: float) -> bool:
        """Returns whether the last save has ended, or ends within some seconds; every host asks."""
        if self._writing is not None:
            futures.wait([self._writing], secs)
        return not cluster.any_host(self._writing is not None and not self._writing.done())

    def is_saved(self, step: int) -> bool:
        """Returns whether a step is saved already, once the save before it has ended."""
        if step != self.saved_step:
            with contextlib.suppress(SaveError):  # It was said when it happened.
                self.wait()
        return step in (self.saved_step, self._newest_step)

    def require_held(self) -> None:
        """Raises a `SaveError` on a host that knows of another run which has taken the folder."""
        if self._is_lost():
            raise SaveError(
                f"Another run writes in {quoted(str(self._run))} now, so this one ends. Wait for "
                "it, or stop it and run the same command again to resume."
            )

    def save(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Starts to save a checkpoint. Training may continue at once.

        A step that is already saved is not saved again. Another thread waits for the copies of the
        leaves and writes them. A save that cannot be written is reported at once. It ends the run
        only if it is the last. Every host must call this with the same step.
        """
        if self.is_saved(snapshot.step):
            return
        self._saves += 1
        token, writing = f"{self._token}-{self._saves}", futures.Future[None]()
        # The thread is late, and later events come.
        snapshot = dataclasses.replace(snapshot, lineages=dict(self._lineages))

        def write() -> None:
            try:
                self._write(snapshot, token, is_last=is_last)
            except BaseException as error:  # `wait` raises it.
                writing.set_exception(error)
            else:
                writing.set_result(None)

        self._scores[snapshot.step] = snapshot.scores
        self._writing, self._writing_step = writing, snapshot.step
        # Python does not wait for a daemon thread at exit, so that a second Ctrl-C ends a save.
        threading.Thread(target=write, daemon=True).start()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        A `SaveError` says that it could not be written. Other errors are raised unchanged.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, snapshot: Snapshot, token: str, *, is_last: bool) -> None:
        """Writes a checkpoint, deletes those that are not to be kept, and says what went wrong."""
        step = snapshot.step
        try:
            if not write_checkpoint(self._run, snapshot, token, renew=self._renew):
                return
        # TensorStore reports a full disk as a ValueError.
        except (OSError, ValueError, SaveError) as error:
            self._sweep()
            why = explained(error)
            told = (
                f"Could not write the checkpoint of step {step} in {quoted(str(self._run))}: "
                f"{why.what}. {self._last_saved()}"
            )
            if not is_last and not self._is_lost():  # The error tells of the last one.
                if why.what != self._said:
                    self._report(
                        f"{told} Training continues, and the next save tries again. {why.remedy}."
                    )
                self._said = why.what
            raise SaveError(
                f"{told} {why.remedy}, then run the same command again to resume.",
                exit_code=code_of_write(error),
            ) from error
        self._newest_step = step
        self._seals[step] = seal_of(self._folder / str(step)) if cluster.is_main() else b""
        self.delete_oldest(snapshot.kept_step)
        if self._said is not None:
            self._said = None
            self._report(f"Saving in {quoted(str(self._run))} works again. {self._last_saved()}")

    def delete_oldest(self, kept_step: int | None) -> None:
        """Marks the checkpoints for deletion, on process 0, that are not to be kept any more.

        The folder may have been replaced by that of another run, whose checkpoints stay.
        """
        if not cluster.is_main():
            return
        steps = self._steps()
        scores = {step: self._scores_at(step) for step in steps} if self._keep.uses_scores else {}
        known = {step: at for step, at in scores.items() if at is not None}
        # A step whose scores cannot be read now may be the best one.
        unknown = scores.keys() - known.keys()
        for old in {*steps} - self._keep.of(steps, known) - unknown - {kept_step}:
            path = self._folder / str(old)
            with contextlib.suppress(OSError):  # The next save tries it again.
                if self._seals.get(old) == seal_of(path):
                    give_up_checkpoint(path)

    def _steps(self) -> list[int]:
        """Returns the steps that are saved and known, not those that another process has left."""
        there = set(self._seals)
        with contextlib.suppress(OSError):
            there &= {*steps_in(self._folder)}
        return sorted(there)

    def _scores_at(self, step: int) -> Mapping[str, float] | None:
        """Returns the scores in a checkpoint by name; None if they cannot be read."""
        if step not in self._scores:
            with contextlib.suppress(Exception):  # One that cannot be read ends no save.
                self._scores[step] = Manifest.read(self._folder / str(step)).scores
        return self._scores.get(step)

    def _last_saved(self) -> str:
        """Returns a sentence that says which step is the last that is saved."""
        step = self._newest_step or self.saved_step
        with contextlib.suppress(OSError):  # The disk may be gone.
            step = max(steps_in(self._folder), default=0)
        return f"The last saved step is {step}." if step else "No step is saved yet."

    # Restoring

    def restore_state(
        self, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None = None
    ) -> Tree | None:
        """Returns the state at `saved_step`; see `SavedStep.state`. Every host must call this.

        If the checkpoint is damaged on some host, it is set aside, and the result is None. Then
        `saved_step`, `saved_record` and `notes` are those of an older one.
        """
        state, damage = None, None
        try:
            state = self._at(self.saved_step).state(abstract, *others, member_ids=member_ids)
        except RunError as error:
            damage = error
        if self._is_set_aside(self.saved_step, damage):
            self._begin_at_newest()
            return None
        return state

    def restore_at(
        self, step: int, abstract: Tree, *others: Tree, member_ids: Sequence[int]
    ) -> Tree | None:
        """Returns the state of any step, on every host; None if it is not saved, or is damaged."""
        self.is_saved(step)  # Waits for the last save.
        if not cluster.as_main_sees(step in steps_in(self._folder)):
            return None
        state = None
        with contextlib.suppress(RunError):
            state = self._at(step).state(abstract, *others, member_ids=member_ids)
        return None if cluster.any_host(state is None) else state

    def restore_host_file(self, name: str, *, is_shared: bool = False) -> bytes | None:
        """Returns this host's bytes at `saved_step`; see `SavedStep.host_file`."""
        return self._at(self.saved_step).host_file(name, is_shared=is_shared)

    def _at(self, step: int) -> SavedStep:
        """Returns the checkpoint of a step, after a check of its files, which is done once."""
        if self._opened is None or self._opened.step != step:
            self._opened = SavedStep(self._folder / str(step))
        return self._opened

    def _begin_at_newest(self) -> None:
        """Finds the newest checkpoint whose record and files are sound, and reads its record."""
        while True:
            step = cluster.as_main_sees(max(steps_in(self._folder), default=0))
            saved, error = None, None
            try:
                saved = self._at(step) if step else None
            except RunError as raised:
                error = raised
            if not self._is_set_aside(step, error):
                break
        record, members = (saved.run, saved.members) if saved else (None, ())
        self.saved_step, self.saved_record = step, record
        self._lineages = {member.member_id: member for member in members}
        self.notes = [] if record is None else self._notes_on(record)
        seed = seed_of(record or {})
        of_others = [each.member_id for each in members if each.is_of_other_run(seed)]
        if of_others:
            self.notes.append(
                f"The members {ids_text(of_others)} were trained in other runs. From here on they "
                "see the examples in the order that their ids have in this run."
            )

    def _is_set_aside(self, step: int, error: RunError | None) -> bool:
        """Sets a checkpoint aside if a host found it damaged, and returns whether it did.

        Every host must call this, with its own error of reading. Other errors than damage are
        raised on all hosts.
        """
        hosts = cluster.hosts_with(error is not None)
        if not hosts:
            return False
        is_other = error is not None and error.exit_code != ExitCode.DAMAGED
        if others := cluster.hosts_with(is_other):
            raise (error if is_other else None) or RunError(
                f"Process {others[0]} could not read the checkpoint of step {step}. Look at its "
                "output, then run the same command again to resume."
            )
        path = self._folder / str(step)
        what = f"process {hosts[0]} found it" if error is None else explained(error).what
        steps = steps_in(self._folder)
        older = cluster.as_main_sees(max((each for each in steps if each < step), default=0))
        if self._resume == STRICT or not older:
            remedy = "Restore the files from a copy, or move the folder away to train anew."
            if older:
                remedy = f"Without --resume=strict, the run resumes from step {older}."
            raise RunError(
                f"The newest checkpoint {quoted(path.address)} is damaged: {what}. {remedy}",
                exit_code=ExitCode.DAMAGED,
            ) from error
        kept = set_aside(path) if cluster.is_main() else path
        cluster.as_main_sees(True)  # Until then, another host must not look for the newest step.
        self._opened = None
        self._report(
            f"The checkpoint of step {step} is damaged: {what}. It is kept as "
            f"{quoted(kept.address)}. The run resumes from step {older}."
        )
        return True

    def _sweep(self) -> None:
        """Deletes what no checkpoint needs, unless another run writes there."""
        if cluster.is_main() and not self._is_lost():
            remove_unfinished(self._folder)

    def _report(self, sentence: str) -> None:
        """Prints a sentence on process 0, and logs it on the others."""
        if cluster.is_main():
            self._say(sentence)
        else:
            logging.warning(sentence)
