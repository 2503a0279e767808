"""Checks of the values of fields. A message says what is wrong, and then what to do."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

from dist_ens.errors import UserError

# Steps, members and their ids are counted in int32.
MOST = 2**31 - 1


def require(holds: bool, message: str) -> None:
    """Raises a `UserError` with a message unless a condition holds."""
    if not holds:
        raise UserError(message)


def require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    """Raises a `UserError` unless a field's value is one of the known values."""
    if value not in known:
        raise UserError(
            f"{field}={value!r} is unknown.{did_you_mean(value, known)} Choose one of "
            f"{', '.join(known)}."
        )


def require_positive(field: str, value: int | float | None, most: int = MOST) -> None:
    """Raises a `UserError` unless a field's value is None, or positive and finite.

    Args:
        field: Name of the field.
        value: Value of the field.
        most: Largest allowed integer. Floats have no such bound.
    """
    if value is None:
        return
    shown = str(value)[:200]
    if not value > 0 or (isinstance(value, float) and not math.isfinite(value)):
        number = "an integer of 1 or more" if isinstance(value, int) else "a positive number"
        raise UserError(f"{field} must be positive: got {shown}. Set --config.{field} to {number}.")
    if isinstance(value, int) and value > most:
        raise UserError(f"{field} must be at most {most:,}: got {shown}. Lower it.")


def whole_number(field: str, value: Any, *, least: int, most: int = MOST) -> int:
    """Returns a field's value as an int. NumPy's integers are converted.

    Args:
        field: Name of the field.
        value: Value of the field.
        least: Smallest allowed integer.
        most: Largest allowed integer.

    Raises:
        UserError: If the value is not an integer in [least, most].
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise UserError(
            f"{field} is {str(value)[:200]}, a {type(value).__name__}. Give a whole number from "
            f"{least:,} to {most:,}."
        )
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question with the nearest known name, or the empty string.

    Args:
        name: Name that is unknown.
        known: Names that are known.

    >>> did_you_mean("learnig_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
