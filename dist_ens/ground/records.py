"""Dataclasses from plain data: values of a config, and the JSON that a run wrote."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dist_ens.ground.errors import UserError, value_and_kind
from dist_ens.ground.json_text import Json


def fields_from_record(
    cls: type, values: Json, readers: Mapping[str, Callable[[Json], Any]] | None = None
) -> dict[str, Any]:
    """Returns the arguments of a dataclass from the JSON that was written of an instance.

    A field is read by its function in `readers`, or by its annotation.
    """
    readers = readers or {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise UserError(f"A {cls.__name__} has fields by name, unlike {repr(values)[:200]}.")
    unset = dataclasses.MISSING
    required = {n for n, f in fields.items() if f.default is unset and f.default_factory is unset}
    wrong = sorted((required - values.keys()) | (values.keys() - fields.keys()))
    if wrong:
        raise UserError(
            f"Fields of {cls.__name__} are absent or unknown: {', '.join(wrong)[:200]}."
        )
    hints = typing.get_type_hints(cls)
    return {
        name: readers[name](value)
        if name in readers
        else checked_type(f"{cls.__name__}.{name}", value, hints[name], "The record is damaged.")
        for name, value in values.items()
    }


def as_tuple(value: object) -> object:
    """Returns lists and tuples as tuples, at every depth, and other values unchanged."""
    return tuple(as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def checked_type(field: str, value: Any, hint: Any, remedy: str | None = None) -> Any:
    """Returns a value as the annotated type: a class, `X | None`, a tuple or a mapping of one type.

    It converts only an int to a float, and a list or one number to a tuple.
    """
    if hint is Any:
        return value
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = as_tuple(value)
    for kind in allowed:
        origin = typing.get_origin(kind) or kind
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if origin is tuple and is_number:  # As on the command line, one number needs no comma.
            value = (value,)
        if origin is tuple and isinstance(value, tuple):
            of_each = typing.get_args(kind)[0]
            return tuple(
                checked_type(f"{field}[{i}]", v, of_each, remedy) for i, v in enumerate(value)
            )
        if isinstance(value, bool) and origin is not bool:
            continue
        if origin is float and isinstance(value, int) and abs(value) < sys.float_info.max:
            return float(value)
        if origin is Mapping and isinstance(value, Mapping):
            of_each = typing.get_args(kind)[1]
            return {
                str(k): checked_type(f"{field}[{k!r}]", v, of_each, remedy)
                for k, v in value.items()
            }
        if isinstance(value, origin):
            return value
    names = " or ".join(
        "None" if k is types.NoneType else getattr(k, "__name__", str(k)) for k in allowed
    )
    remedy = remedy or f"Correct it in the config file, or give --config.{field}=VALUE."
    raise UserError(f"{field} must be {names}: got {value_and_kind(value)}. {remedy}")
