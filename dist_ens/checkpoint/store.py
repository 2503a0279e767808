"""The checkpoints in one folder: saving, restoring and deleting them."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Self, TypeVar

import jax

from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.manifest import Manifest, steps_in
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.checkpoint.retention import Retention
from dist_ens.checkpoint.snapshot import Snapshot, UnwantedError
from dist_ens.checkpoint.writing import (
    give_up_checkpoint,
    remove_unfinished,
    set_aside,
    write_checkpoint,
)
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, RunError, SaveError, UserError, code_of_write
from dist_ens.ground.paths import utf8_path
from dist_ens.processes import cluster

FOLDER = "checkpoints"
# A process writes one checkpoint at a time. An interrupted run may have left a thread that still
# writes its last one.
_WRITING = threading.Lock()
T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one run, as a context that waits for the last save at its end.

    The files of a deleted checkpoint stay until the next save, or until the context ends. A store
    that is `read_only` leaves unfinished checkpoints alone.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: Retention | int = 1,
        read_only: bool = False,
    ) -> None:
        self.workdir = pathlib.Path(workdir)
        self._folder = self.workdir.resolve() / FOLDER  # TensorStore refuses a path with `..`
        self._keep = Retention(keep) if isinstance(keep, int) else keep
        self._scores: dict[int, Mapping[str, float]] = {}  # Of the saved steps, once they are read.
        self._read_only = read_only
        self.newest_step: int | None = None
        self._writing: Future[None] | None = None
        self._writing_step = 0
        self._opened: SavedStep | None = None
        self._saves = 0
        with _WRITING:  # Waits for a checkpoint that an interrupted run is still writing.
            pass
        if read_only:
            return
        utf8_path(self._folder)
        if self._folder.is_symlink():
            raise UserError(
                f"{quoted(self._folder)} is a symbolic link, and nothing is saved or deleted "
                "there. Put the folder itself in its place."
            )
        if cluster.is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
        # No host writes before the folder is ready, as all of them wait for process 0 here.
        self._token = cluster.bytes_of_main(os.urandom(4)).hex()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # A second Ctrl-C must end the process at once.
            return
        if kind is None or jax.process_count() == 1:
            # After an error of one host alone, the other hosts never finish their part of a save,
            # so that waiting for it would not end.
            self.wait()
            if cluster.is_main() and not self._read_only:
                remove_unfinished(self._folder)

    def latest_step(self) -> int | None:
        """Returns the step of the newest finished checkpoint, or None if there is none."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the oldest first."""
        return steps_in(self._folder)

    def at(self, step: int) -> SavedStep:
        """Returns the checkpoint of a step, after a check of its files, which is done once."""
        if self._opened is None or self._opened.step != step:
            self._opened = SavedStep(self._folder / str(step))
        return self._opened

    def save(
        self, snapshot: Snapshot, *, failed: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """Starts to save a checkpoint. Training may continue at once.

        A step that is already saved is not saved again. Another thread waits for the copies of the
        leaves, writes them to disk, and calls `failed` with an error of writing. Every host calls
        this with the same step.
        """
        self.wait()
        if snapshot.step == self.newest_step:
            return
        self._saves += 1
        token = f"{self._token}-{self._saves}"
        writing: Future[None] = Future()

        def write() -> None:
            try:
                with _WRITING, self._unwritable_is_reported(snapshot.step, failed):
                    write_checkpoint(self._folder, snapshot, token)
                    self.newest_step = snapshot.step
                    self.delete_oldest(snapshot.kept_step)
            except UnwantedError:
                writing.set_result(None)
            except BaseException as error:  # `wait` raises it.
                writing.set_exception(error)
            else:
                writing.set_result(None)

        # Python does not wait for a daemon thread at exit, so that a second Ctrl-C ends a save.
        self._scores[snapshot.step] = snapshot.scores
        self._writing, self._writing_step = writing, snapshot.step
        threading.Thread(target=write, daemon=True).start()

    def wait(self) -> bool:
        """Waits until the last save is on disk, and returns whether there was one to wait for.

        A `SaveError` says that it could not be written. Other errors are raised unchanged.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return False
        writing.result()
        return True

    def is_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Returns whether a step is to be kept for its scores. Every host must call this."""
        if not self._keep.uses_scores:
            return False
        steps = {*self.steps(), step}
        if self._writing is not None and not self._writing.done():
            steps.add(self._writing_step)
        known = {each: self._scores_at(each) or {} for each in steps - {step}} | {step: scores}
        return bool(cluster.as_main_sees(step in self._keep.best_of(sorted(steps), known)))

    def delete_oldest(self, kept_step: int | None) -> None:
        """Marks the checkpoints for deletion, on process 0, that are not to be kept any more."""
        if not cluster.is_main():
            return
        steps = self.steps()
        scores = {step: self._scores_at(step) for step in steps} if self._keep.uses_scores else {}
        known = {step: at for step, at in scores.items() if at is not None}
        # A step whose scores cannot be read now may be the best one.
        unknown = scores.keys() - known.keys()
        for old in {*steps} - self._keep.of(steps, known) - unknown - {kept_step}:
            with contextlib.suppress(OSError):  # The next save tries it again.
                give_up_checkpoint(self._folder / str(old), f"{self._token}-{self._saves}")

    def last_saved(self) -> str:
        """Returns a sentence that says which step is the last that is saved."""
        step = None
        with contextlib.suppress(OSError):  # The disk may be gone.
            step = self.latest_step()
        return "No step is saved yet." if step is None else f"The last saved step is {step}."

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames a damaged checkpoint, and returns its path on process 0. All hosts call this."""
        path, error = self._folder / str(step), None
        if cluster.is_main():
            try:
                path = set_aside(path)
            except OSError as refused:
                error = refused
        self._opened = None
        if step == self.newest_step:
            self.newest_step = None
        if cluster.any_host(error is not None):
            raise RunError(
                f"The damaged checkpoint {quoted(path)} could not be renamed: "
                f"{explained(error).what}. Move it out of this folder, then run the same command "
                "again.",
                exit_code=ExitCode.DAMAGED,
            ) from error
        return path

    def _scores_at(self, step: int) -> Mapping[str, float] | None:
        """Returns the scores in a checkpoint by name; None if they cannot be read."""
        if step not in self._scores:
            try:
                self._scores[step] = Manifest.read(self._folder / str(step)).scores
            except Exception:  # A checkpoint that cannot be read ends no save.
                return None
        return self._scores[step]

    @contextlib.contextmanager
    def _unwritable_is_reported(
        self, step: int, failed: Callable[[BaseException], None]
    ) -> Iterator[None]:
        """Raises an error of writing as a `SaveError` with the last saved step."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        # TensorStore reports a full disk as a ValueError.
        except (OSError, ValueError, SaveError) as error:
            if cluster.is_main():
                remove_unfinished(self._folder)
            why = explained(error)
            failed(error)
            raise SaveError(
                f"Could not write the checkpoint of step {step} in {quoted(self.workdir)}: "
                f"{why.what}. {self.last_saved()} {why.remedy}, then run the same command again to "
                "resume.",
                exit_code=code_of_write(error),
            ) from error
