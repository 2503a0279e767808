"""`Checkpoints`: the folder of a run and the times at which it is saved."""

import contextlib
import dataclasses
import math
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from filelock import FileLock, Timeout

from dist_ens import cluster
from dist_ens.checkpoint.cadence import Cadence
from dist_ens.checkpoint.record import RESUMES, check_resumes
from dist_ens.checkpoint.store import FOLDER, CheckpointStore, read_newest
from dist_ens.commands import quoted
from dist_ens.config import whole_number
from dist_ens.errors import UserError, value_and_kind
from dist_ens.json_text import Json, JsonDict
from dist_ens.paths import given_path
from dist_ens.state import State
from dist_ens.types import Tree

# Time for a file of process 0 to be seen by all hosts, in seconds.
_SHARED_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder of a run and the times at which it is saved.

    A run that is given a folder with checkpoints resumes from the newest one. The last step is
    always saved. With neither `every_secs` nor `every_steps`, only the last step is saved.

    Attributes:
        folder: Folder of the run, made if it does not exist. On several hosts all of them must see
            the same folder. One run at a time may use it.
        every_secs: Seconds between saves, positive. None for no saves by the clock.
        every_steps: Number of steps between saves, at least 1. A save happens at the first call of
            the update that reaches a multiple of it. None for no saves by the step.
        keep: Number of checkpoints to keep, at least 1; the oldest are deleted. While a run lasts,
            the disk holds the files of one more.
        resume: Rule for a folder that holds a run whose parts differ from those given: "same"
            refuses to resume it, "anyway" resumes it.

    Raises:
        UserError: If a field has a value that it cannot have.

    >>> Checkpoints("runs/digits", every_steps=500).every_secs
    60.0
    """

    folder: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every_secs: float | None = 60.0
    every_steps: int | None = None
    keep: int = 2
    resume: str = "same"

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise UserError(
                f"folder is {value_and_kind(self.folder)}. Give a path, such as 'runs/digits'."
            )
        checked: dict[str, Any] = {
            "folder": given_path(self.folder, "folder"),
            "keep": whole_number("keep", self.keep, least=1),
        }
        if self.every_secs is not None:
            checked["every_secs"] = _positive("every_secs", self.every_secs)
        if self.every_steps is not None:
            checked["every_steps"] = whole_number("every_steps", self.every_steps, least=1)
        if self.resume not in RESUMES:
            raise UserError(
                f"resume is {repr(self.resume)[:200]}. Give 'same' to resume only a run with "
                "the same parts, or 'anyway' to resume whatever the folder holds."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @contextlib.contextmanager
    def open(self, record: Mapping[str, Json]) -> Iterator["OpenCheckpoints"]:
        """Locks the folder, and finds its newest checkpoint.

        Every host must enter and leave this context. At its end it waits for the last save. It does
        not wait after a KeyboardInterrupt. On several hosts it waits after no error at all, since
        an error of one host alone would make the others wait forever.

        Args:
            record: Description of the run that is about to train, in types that JSON can hold:
                `StepRecord.to_dict()`, or the record of a config's run.

        Yields:
            The checkpoints of the folder.

        Raises:
            UserError: If the folder cannot be used, another run is using it, or it holds another
                run.
            RunError: If the newest checkpoint is damaged.
        """
        folder = pathlib.Path(self.folder)
        _require_writable_folder(folder)
        with _locked(folder):
            saved_step, saved_record = read_newest(folder)
            notes: list[str] = []
            if saved_record is not None:
                notes = check_resumes(record, saved_record, folder, self.resume)
            cadence = Cadence(self.every_steps, self.every_secs, saved_step)
            with CheckpointStore(folder, keep=self.keep) as store:
                yield OpenCheckpoints(store, cadence, record, saved_step, saved_record, notes)


class OpenCheckpoints:
    """The checkpoints of a folder that is locked for one run; made by `Checkpoints.open`.

    Attributes:
        saved_step: Step of the newest checkpoint when the folder was opened; 0 if there was none.
        saved_record: Record of that checkpoint; None if there was none.
        notes: Sentences about differences between that record and this run's which did not prevent
            resuming, such as other versions of JAX.
    """

    def __init__(
        self,
        store: CheckpointStore,
        cadence: Cadence,
        record: Mapping[str, Json],
        saved_step: int,
        saved_record: JsonDict | None,
        notes: list[str],
    ) -> None:
        self._store = store
        self._cadence = cadence
        self._record = record
        self.saved_step = saved_step
        self.saved_record = saved_record
        self.notes = notes

    def restore_state(self, abstract: Tree) -> Tree:
        """Returns the state at `saved_step`; see `CheckpointStore.restore_state`."""
        return self._store.restore_state(self.saved_step, abstract)

    def has_leaves(self, prefix: str) -> bool:
        """Returns whether the state at `saved_step` has leaves whose names begin with a text.

        Args:
            prefix: Start of the names, such as `failures.`.

        Raises:
            RunError: If the checkpoint is damaged.
        """
        return self._store.has_leaves(self.saved_step, prefix)

    def restore_before(self, step: int, abstract: Tree) -> tuple[Tree, int] | None:
        """Returns the newest saved state of an earlier step, with its step; None without one.

        It waits for the last save. Every host must call it.

        Args:
            step: Step that is too late.
            abstract: Structure of the state; see `CheckpointStore.restore_state`.

        Raises:
            RunError: If the last save could not be written, or the checkpoint cannot be read.
        """
        return self._store.restore_before(step, abstract)

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
        host_files: Mapping[str, bytes] | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save a checkpoint; see `CheckpointStore.save`.

        A step that is already saved is not saved again.

        Args:
            step: Number of updates that the state has seen.
            state: Pytree of arrays on a mesh, `[members, ...]`.
            record: Description of the run. Default: the one that the folder was opened with.
            host_files: Bytes that belong to this host, by name (`[a-z_]+`).
            after: Function that the writing thread calls before it writes.

        Raises:
            RunError: If the previous save could not be written.
        """
        if step != self.saved_step:
            record = self._record if record is None else record
            self._store.save(step, state, record, host_files=host_files, after=after)

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            RunError: If the save could not be written.
        """
        self._store.wait()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a folder for one run. The system unlocks it when the process ends, even after a kill.

    Process 0 locks it for all hosts, and writes into the lock which process it is.

    Raises:
        UserError: If another run has locked the folder, or a host does not see the lock. Every
            host raises it.
    """
    lock, owner = FileLock(folder / ".lock"), f"host {socket.gethostname()}, pid {os.getpid()}"
    is_locked = True
    if cluster.is_main():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            is_locked = False
    if not cluster.as_main_sees(is_locked):
        raise UserError(
            f"Another run is training in {quoted(folder)} ({_owner(folder)}). Wait for it, stop "
            "it, or choose another folder."
        )
    try:
        _require_shared(folder, owner)
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                (folder / ".lock").write_text("")  # No process owns it any more.
        lock.release()


