"""`DiskLock`: the right to write to a folder on a disk, which one process has at a time."""

import contextlib
import errno
import os
from collections.abc import Callable

from filelock import FileLock, Timeout

from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import opened_in_place
from dist_ens.storage.disk import Disk


class DiskLock:
    """A file that is locked, which the system unlocks when its process ends, even after a kill.

    It holds the token of its owner, by which other hosts know the folder on any disk.

    Attributes:
        is_lost: Whether another process has locked the folder since.
    """

    NAME = ".lock"

    def __init__(self, disk: Disk, owner: str, token: str) -> None:
        self._folder, self._path = disk.path, disk.path / self.NAME
        self._mark, self._token = f"{owner}; {token}", token
        # The thread that saves may lock it again.
        self._lock = FileLock(self._path, thread_local=False)
        self.is_lost, self._status = False, disk.path.stat()

    def acquire(self, say: Callable[[str], None]) -> str | None:
        """Takes the lock, and returns None; or returns the process that has it."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return self._text().partition(";")[0] or "another process"
        with contextlib.suppress(OSError):  # The disk may be full, which a save will say.
            self._write(self._mark)
        return None

    def is_seen(self) -> bool:
        """Returns whether the token of the owner can be read."""
        return self._text().endswith(self._token)

    def renew(self) -> None:
        """Locks the folder again if the file was removed; an `OSError` says that it is lost."""
        self.check()
        if self.is_seen():
            return
        self._lock.release()
        with contextlib.suppress(Timeout):
            self._lock.acquire(timeout=0)
        # Once another run has trained here, its steps are not mixed with later ones of this.
        self.is_lost |= not self._lock.is_locked
        if self.is_lost:
            raise OSError(
                errno.EBUSY,
                f"its {self.NAME} was removed or replaced, and another run has locked it since",
            )
        self._write(self._mark)

    def check(self) -> None:
        """Raises an `OSError` on any host if the folder was removed or replaced."""
        if self.is_seen():  # Some disks change the numbers of their files.
            return
        if not self._folder.is_dir() or not os.path.samestat(self._folder.stat(), self._status):
            raise OSError(
                errno.ESTALE, "that folder was removed or replaced after the run began to use it"
            )

    def release(self) -> None:
        """Gives the lock back."""
        if self._lock.is_locked and self.is_seen():
            with contextlib.suppress(OSError):
                self._write("")  # No process owns it any more.
        self._lock.release()

    def _write(self, text: str) -> None:
        with opened_in_place(self._path, "w") as file:
            file.write(text.encode())

    def _text(self) -> str:
        try:
            return bytes_in(self._path).decode(errors="replace")
        except OSError:
            return ""
