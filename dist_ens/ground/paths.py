"""Paths that a person gives in a flag, in a config, or as an argument in Python."""

import os
import pathlib
import re

from dist_ens.ground.errors import UserError

# One letter before the colon is a drive of Windows. `pathlib` makes one slash of two.
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")


def given_path(text: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns a path that a person gave, with `~` and `~user` expanded.

    Args:
        text: Path as it was typed. The file or folder need not exist.
        name: Name of the path in error messages, such as `--workdir` or `npz:FILE`.

    Returns:
        Path, relative if `text` is relative. A relative path whose first part begins with `~`,
        typed as `./~x`, is made absolute, so that nothing expands it later.

    Raises:
        UserError: If the path is empty, is an address such as `gs://bucket/run`, or the system
            refuses it, as a path with an unknown user or a part that is too long.

    >>> given_path("runs/digits", "--workdir").name
    'digits'
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
    """Raises a `UserError` if a path, perhaps of another machine, is the address of no local file.

    Args:
        path: Path as it was typed.
        name: Name of the path in error messages.
    """
    if isinstance(text := os.fspath(path), str) and _SCHEME.match(text):
        raise UserError(
            f"{name} is {shortened(text)}, an address and not a local path. Only local paths are "
            "taken for now. Give the path of a file or folder that this machine sees."
        )


def utf8_path(path: str | os.PathLike[str]) -> str:
    """Returns a path as text that has the bytes of the path when it is encoded in UTF-8.

    Python decodes paths by the locale, and TensorStore always encodes them in UTF-8.

    Args:
        path: Path, as Python decoded it.

    Raises:
        UserError: If the bytes of the path are not UTF-8.

    >>> utf8_path("runs/digits")
    'runs/digits'
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

    Args:
        text: Text that a person gave. Control characters in it are escaped.
        length: Largest number of characters that are kept, at least 2. Default: 200.

    >>> shortened("a" * 1000, length=4)
    "'aa'…'aa' (1,000 characters)"
    """
    if len(text) <= length:
        return repr(text)
    half = length // 2
    return f"{text[:half]!r}…{text[-half:]!r} ({len(text):,} characters)"
