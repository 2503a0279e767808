"""Writing of files. No symbolic link is followed, and no reader sees a part of a replaced file."""

import contextlib
import errno
import io
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError

UNFINISHED = "unfinished"  # End of the name of a file that is written beside its final place.


@contextlib.contextmanager
def replaced_file(path: pathlib.Path, *, beside: str = UNFINISHED) -> Iterator[BinaryIO]:
    """Opens a new file, which takes the place of another one when the context ends.

    It is first written beside its place, as `NAME.unfinished`; writers at the same time need other
    ends. A link of that name is deleted and never followed. After an error, the old file stays.
    """
    _require_regular(path)
    unfinished = path.with_name(f"{path.name}.{beside}")
    unfinished.unlink(missing_ok=True)
    # The mode "x" fails where a file or a link already is, such as one that somebody has just made.
    with unfinished.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    unfinished.replace(path)


def replace_file(path: pathlib.Path, content: str | bytes, *, beside: str = UNFINISHED) -> None:
    """Replaces the content of a file as a whole; bytes that are not valid text are escaped."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    with replaced_file(path, beside=beside) as file:
        file.write(content)


def opened_in_place(path: pathlib.Path, mode: str) -> io.FileIO:
    """Opens a regular file, and no link, for writing in its place, unbuffered."""
    _require_regular(path)
    # Windows has no such flag.
    no_link = getattr(os, "O_NOFOLLOW", 0)
    return io.FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | no_link, 0o666))


def require_regular_files(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Raises a `UserError` if something else is in the place of a file that a run will write."""
    for name in names:
        try:
            _require_regular(folder / name)
        except OSError as error:
            raise UserError(
                f"{quoted(folder / name)} cannot be written: {error.strerror}. Move it away, or "
                "choose another folder."
            ) from error


def _require_regular(path: pathlib.Path) -> None:
    """Raises an `OSError` if a path is that of something other than a regular file."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # Its folder is checked elsewhere.
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, through which nothing is written")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, "it is not a regular file")
