"""Checks of numbers and choices that a user gives, at the door that takes them."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import SupportsFloat, SupportsIndex

from dist_ens.ground.errors import UserError, did_you_mean

# Steps, members and their ids are counted in int32.
MOST = 2**31 - 1
MOST_STEPS = 2**62  # Largest number of steps of a run.
MOST_SEED = 2**32 - 1
MOST_DROPOUT_SAMPLES = 2**16


def require_one_of(field: str, value: str, known: Sequence[str]) -> None:
    """Raises a `UserError` unless a field's value is one of the known values."""
    if value not in known:
        meant = did_you_mean(str(value), known)
        raise UserError(f"{field}={value!r} is unknown.{meant} Choose one of {', '.join(known)}.")


def require_coefficient(field: str, value: float, hint: str) -> None:
    """Raises a `UserError` unless a coefficient is a positive and finite number."""
    _require_number(
        field, value, lambda number: 0 < number < math.inf, "be positive and finite", hint
    )


def require_fraction(field: str, value: float, hint: str) -> None:
    """Raises a `UserError` unless a value is a number in [0, 1)."""
    _require_number(field, value, lambda number: 0 <= number < 1, "lie in [0, 1)", hint)


def require_share(field: str, value: float, hint: str) -> None:
    """Raises a `UserError` unless a value is a number in (0, 1)."""
    _require_number(field, value, lambda number: 0 < number < 1, "lie in (0, 1)", hint)


def _require_number(
    field: str, value: SupportsFloat, fits: Callable[[float], bool], rule: str, hint: str
) -> None:
    # A text of digits is no number, although `float` takes it.
    if not hasattr(value, "__float__") or not fits(float(value)):
        raise UserError(f"{field} must {rule}: got {repr(value)[:200]}. {hint}")


def whole_number(field: str, value: SupportsIndex, *, least: int, most: int = MOST) -> int:
    """Returns a field's value as an int in [least, most]. NumPy's integers are converted."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise UserError(
            f"{field} is {repr(value)[:200]}. Give a whole number from {least:,} to {most:,}."
        )
    return number
