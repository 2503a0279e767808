"""Reading of files. A pipe, a socket or a device is never opened, because it may have no end."""

import contextlib
import errno
import gzip
import os
import pathlib
import stat
import zipfile
import zlib
from collections.abc import Iterator
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
    # The flag avoids a wait for the other end of a pipe that has just taken the file's place.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def bytes_in(path: pathlib.Path) -> bytes:
    """Returns the content of a regular file, decompressed if its name ends in `.gz`."""
    with opened_to_read(path) as file:
        return (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read()


@contextlib.contextmanager
def explained_reading(name: str, advice: str) -> Iterator[None]:
    """Turns an error of reading a file of a user's into a `UserError` that says what to do."""
    try:
        yield
    except UserError:
        raise
    # NumPy, zipfile and gzip raise these for a file that is absent, damaged or something else.
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{name} cannot be read: {first_line(error)} {advice}") from error


def read_npy(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Reads the array of an .npy file, as a person gave its path."""
    given = given_path(path, name)
    advice = f"Make {shortened(str(given))} an .npy file of numbers, as numpy.save writes it."
    with explained_reading(name, advice):
        require_readable(given)
        return np.array(np.lib.format.open_memmap(given, mode="r"))
