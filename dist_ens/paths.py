"""Reads the paths that a person gives: in a flag, in a config, or as an argument in Python."""

import os
import pathlib

from dist_ens.errors import UserError


def given_path(text: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns a path that a person gave, with `~` and `~user` expanded.

    Args:
        text: The path as it was typed. The file or folder need not exist.
        name: What an error message calls the path, such as `--workdir` or `npz:FILE`.

    Returns:
        The path, relative if `text` is relative. A relative path whose own first part begins with
        `~`, typed as `./~x`, comes back absolute, so that nothing expands it later.

    Raises:
        UserError: If the path is empty, or the system refuses it: an unknown user, a null byte, a
            part that is too long, a loop of symbolic links, or a folder on the way that may not be
            entered.

    >>> given_path("runs/digits", "--workdir").name
    'digits'
    """
    if not os.fspath(text):
        raise UserError(f"{name} is empty. Give a path; the current folder is '.'.")
    try:
        path = pathlib.Path(text)
        if os.fspath(text).startswith("~"):
            path = path.expanduser()
        elif str(path).startswith("~"):
            path = path.absolute()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the caller says what it needs there
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(
            f"{name} cannot be used as a path: {why}: {shortened(str(text))}. Correct {name}."
        ) from error
    return path


def shortened(text: str, length: int = 200) -> str:
    """Returns a text for an error message, quoted and cut in the middle beyond `length`.

    Args:
        text: What a person gave; it may hold control characters, which are escaped.
        length: Largest number of characters that are kept, at least 2.

    >>> shortened("a" * 1000, length=4)
    "'aa'…'aa' (1,000 characters)"
    """
    if len(text) <= length:
        return repr(text)
    half = length // 2
    return f"{text[:half]!r}…{text[-half:]!r} ({len(text):,} characters)"
