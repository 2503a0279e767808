"""Opens regular files, and compares what reading them needs with the memory that is free."""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import BinaryIO

import psutil

from dist_ens.errors import UserError
from dist_ens.paths import given_path, shortened


@contextlib.contextmanager
def opened_file(path: str | os.PathLike[str], name: str) -> Iterator[BinaryIO]:
    """Opens a regular file for reading, for the time of a block.

    Args:
        path: Path of the file, as a person gave it; `~` is expanded.
        name: What an error message calls the path, such as `--input` or `npz:FILE`.

    Yields:
        The file, at its first byte.

    Raises:
        UserError: If the file is absent, a folder, a pipe or a device, or the system refuses to
            read it.
    """
    given = given_path(path, name)
    shown = shortened(str(given))
    try:
        with open(given, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(
                    f"{name} is not a regular file: {shown}. Save the data in a file, and give "
                    "its path."
                )
            yield file
    except OSError as error:
        raise UserError(
            f"{name} cannot be read: {shown}: {error.strerror or error}. Correct the path."
        ) from error


def is_there(path: pathlib.Path, name: str) -> bool:
    """Returns whether something has this path, be it a file or not.

    Args:
        path: The path.
        name: What an error message calls the path.

    Raises:
        UserError: If the system refuses the path.
    """
    return os.path.lexists(given_path(path, name))


def require_memory(num_bytes: int, what: str) -> None:
    """Raises a `UserError` if reading needs more memory than is free.

    Args:
        num_bytes: Memory that is needed.
        what: What an error message calls the data.
    """
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise UserError(
            f"{what} needs {num_bytes:,} bytes of memory, and {free:,} bytes are free. Use a "
            "smaller file, or a machine with more memory."
        )


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; unlike `os.open` alone, does not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
