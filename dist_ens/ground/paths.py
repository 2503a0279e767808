"""Paths that a person gives in a flag, in a config, or as an argument in Python."""

import os
import pathlib
import re

from dist_ens.ground.errors import UserError

# One letter before the colon is a drive of Windows. `pathlib` makes one slash of two.
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")


def given_path(text: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns a path that a person gave, with `~` and `~user` expanded. It need not exist.

    `./~x` is made absolute, so that nothing expands it later.
    """
    if not os.fspath(text):
        raise UserError(f"{name} is empty. Give a path; the current folder is '.'.")
    require_local(text, name)
    try:
        path = pathlib.Path(text)
        if os.fspath(text).startswith("~"):
            path = path.expanduser()
        elif str(path).startswith("~"):
            path = path.absolute()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # The path need not exist: the caller reports a missing file where it needs one.
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(
            f"{name} cannot be used as a path: {why}: {shortened(str(text))}. Correct {name}."
        ) from error
    return path


def require_local(path: str | os.PathLike[str], name: str) -> None:
    """Raises a `UserError` if a path is an address such as `gs://bucket/run`."""
    if isinstance(text := os.fspath(path), str) and _SCHEME.match(text):
        raise UserError(
            f"{name} is {shortened(text)}, an address and not a local path. Give the path of a "
            "file or folder that this machine sees."
        )


def utf8_path(path: str | os.PathLike[str]) -> str:
    """Returns a path as text that has the bytes of the path when it is encoded in UTF-8.

    Python decodes paths by the locale, and TensorStore always encodes them in UTF-8.
    """
    try:
        return os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"The path {shortened(os.fspath(path))} is not UTF-8, and no checkpoint can be saved "
            "or read there. Rename the folder, or choose another one."
        ) from error


def shortened(text: str, length: int = 200) -> str:
    """Returns a quoted text for an error message, cut in the middle if it is too long.

    >>> shortened("a" * 1000, length=4)
    "'aa'…'aa' (1,000 characters)"
    """
    if len(text) <= length:
        return repr(text)
    half = length // 2
    return f"{text[:half]!r}…{text[-half:]!r} ({len(text):,} characters)"
