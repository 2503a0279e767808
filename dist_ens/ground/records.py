"""Dataclasses from plain data: values of a config, and the JSON that a run wrote."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.json_text import Json

_UNFIT = object()  # In place of a value that is not of a type.


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
