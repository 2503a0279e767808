"""Strict parsing of JSON that a run wrote earlier, and that may have been damaged since."""

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value of JSON: a dict, a list, a text, a number, True, False or None."""

JsonDict: TypeAlias = dict[str, Any]
"""A dict of JSON values."""


def from_json(text: bytes) -> Json:
    """Parses JSON more strictly than `json.loads`: numbers fit in a float, and no key occurs twice.

    >>> from_json(b'{"step": 3}')
    {'step': 3}
    """
    try:
        return json.loads(
            text.decode(),
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=_finite,
            object_pairs_hook=_without_repetition,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number from 0 to the largest int64."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: object) -> bool:
    """Returns whether a value is a number or None. A number that is not finite is saved as null."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("it has a number that is not finite")
    return number


def _whole(text: str) -> int:
    _finite(text)  # This comes first, because `int` is slow for a number of many digits.
    return int(text)


def _without_repetition(pairs: Sequence[tuple[str, Json]]) -> JsonDict:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("it has a key twice")
    return read
