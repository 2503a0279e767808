"""Between frozen dataclasses and the loose mappings that config files and JSON hold."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dist_ens.config.checks import did_you_mean
from dist_ens.config.schema import ModelConfig
from dist_ens.errors import UserError


def to_config_dict_of(section: Any) -> ConfigDict:
    """A dataclass as a `ConfigDict` that remembers the types of fields that are None."""
    config = ConfigDict()
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            config[name] = to_config_dict_of(value)
        elif type(None) in typing.get_args(hint):
            kind = next(k for k in typing.get_args(hint) if k is not type(None))
            config[name] = placeholder(kind)
            config[name] = value
        else:
            config[name] = value
    return config


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings, with the names that lead to it."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def from_mapping(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass `cls`; `prefix` is where it stands in the experiment."""
    if not isinstance(values, Mapping):
        raise UserError(
            f"{prefix.rstrip('.')} is a section with fields of its own. Received: {values!r}. "
            f"Set one of its fields instead."
        )
    if cls is ModelConfig:  # every network has options of its own; `dist_ens.models` checks them
        options = {k: v for k, v in values.items() if k not in ("name", "options")}
        given = values.get("options", {})
        options |= checked_type(f"{prefix}options", given, Mapping[str, Any])
        options = {k: _as_tuple(v) for k, v in options.items()}
        values = {k: v for k, v in values.items() if k == "name"} | {"options": options}
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(
                f"The config has no field {prefix + name!r}.{did_you_mean(name, hints)} "
                f"The fields here are: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_mapping(hints[name], value, f"{prefix}{name}.")
        else:
            arguments[name] = checked_type(prefix + name, value, hints[name])
    return cls(**arguments)


def fields_from_record(
    cls: type, values: Any, readers: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Returns the arguments of a dataclass from JSON that was written of one.

    Args:
        cls: The dataclass.
        values: What was written, by the fields' names; fields with a default may be absent.
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
        else checked_type(f"{cls.__name__}.{name}", value, hints[name], "It is not so written.")
        for name, value in values.items()
    }


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def checked_type(field: str, value: Any, hint: Any, remedy: str | None = None) -> Any:
    """Returns a value as the annotated type.

    Only an int for a float and a list for a tuple are changed.

    Args:
        field: Name of the field, for the message.
        value: What a config or JSON has.
        hint: Annotation of the field: a class, `X | None`, a tuple or a mapping of one type.
        remedy: Sentence that says what to do. Default: to correct the config.

    Raises:
        UserError: If the value is of another type.
    """
    if hint is Any:
        return value
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = _as_tuple(value)
    for kind in allowed:
        origin = typing.get_origin(kind) or kind
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
    remedy = remedy or f"Correct it in the config file or with --config.{field}=…"
    raise UserError(
        f"{field} must be {names}. Received: {repr(value)[:200]}, a {type(value).__name__}. "
        + remedy
    )
