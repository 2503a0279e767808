"""Strict parsing of JSON, and dataclasses from it or from the values of a config.

A run wrote the JSON earlier, and it may have been damaged since.
"""

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from dist_ens.ground.errors import UserError, kind_of

Json: TypeAlias = Any
"""A value of JSON: a dict, a list, a text, a number, True, False or None."""

JsonDict: TypeAlias = dict[str, Any]
"""A dict of JSON values."""

_UNFIT = object()  # In place of a value that is not of a type.


def from_json(text: bytes) -> Json:
    """Parses JSON more strictly than `json.loads`: numbers fit in floats, and keys occur once."""
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


def fields_from_record(
    cls: type, values: Json, readers: Mapping[str, Callable[[Json], object]] | None = None
) -> dict[str, Any]:
    """Returns the arguments of a dataclass from the JSON that was written of an instance.

    A field is read by its function in `readers`. In other fields, lists become tuples.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unset = dataclasses.MISSING
    required = {n for n, f in fields.items() if f.default is unset and f.default_factory is unset}
    given = values.keys() if isinstance(values, Mapping) else {repr(values)[:200]}
    wrong = sorted((required - given) | (given - fields.keys()))
    if wrong:
        raise UserError(
            f"Fields of {cls.__name__} are absent or unknown: {', '.join(wrong)[:200]}."
        )
    return {name: (readers or {}).get(name, as_tuple)(value) for name, value in values.items()}


def as_tuple(value: object) -> object:
    """Returns lists and tuples as tuples, at every depth, and other values unchanged."""
    return tuple(as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def checked_type(field: str, value: object, hint: Any, remedy: str) -> Any:
    """Returns a value as the annotated type: a class, `X | None`, a tuple or a mapping of one type.

    It converts only an int to a float, and a list or one number to a tuple.
    """
    if hint is Any:
        return value
    value = as_tuple(value)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in allowed:
        converted = _as_kind(typing.get_origin(kind) or kind, kind, value, field, remedy)
        if converted is not _UNFIT:
            return converted
    names = " or ".join(
        "None" if k is types.NoneType else getattr(k, "__name__", str(k)) for k in allowed
    )
    raise UserError(f"{field} must be {names}: got {repr(value)[:200]}, {kind_of(value)}. {remedy}")


def _as_kind(origin: type, kind: type, value: object, field: str, remedy: str) -> object:
    """Returns a value as one type without alternatives; `_UNFIT` if it is of another type."""
    if isinstance(value, bool):
        return value if origin is bool else _UNFIT
    if origin is tuple and isinstance(value, tuple | int | float):
        # As on the command line, one number needs no comma.
        parts, of_each = value if isinstance(value, tuple) else (value,), typing.get_args(kind)[0]
        return tuple(checked_type(f"{field}[{i}]", v, of_each, remedy) for i, v in enumerate(parts))
    if origin is Mapping and isinstance(value, Mapping):
        of_each = typing.get_args(kind)[1]
        return {
            str(k): checked_type(f"{field}[{k!r}]", v, of_each, remedy) for k, v in value.items()
        }
    if origin is float and isinstance(value, int) and abs(value) < sys.float_info.max:
        return float(value)
    return value if isinstance(value, origin) else _UNFIT