def _require_writable_folder(folder: pathlib.Path) -> None:
    """Makes a folder and checks that it is writable.

    Raises:
        UserError: If a file has the path of the folder, or this user may not write to it.
    """
    for path in (folder / FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"{quoted(folder)} cannot be the folder of a run: {quoted(path)} is a file. Choose "
                "another folder."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{quoted(folder)} cannot be the folder of a run: {error.strerror}. Choose another "
            "folder, or make this one writable."
        ) from error


def _positive(name: str, value: Any) -> float:
    """Returns a number as a float.

    Raises:
        UserError: If the value is not a positive, finite number.
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(
            f"{name} is {repr(value)[:200]}. Give a positive number of seconds, or None."
        )
    return number


def _owner(folder: pathlib.Path) -> str:
    """Returns the process that has locked a folder, as it wrote it into the lock."""
    try:
        return (folder / ".lock").read_text(errors="replace").partition(";")[0] or "another process"
    except OSError:
        return "another process"


def _require_shared(folder: pathlib.Path, owner: str) -> None:
    """Raises a `UserError` if a host does not see what process 0 writes in a folder.

    Args:
        folder: Folder that process 0 has locked.
        owner: Process that has locked it. Process 0 writes it into the lock.
    """
    token = cluster.bytes_of_main(os.urandom(8)).hex()
    is_written = True
    if cluster.is_main():
        try:
            (folder / ".lock").write_text(f"{owner}; {token}")
        except OSError:  # The disk may be full, which a save will say.
            is_written = False
    if jax.process_count() == 1 or not cluster.as_main_sees(is_written):
        return
    # A shared disk may show a change only after some seconds.
    deadline = time.monotonic() + _SHARED_SECS
    while not (is_seen := _sees(folder, token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = cluster.hosts_with(not is_seen)
    if blind:
        raise UserError(
            f"{quoted(folder)} is not shared: what process 0 wrote there is not seen by process "
            f"{blind[0]}. Choose a folder on a disk that all hosts share."
        )


def _sees(folder: pathlib.Path, token: str) -> bool:
    """Returns whether the lock of a folder holds a token."""
    try:
        return (folder / ".lock").read_text(errors="replace").endswith(token)
    except OSError:
        return False
