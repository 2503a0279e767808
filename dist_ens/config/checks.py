"""What every field is checked by: a rule, what was received, and the way out."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

from dist_ens.errors import UserError

# Steps, members and their ids are counted in int32.
MOST = 2**31 - 1


def require(holds: bool, rule: str, received: str, way_out: str) -> None:
    """Raises a `UserError` of the three unless the rule holds."""
    if not holds:
        raise UserError(f"{rule} Received: {received}. {way_out}")


def require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    """Raises a `UserError` unless the field's value is one of the known."""
    if value not in known:
        raise UserError(
            f"{field} must be one of {', '.join(known)}. Received: {value!r}."
            f"{did_you_mean(value, known)}"
        )


def require_positive(field: str, value: int | float | None, most: int = MOST) -> None:
    """Raises a `UserError` unless a field's value is None, or positive and finite.

    Args:
        field: Name of the field.
        value: Its value.
        most: Largest whole number that it may be; floats have no such bound.
    """
    if value is None:
        return
    shown = str(value)[:200]
    require(
        value > 0 and (isinstance(value, int) or math.isfinite(value)),
        f"{field} must be positive.",
        f"{field}={shown}",
        f"Try --config.{field}=1 or more."
        if isinstance(value, int)
        else f"Try a small positive --config.{field}.",
    )
    if isinstance(value, int) and value > most:
        raise UserError(f"{field} is {shown}, and may be at most {most:,}. Lower it.")


def whole_number(field: str, value: Any, *, least: int, most: int = MOST) -> int:
    """Returns a field's value as an int; NumPy's integers are ints too.

    Args:
        field: Name of the field.
        value: Its value.
        least: Smallest number that it may be.
        most: Largest number that it may be.

    Raises:
        UserError: If it is no whole number in [least, most].
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
    """A half-sentence with the nearest known name, or the empty string.

    >>> did_you_mean("learnig_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
