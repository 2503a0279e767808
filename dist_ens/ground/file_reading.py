"""Reading of files. A pipe, a socket or a device is never opened, because it may have no end."""

import errno
import os
import pathlib
import stat
from typing import BinaryIO

import numpy as np

from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.paths import given_path, shortened


def require_readable(path: str | os.PathLike[str]) -> None:
    """Raises an `OSError` if a path leads to a pipe, a socket or a device, or to nothing."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def opened_to_read(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading, at its first byte."""
    require_readable(path)
    return open(path, "rb", opener=_without_waiting)


def bytes_in(path: pathlib.Path) -> bytes:
    """Returns the content of a regular file; see `opened_to_read`."""
    with opened_to_read(path) as file:
        return file.read()


def read_npy(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Reads the array of an .npy file, as a person gave its path."""
    given = given_path(path, name)
    try:
        require_readable(given)
        return np.array(np.lib.format.open_memmap(given, mode="r"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be read: {shortened(str(given))}: {first_line(error)} Give an .npy "
            "file of numbers, as numpy.save writes it."
        ) from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without waiting for the other end of a pipe that has just taken its place."""
    return os.open(path, flags | os.O_NONBLOCK)
