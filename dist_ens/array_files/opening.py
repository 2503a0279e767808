"""Opening of regular files, and a check that their content fits in the free memory."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

import psutil

from dist_ens.errors import UserError
from dist_ens.file_reading import opened_to_read
from dist_ens.paths import given_path, shortened


@contextlib.contextmanager
def opened_file(path: str | os.PathLike[str], name: str) -> Iterator[BinaryIO]:
    """Opens a regular file for reading, as a context manager.

    Args:
        path: Path of the file, as a person gave it. `~` is expanded.
        name: Name of the path in error messages, such as `--input` or `npz:FILE`.

    Yields:
        Open file, at its first byte.

    Raises:
        UserError: If the file does not exist, is a folder, a pipe or a device, or cannot be read.
    """
    given = given_path(path, name)
    shown = shortened(str(given))
    try:
        with opened_to_read(given) as file:
            yield file
    except OSError as error:
        raise UserError(
            f"{name} cannot be read: {shown}: {error.strerror or error}. Correct the path."
        ) from error


def is_there(path: pathlib.Path, name: str) -> bool:
    """Returns whether a path exists, as a file or as anything else.

    Args:
        path: Path to look up. A dangling symbolic link counts as existing.
        name: Name of the path in error messages.

    Raises:
        UserError: If the system refuses the path.
    """
    return os.path.lexists(given_path(path, name))


def require_memory(num_bytes: int, what: str) -> None:
    """Raises a `UserError` if some data do not fit in the free memory.

    Args:
        num_bytes: Memory that the data need, in bytes.
        what: Name of the data in error messages.
    """
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise UserError(
            f"{what} needs {num_bytes:,} bytes of memory, and {free:,} bytes are free. Use a "
            "smaller file, or a machine with more memory."
        )
