"""`Checkpoints`: the folder of a run and the times at which it is saved."""

import contextlib
import dataclasses
import errno
import logging
import math
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
from filelock import FileLock, Timeout

from dist_ens import cluster
from dist_ens.checkpoint.cadence import Cadence
from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.kept import Kept
from dist_ens.checkpoint.opened import OpenCheckpoints
from dist_ens.checkpoint.record import RESUMES, check_resumes
from dist_ens.checkpoint.store import FOLDER, CheckpointStore
from dist_ens.commands import quoted
from dist_ens.config import whole_number
from dist_ens.errors import UserError, value_and_kind
from dist_ens.file_writing import opened_in_place, require_regular_files
from dist_ens.json_text import Json, JsonDict
from dist_ens.paths import given_path

_LOCK = ".lock"
# Time for a file of process 0 to be seen by all hosts, in seconds.
_SHARED_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder of a run and the times at which it is saved.

    A run that is given a folder with checkpoints resumes from the newest one. The last step is
    always saved. With neither `every_secs` nor `every_steps`, only the last step is saved, and the
    best evaluation where `keep_best` or a callback such as `EarlyStopping` asks for it.

    Attributes:
        folder: Folder of the run, made if it does not exist. On several hosts all of them must see
            the same folder. One run at a time may use it.
        every_secs: Seconds between saves, positive. None for no saves by the clock.
        every_steps: Number of steps between saves, at least 1. A save happens at the first call of
            the update that reaches a multiple of it. None for no saves by the step.
        keep: Number of the newest checkpoints to keep, at least 1. With 1, a run has no older step
            to resume from if the newest is damaged. While a run lasts, the disk holds the files of
            one more.
        keep_every_steps: Number of steps, at least 1. The first checkpoint at or after each
            multiple of it is kept for ever. None for none.
        keep_best: Name of a score of the evaluation data, such as "nll". An evaluation in which the
            ensemble has its best value so far is saved, and the best checkpoint is kept. None for
            none.
        keep_best_of_members: Name of a score of the evaluation data. An evaluation in which a
            member has its best value so far is saved, and each member's best checkpoint is kept.
            None for none.
        resume: Rule for a folder that holds a run. "same" refuses to resume a run whose parts
            differ from those given, and "anyway" resumes it. A damaged newest checkpoint is set
            aside, and the one before it is resumed. "strict" is "same", and refuses damage, too.

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
    keep_every_steps: int | None = None
    keep_best: str | None = None
    keep_best_of_members: str | None = None
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
        for name in ("every_steps", "keep_every_steps"):
            if getattr(self, name) is not None:
                checked[name] = whole_number(name, getattr(self, name), least=1)
        if self.resume not in RESUMES:
            raise UserError(
                f"resume is {repr(self.resume)[:200]}. Give 'same' to resume only a run with "
                "the same parts, 'strict' to refuse a damaged newest checkpoint, too, or 'anyway' "
                "to resume whatever the folder holds."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @contextlib.contextmanager
    def open(
        self,
        record: Mapping[str, Json],
        *,
        check: Callable[[JsonDict], None] = lambda _: None,
        say: Callable[[str], None] = logging.warning,
        directions: Mapping[str, str | None] | None = None,
    ) -> Iterator[OpenCheckpoints]:
        """Locks the folder, and finds its newest checkpoint.

        Every host must enter and leave this context. At its end it waits for the last save. It does
        not wait after a KeyboardInterrupt. On several hosts it waits after no error at all, since
        an error of one host alone would make the others wait forever.

        Args:
            record: Description of the run that is about to train, in types that JSON can hold:
                `StepRecord.to_dict()`, or the record of a config's run.
            check: Function of a saved record that raises a `UserError` if the run must not resume
                it.
            say: Function that reports damaged checkpoints and saves that could not be written.
            directions: "lower" or "higher" for each score of the run, whichever is better, or None.

        Yields:
            The checkpoints of the folder.

        Raises:
            UserError: If the folder cannot be used, another run is using it, or it holds another
                run.
            RunError: If the newest checkpoint is damaged, and there is no older one or `resume` is
                "strict".
        """
        folder = pathlib.Path(self.folder)
        best = self._higher_is_better(directions or {})
        _require_writable_folder(folder)
        keep = Kept(
            self.keep, self.keep_every_steps, self.keep_best, self.keep_best_of_members, best
        )

        def checked(saved_record: JsonDict) -> list[str]:
            notes = check_resumes(record, saved_record, folder, self.resume)
            check(saved_record)
            return notes

        with (
            _locked(folder) as require_same_folder,
            CheckpointStore(folder, keep=keep) as store,
        ):
            yield OpenCheckpoints(
                store,
                folder,
                record,
                cadence=partial(Cadence, self.every_steps, self.every_secs),
                check=checked,
                resume=self.resume,
                say=say,
                member_score=self.keep_best_of_members,
                require_same_folder=require_same_folder,
            )

    def _higher_is_better(self, directions: Mapping[str, str | None]) -> frozenset[str]:
        """Returns the scores of `keep_best…` of which a higher value is better.

        Args:
            directions: Direction of each score of the run, by name.

        Raises:
            UserError: If the run has no such score, or its direction is not known.
        """
        names = {
            field: getattr(self, field)
            for field in ("keep_best", "keep_best_of_members")
            if getattr(self, field) is not None
        }
        for field, name in names.items():
            if directions.get(name) is None:
                known = sorted(each for each, better in directions.items() if better is not None)
                raise UserError(
                    f"{field} is {repr(name)[:200]}, and this run has the scores "
                    f"{', '.join(known) or '(none)'}. Give one of them, or evaluation data."
                )
        return frozenset(name for name in names.values() if directions[name] == "higher")


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Locks a folder for one run. The system unlocks it when the process ends, even after a kill.

    Process 0 locks it for all hosts, and writes into the lock which process it is.

    Yields:
        A function that raises an `OSError` if the folder was removed or replaced since.

    Raises:
        UserError: If another run has locked the folder, or a host does not see the lock. Every
            host raises it.
    """
    lock, owner = FileLock(folder / _LOCK), f"host {socket.gethostname()}, pid {os.getpid()}"
    is_locked, refused = True, None
    if cluster.is_main():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            is_locked = False
        except OSError as error:
            refused = error
    if cluster.any_host(refused is not None):
        why = explained(refused)
        raise UserError(
            f"{quoted(folder / _LOCK)} cannot be locked: {why.what}. {why.remedy}, or choose "
            "another folder."
        ) from refused
    if not cluster.as_main_sees(is_locked):
        raise UserError(
            f"Another run is training in {quoted(folder)} ({_owner(folder)}). Wait for it, stop "
            "it, or choose another folder."
        )
    token = cluster.bytes_of_main(os.urandom(8)).hex()
    is_marked = False

    def require_same_folder() -> None:
        if is_marked and not _sees(folder, token):
            raise OSError(
                errno.ESTALE, "that folder was removed or replaced after the run began to use it"
            )

    try:
        is_marked = _is_marked(folder, owner, token)
        yield require_same_folder
    finally:
        if lock.is_locked and _sees(folder, token):
            with contextlib.suppress(OSError):
                _write_lock(folder, "")  # No process owns it any more.
        lock.release()


def _require_writable_folder(folder: pathlib.Path) -> None:
    """Makes a folder and checks that it is writable.

    Raises:
        UserError: If a file has the path of the folder, or this user may not write to it. Also if
            the lock in it is no regular file.
    """
    for path in (folder / FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"{quoted(folder)} cannot be the folder of a run: {quoted(path)} is a file. Choose "
                "another folder."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_regular_files(folder, [_LOCK])
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
        return (folder / _LOCK).read_text(errors="replace").partition(";")[0] or "another process"
    except OSError:
        return "another process"


def _is_marked(folder: pathlib.Path, owner: str, token: str) -> bool:
    """Writes a token into the lock of a folder, and returns whether it could be written.

    Args:
        folder: Folder that process 0 has locked.
        owner: Process that has locked it. Process 0 writes it into the lock, too.
        token: Text that only this run has, the same on every host.

    Raises:
        UserError: If a host does not see what process 0 has written.
    """
    is_written = True
    if cluster.is_main():
        try:
            _write_lock(folder, f"{owner}; {token}")
        except OSError:  # The disk may be full, which a save will say.
            is_written = False
    is_written = bool(cluster.as_main_sees(is_written))
    if jax.process_count() == 1 or not is_written:
        return is_written
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
    return True


def _write_lock(folder: pathlib.Path, text: str) -> None:
    """Writes a text into the lock of a folder, which this process holds.

    Raises:
        OSError: If the lock cannot be written, or is no regular file any more.
    """
    with opened_in_place(folder / _LOCK, "w") as file:
        file.write(text.encode())


def _sees(folder: pathlib.Path, token: str) -> bool:
    """Returns whether the lock of a folder holds a token."""
    try:
        return (folder / _LOCK).read_text(errors="replace").endswith(token)
    except OSError:
        return False
