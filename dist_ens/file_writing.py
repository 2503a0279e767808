"""Files that are replaced as a whole, so that no reader sees a part of one."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replaced_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a new file, which takes the place of another one when the context ends.

    The new file is first written beside its final place, as `NAME.unfinished`. A file or a symbolic
    link of this name is deleted and never followed. If the context raises an error, the other file
    stays as it is.

    Args:
        path: Path of the file.

    Yields:
        The new file, open for writing.

    Raises:
        OSError: If the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
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


def replace_file(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces the content of a file as a whole.

    Args:
        path: Path of the file.
        content: New content.

    Raises:
        OSError: If the file cannot be written.
    """
    if isinstance(content, str):
        # The name of a file may hold bytes that are not valid text.
        content = content.encode(errors="backslashreplace")
    with replaced_file(path) as file:
        file.write(content)
