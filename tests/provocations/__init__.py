"""How messages for the user are provoked: a function of a few lines, in the file of its room.

Every function without a leading underscore is a provocation. It has `tmp_path`, `monkeypatch` or
both as parameters if it needs them, and ends with the error, or prints it as a command does. What
another library says inside a message depends on its version, so that a provocation that needs such
an error raises one of its own.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import pathlib
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from dist_ens.errors import RunError, UserError

ROOT = pathlib.Path(__file__).parent.parent.parent
# Calls whose argument at a position is a message. `super().__init__` is one in errors.py only.
_RAISING = {"UserError": 0, "RunError": 0, "SaveError": 0, "ReplacedError": 0, "require": 1}
# The function `require` passes on the message of its caller.

_PASSED_ON = "{message}"


@dataclasses.dataclass(frozen=True, order=True)
class Site:
    """The place in the code that writes a message, with its values as `{expression}`."""

    file: str
    template: str


@dataclasses.dataclass(frozen=True)
class Provocation:
    """A function that provokes a message, by its name `room/function`."""

    name: str
    run: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """What a person reads."""

    site: Site
    text: str


@functools.cache
def sites() -> dict[Site, tuple[int, int]]:
    """Returns the first and the last line of each message."""
    found = {}
    for folder in ("dist_ens", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if (message := _message_of(node, file)) is None:
                    continue
                site = Site(file, _template(message))
                if site.template != _PASSED_ON:
                    assert site not in found, f"{site} is written twice: use one function."
                    found[site] = (node.lineno, node.end_lineno)
    return found


@functools.cache
def provocations() -> list[Provocation]:
    """Returns all provocations."""
    found = []
    for room in pkgutil.iter_modules(__path__):
        if room.name.startswith("_"):  # What several rooms need.
            continue
        module = importlib.import_module(f"{__name__}.{room.name}")
        found += [
            Provocation(f"{room.name}/{name}", value)
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not name.startswith("_")
        ]
    return found


@functools.cache
def provoked(provocation: Provocation) -> Message:
    """Runs a provocation, and returns its message with `TMP` for the temporary folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        jax.numpy_rank_promotion("allow"),  # as for a user, and unlike in other tests
        _noted() as notes,
    ):
        # A message quotes a path with its links followed.
        folder = pathlib.Path(folder).resolve()
        given = {"tmp_path": folder, "monkeypatch": monkeypatch}
        asked = {name: given[name] for name in inspect.signature(provocation.run).parameters}
        raised: BaseException | None = None
        try:
            provocation.run(**asked)
        except (UserError, RunError, SystemExit) as error:
            raised = error
    assert notes, f"{provocation.name} provokes no message"
    error, site = next((note for note in notes if note[0] is raised), notes[-1])
    assert site is not None, f"{provocation.name} provokes a message that no file writes: {error}"
    text = str(error).replace(str(folder), "TMP").replace(str(ROOT), "ROOT")
    return Message(site, text)


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[Exception, Site | None]]]:
    """Notes each error for the user that is made, with the place that wrote its message."""
    notes = []

    def noting(init):
        def __init__(self, *args, **options):
            init(self, *args, **options)
            notes.append((self, _site_above()))

        return __init__

    with pytest.MonkeyPatch.context() as patch:
        for kind in (UserError, RunError):
            patch.setattr(kind, "__init__", noting(kind.__init__))
        yield notes


def _site_above() -> Site | None:
    """Returns the innermost place on the stack that writes a message."""
    frame = sys._getframe(2)
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and frame.f_code.co_name != "require":
            file = path.relative_to(ROOT).as_posix()
            for site, (first, last) in sites().items():
                if site.file == file and first <= frame.f_lineno <= last:
                    return site
        frame = frame.f_back
    return None


def _message_of(node: ast.AST, file: str) -> ast.expr | None:
    """Returns the message that a piece of code gives to an error, if it does."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    position = 0 if (file, name) == ("dist_ens/errors.py", "super().__init__") else None
    position = _RAISING.get(name, position)
    return None if position is None or len(node.args) <= position else node.args[position]


def _template(node: ast.expr) -> str:
    """Returns a message with its values as `{expression}`; other expressions as they stand."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(_template, values))
        case ast.FormattedValue(value=value):
            return f"{{{_code(value)}}}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _template(left) + _template(right)
    return f"{{{_code(node)}}}"


def _code(node: ast.expr) -> str:
    """Returns an expression as code. Versions of Python choose other quotes inside of f-strings."""
    return ast.unparse(node).replace('"', "'")
