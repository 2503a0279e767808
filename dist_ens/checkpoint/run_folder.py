"""The folder of a run, which one run at a time may write to."""

import contextlib
import errno
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
from filelock import FileLock, Timeout

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import opened_in_place, require_regular_files
from dist_ens.processes import cluster

_LOCK = ".lock"
# Time for a file of process 0 to be seen by all hosts, in seconds.
_SHARED_SECS = 10.0


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder, and raises a `UserError` if this user may not write to it."""
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


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Locks a folder for one run. The system unlocks it when the process ends, even after a kill.

    Process 0 locks it for all hosts. The yielded function raises an `OSError` if the folder was
    removed or replaced since, or another run has locked it. Every host calls it before it writes.
    If the lock was removed, process 0 makes it again.
    """
    # The thread that saves may lock it again.
    lock = FileLock(folder / _LOCK, thread_local=False)
    is_refused = False
    if cluster.is_main():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            is_refused = True
    if cluster.as_main_sees(is_refused):
        owner = _read_lock(folder).partition(";")[0]
        raise UserError(
            f"Another run is training in {quoted(folder)} ({owner or 'another process'}). Wait for "
            "it, stop it, or choose another folder."
        )
    token = cluster.bytes_of_main(os.urandom(8)).hex()
    mark = f"host {socket.gethostname()}, pid {os.getpid()}; {token}"
    is_marked, is_lost, place = False, False, folder.stat()

    def renew() -> None:
        nonlocal is_lost
        if not is_marked or _read_lock(folder).endswith(token):
            return
        # The token tells the folder on any disk. Some disks change the numbers of their files.
        if not folder.is_dir() or not os.path.samestat(folder.stat(), place):
            raise OSError(
                errno.ESTALE, "that folder was removed or replaced after the run began to use it"
            )
        if cluster.is_main():
            lock.release()
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
            # Once another run has trained here, its steps are not mixed with later ones of this.
            is_lost |= not lock.is_locked
            if is_lost:
                raise OSError(
                    errno.EBUSY,
                    f"its {_LOCK} was removed or replaced, and another run has locked it since",
                )
            _write_lock(folder, mark)

    try:
        is_marked = _is_marked(folder, mark, token)
        yield renew
    finally:
        if lock.is_locked and _read_lock(folder).endswith(token):
            with contextlib.suppress(OSError):
                _write_lock(folder, "")  # No process owns it any more.
        lock.release()


def _is_marked(folder: pathlib.Path, mark: str, token: str) -> bool:
    """Writes a mark into the lock of a folder on process 0, and returns whether it could."""
    is_written = True
    if cluster.is_main():
        try:
            _write_lock(folder, mark)
        except OSError:  # The disk may be full, which a save will say.
            is_written = False
    is_written = bool(cluster.as_main_sees(is_written))
    if jax.process_count() == 1 or not is_written:
        return is_written
    # A shared disk may show a change only after some seconds.
    deadline = time.monotonic() + _SHARED_SECS
    while not (is_seen := _read_lock(folder).endswith(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = cluster.hosts_with(not is_seen)
    if blind:
        raise UserError(
            f"{quoted(folder)} is not shared: what process 0 wrote there is not seen by process "
            f"{blind[0]}. Choose a folder on a disk that all hosts share."
        )
    return True


def _write_lock(folder: pathlib.Path, text: str) -> None:
    """Writes a text into the lock of a folder, which this process holds."""
    with opened_in_place(folder / _LOCK, "w") as file:
        file.write(text.encode())


def _read_lock(folder: pathlib.Path) -> str:
    """Returns the text in the lock of a folder; empty if it cannot be read."""
    try:
        return bytes_in(folder / _LOCK).decode(errors="replace")
    except OSError:
        return ""
