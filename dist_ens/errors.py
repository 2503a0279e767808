"""Errors that a command reports as a message, without a traceback.

A message says what is wrong, with the values, and then what to do.
"""

import difflib
import errno
import os
from collections.abc import Iterable, Sequence

from dist_ens.commands import printable
from dist_ens.exit_codes import ExitCode


class UserError(ValueError):
    """An error in an argument, a field or a file of the user. Nothing has been written.

    Args:
        message: Sentences that name the mistake, and what to do.
        exit_code: Exit code of a command that ends with this error.
    """

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.USAGE) -> None:
        message = printable(message)
        super().__init__(message)
        self.exit_code = exit_code


class BrokenMembersError(UserError):
    """An error about members that predict NaN, where the predictions of all members are needed.

    Args:
        member_ids: Ids of the members that predict NaN.
    """

    def __init__(self, member_ids: Sequence[int]) -> None:
        super().__init__(
            f"Members {list(member_ids)} predict NaN, so the ensemble does too. Pass "
            "--leave_out_broken to average the others, or train again with a lower "
            "--config.optimizer.learning_rate."
        )
        self.member_ids = tuple(member_ids)


class RunError(RuntimeError):
    """An error that happened to a run after a correct start, such as a full disk.

    Args:
        message: Sentences that name the failure, and what to do.
        exit_code: Exit code of a command that ends with this error.
    """

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.FAULT) -> None:
        message = printable(message)
        super().__init__(message)
        self.exit_code = exit_code


class ReplacedError(RunError):
    """An error of reading a checkpoint that a run which is training has replaced meanwhile."""


class SaveError(RunError):
    """An error of writing a checkpoint or metrics, after which training can continue."""


def code_of_write(error: BaseException) -> ExitCode:
    """Returns the exit code of a command that could not write a file.

    Args:
        error: Error of writing. TensorStore reports a full disk as a ValueError with a text.

    >>> code_of_write(OSError(28, "No space left on device")).name
    'DISK_FULL'
    """
    if isinstance(error, RunError):  # It has decided already.
        return error.exit_code
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    is_full |= any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
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
    """Returns what kind of object a value is, with its article.

    >>> kind_of(1), kind_of("runs/a"), kind_of(None), kind_of(ValueError)
    ('an int', 'a str', 'None', 'the class ValueError')

    Any array is "an array".
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if name in ("ndarray", "ArrayImpl") or name.endswith("Tracer"):
        name = "array"
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def value_and_kind(value: object) -> str:
    """Returns the start of a value's repr, and its kind.

    >>> value_and_kind(5), value_and_kind(None)
    ('5, an int', 'None')
    """
    return "None" if value is None else f"{repr(value)[:200]}, {kind_of(value)}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if line.endswith((".", "!", "?")) else line + "."
