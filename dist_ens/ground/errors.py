"""Errors that a command reports as a message, without a traceback.

A message says what is wrong, with the values, and then what to do.
"""

import difflib
import enum
import errno
import inspect
import os
from collections.abc import Callable, Iterable, Sequence

from dist_ens.ground.commands import printable


class ExitCode(enum.IntEnum):
    """Exit code of a command; a launcher starts it again after a code in `RESTARTED`."""

    DONE = 0
    FAULT = 1
    USAGE = 2
    PREEMPTED = 42
    DIVERGED = 43
    DAMAGED = 44
    IMPOSSIBLE_LAYOUT = 45
    DISK_FULL = 46
    INTERRUPTED = 130
    HOST_LOST = 134


# Codes after which a launcher starts the command again: `PREEMPTED`, and ends of a process by its
# machine, which are SIGABRT (134), as after the death of another host, SIGKILL, SIGSEGV, SIGTERM.
RESTARTED = (int(ExitCode.PREEMPTED), 134, 137, 139, 143)


def code_of_shell(code: int) -> int:
    """Returns an exit code of `subprocess` as a shell gives it, in [0, 255].

    >>> code_of_shell(-9), code_of_shell(42)
    (137, 42)
    """
    return 128 - code if code < 0 else code


class UserError(ValueError):
    """An error in an argument, a field or a file of the user. Nothing has been written."""

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code


class BrokenMembersError(UserError):
    """An error about members that predict NaN, where the predictions of all members are needed."""

    def __init__(self, member_ids: Sequence[int]) -> None:
        super().__init__(
            f"Members {list(member_ids)} predict NaN, so the ensemble does too. Pass "
            "--leave_out_broken to average the others, or train again with a lower "
            "--config.optimizer.learning_rate."
        )
        self.member_ids = tuple(member_ids)


class RunError(RuntimeError):
    """An error that happened to a run after a correct start, such as a full disk."""

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.FAULT) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code


class ReplacedError(RunError):
    """An error of reading a checkpoint that a run which is training has replaced meanwhile."""


class SaveError(RunError):
    """An error of writing a checkpoint or metrics, after which training can continue."""


def code_of_write(error: BaseException) -> ExitCode:
    """Returns the exit code of a command that could not write a file."""
    if isinstance(error, RunError):  # It has decided already.
        return error.exit_code
    is_full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
    return ExitCode.DISK_FULL if is_full else ExitCode.FAULT


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question with the nearest known name, or the empty string.

    >>> did_you_mean("learnig_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    """
    near = difflib.get_close_matches(name, [*known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, in the singular or in the plural.

    >>> counted(1, "step"), counted(2000, "step"), counted(3, "class"), counted(0, "batch")
    ('1 step', '2,000 steps', '3 classes', '0 batches')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def kind_of(value: object) -> str:
    """Returns what kind of object a value is, with its article. Any array is "an array".

    >>> kind_of(1), kind_of("runs/a"), kind_of(None), kind_of(ValueError)
    ('an int', 'a str', 'None', 'the class ValueError')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if name in ("ndarray", "ArrayImpl") or name.endswith("Tracer"):
        name = "array"
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, as a sentence.

    >>> first_line(ValueError("Expected unique names, got:\\n- 'a' 2 times"))
    "Expected unique names, got: - 'a' 2 times."
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return line if line.endswith((".", "!", "?")) else line + "."


def name_of(fn: Callable[..., object]) -> str:
    """Returns the name of a class or function, or that of an object's class."""
    return getattr(fn, "__qualname__", type(fn).__name__)


def call_error(fn: Callable[..., object], count: int, named: Sequence[str] = ()) -> str | None:
    """Returns why an object cannot be called with `count` arguments and named ones; None if it can.

    >>> call_error(lambda x: x, 2)
    'too many positional arguments'
    """
    try:
        inspect.signature(fn).bind(*[None] * count, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    except ValueError:  # A builtin, of which Python does not know the signature.
        pass
    return None
