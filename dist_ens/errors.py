"""Errors that a command reports as a message, without a traceback.

A message says what is wrong, with the values, and then what to do.
"""

from collections.abc import Sequence
from typing import Any


class UserError(ValueError):
    """An error in an argument, a field or a file of the user. Nothing has been written."""


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
    """An error that happened to a run after a correct start, such as a full disk."""


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, in the singular or in the plural.

    >>> counted(1, "step"), counted(2000, "step"), counted(3, "class"), counted(0, "batch")
    ('1 step', '2,000 steps', '3 classes', '0 batches')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def kind_of(value: Any) -> str:
    """Returns what kind of object a value is, with its article.

    >>> kind_of(1), kind_of("runs/a"), kind_of(None), kind_of(ValueError)
    ('an int', 'a str', 'None', 'the class ValueError')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' or name == 'ndarray' else 'a'} {name}"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if line.endswith((".", "!", "?")) else line + "."
