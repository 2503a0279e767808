"""Conversion between frozen dataclasses and the mappings that config files and JSON hold."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dist_ens.config.checks import did_you_mean
from dist_ens.errors import UserError, value_and_kind
from dist_ens.json_text import Json

# A section with a field of this name, a mapping, takes arguments of a function that another field
# names. In a config they stand beside the section's own fields.
OPTIONS = "options"


def to_config_dict_of(section: Any) -> ConfigDict:
    """Returns a dataclass as a `ConfigDict` that keeps the types of fields that are None.

    Args:
        section: Instance of the dataclass. Its `options`, if it has any, become fields.
    """
    config = ConfigDict()
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if name == OPTIONS:
            for option, given in value.items():
                config[option] = given
        elif dataclasses.is_dataclass(value):
            config[name] = to_config_dict_of(value)
        elif type(None) in typing.get_args(hint):
            kind = next(k for k in typing.get_args(hint) if k is not type(None))
            config[name] = placeholder(typing.get_origin(kind) or kind)
            config[name] = value
        else:
            config[name] = value
    return config


def leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yields every value of nested mappings, with the name of its field such as `data.source`.

    An option is a field of the section that has the options.

    Args:
        tree: Nested mappings.
        prefix: Text that every path begins with.
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, prefix if name == OPTIONS else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def from_mapping(cls: type, values: Mapping[str, Json], prefix: str) -> Any:
    """Returns an instance of a dataclass, made from nested mappings.

    Args:
        cls: The dataclass. If it has a field `options`, unknown names are collected there.
        values: Values by the names of the fields.
        prefix: Path of the section in the experiment, such as `data.`; empty for the experiment.

    Raises:
        UserError: If a name is unknown, or a value has the wrong type or is out of range.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"{prefix.rstrip('.')} is {values!r}, but it is a section with fields. Set one of its "
            "fields instead."
        )
    hints = typing.get_type_hints(cls)
    if OPTIONS in hints:
        values = _with_options(values, hints, prefix)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(
                f"The config has no field {prefix + name!r}.{did_you_mean(name, _paths(hints))} "
                f"The fields here are: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_mapping(hints[name], value, f"{prefix}{name}.")
        else:
            arguments[name] = checked_type(prefix + name, value, hints[name])
    return cls(**arguments)


def _paths(hints: Mapping[str, Any]) -> list[str]:
    """Returns the names of some fields, and the paths of the fields inside those with fields.

    Args:
        hints: Annotations of the fields by name.
    """
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    inside = [
        f"{name}.{field}"
        for name, hint in sections.items()
        for field in typing.get_type_hints(hint)
    ]
    return [*hints, *inside]


def _with_options(
    values: Mapping[str, Json], hints: Mapping[str, Any], prefix: str
) -> dict[str, Any]:
    """Returns the values of a section with all names that are not its fields under `options`."""
    given = checked_type(f"{prefix}{OPTIONS}", values.get(OPTIONS, {}), hints[OPTIONS])
    named = {name: value for name, value in values.items() if name != OPTIONS} | given
    fields = {name: value for name, value in named.items() if name in hints}
    options = {name: _as_tuple(value) for name, value in named.items() if name not in hints}
    return fields | {OPTIONS: options}


def fields_from_record(
    cls: type, values: Json, readers: Mapping[str, Callable[[Json], Any]] | None = None
) -> dict[str, Any]:
    """Returns the arguments of a dataclass from the JSON that was written of an instance.

    Args:
        cls: The dataclass.
        values: Values by the names of the fields. Fields with a default may be absent.
        readers: Functions that read a field's value, by its name. Default: the field's annotation.

    Raises:
        UserError: If a field is absent, unknown, or of another type.
    """
    readers = readers or {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise UserError(f"A {cls.__name__} has fields by name, unlike {repr(values)[:200]}.")
    required = {n for n, field in fields.items() if field.default is dataclasses.MISSING}
    for names, what in (
        (sorted(required - values.keys()), "absent"),
        (sorted(values.keys() - fields.keys()), "unknown"),
    ):
        if names:
            raise UserError(f"Fields of {cls.__name__} are {what}: {', '.join(names)[:200]}.")
    hints = typing.get_type_hints(cls)
    return {
        name: readers[name](value)
        if name in readers
        else checked_type(f"{cls.__name__}.{name}", value, hints[name], "The record is damaged.")
        for name, value in values.items()
    }


def _as_tuple(value: object) -> object:
    """Returns lists and tuples as tuples, at every depth, and other values unchanged."""
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def checked_type(field: str, value: Any, hint: Any, remedy: str | None = None) -> Any:
    """Returns a value as the annotated type. Converts only an int to a float, and a list
    or one number to a tuple.

    Args:
        field: Name of the field, for the message.
        value: Value from a config or from JSON.
        hint: Annotation of the field: a class, `X | None`, a tuple or a mapping of one type.
        remedy: Sentence that says what to do. Default: a sentence about the config.

    Raises:
        UserError: If the value is of another type.
    """
    if hint is Any:
        return value
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = _as_tuple(value)
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
