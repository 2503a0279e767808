"""Conversion between frozen dataclasses and the mappings that config files and JSON hold."""

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, as_tuple, checked_type

# A section with a field of this name, a mapping, takes arguments of a function that another field
# names. In a config they stand beside the section's own fields.
OPTIONS = "options"
_T = TypeVar("_T")
# Names of fields elsewhere, and the fields that mean the same in a config.
_ELSEWHERE = {
    "batch": "global_batch_size",
    "batch_size": "global_batch_size",
    "bs": "global_batch_size",
    "clip": "clip_norm",
    "data.name": "data.source",
    "dataset": "source",
    "ensemble_size": "num_members",
    "eval_every": "evaluation.every_steps",
    "grad_clip": "clip_norm",
    "hidden": "hidden_sizes",
    "iterations": "steps",
    "l2": "weight_decay",
    "layers": "hidden_sizes",
    "log_every": "logging.every_steps",
    "lr": "learning_rate",
    "members": "num_members",
    "n_estimators": "num_members",
    "precision": "dtype",
    "random_state": "seed",
    "wd": "weight_decay",
}
# Arguments in messages of the functions that an experiment calls, and the fields that give them.
_GIVEN_BY = {
    "batch_size": "data.global_batch_size",
    "data_dir": "data.data_dir",
    "ensemble_axis": "layout.ensemble_axis",
    "failure_policy": "failures.policy",
    "loss_threshold": "failures.loss_threshold",
    "num_classes": "data.num_classes",
    "num_folds": "data.num_folds",
    "pooling=": "evaluation.pooling=",
    "shuffle=": "data.shuffle=",
}
# A name in quotes is one in the user's own code.
_ARGUMENT = re.compile(rf"(?<![\w.'])({'|'.join(_GIVEN_BY)})")


def to_config_dict_of(section: object) -> ConfigDict:
    """Returns a dataclass as a `ConfigDict` that keeps the types of fields that are None."""
    config = ConfigDict()
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if name == OPTIONS:
            config.update(value)
        elif dataclasses.is_dataclass(value):
            config[name] = to_config_dict_of(value)
        elif kinds := [k for k in typing.get_args(hint) if isinstance(hint, types.UnionType)]:
            kind = next(k for k in kinds if k is not type(None))
            # The flag of a number or a text reads a number as one, and any other word as a text.
            is_both = str in kinds and not {int, float}.isdisjoint(kinds)
            config[name] = placeholder(object if is_both else typing.get_origin(kind) or kind)
            config[name] = value
        else:
            config[name] = value
    return config


def leaves(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yields every value of nested mappings, with its path such as `data.source`."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, prefix if name == OPTIONS else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def from_mapping(cls: type[_T], values: Mapping[str, Json], prefix: str = "") -> _T:
    """Returns an instance of a dataclass from nested mappings; `prefix` is its path, as `data.`."""
    if not isinstance(values, Mapping):
        section = prefix.rstrip(".") or "The experiment"
        raise UserError(f"{section} is {values!r}, but it is a section with fields.")
    hints = typing.get_type_hints(cls)
    if OPTIONS in hints:
        named = {name: value for name, value in values.items() if name != OPTIONS}
        named |= values.get(OPTIONS, {})
        options = {name: as_tuple(value) for name, value in named.items() if name not in hints}
        values = {name: v for name, v in named.items() if name in hints} | {OPTIONS: options}
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(
                f"The config has no field {prefix + name!r}.{nearest_field(name, _paths(hints))} "
                f"The fields here are: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_mapping(hints[name], value, f"{prefix}{name}.")
        else:
            arguments[name] = checked_field(prefix + name, value, hints[name])
    return cls(**arguments)


def checked_field(path: str, value: object, hint: object) -> Any:
    """Returns the value of a field as its annotated type; see `checked_type`."""
    remedy = f"Correct it in the config file, or give --config.{path}=VALUE."
    return checked_type(path, value, hint, remedy)


@contextlib.contextmanager
def words_of_a_config() -> Iterator[None]:
    """Names the fields of a config in a `UserError` about the arguments that they give."""
    try:
        yield
    except UserError as error:
        error.args = (_ARGUMENT.sub(lambda found: _GIVEN_BY[found[0]], str(error)),)
        raise


def _paths(hints: Mapping[str, Any]) -> list[str]:
    """Returns the names of some fields, and the paths of the fields inside those with fields."""
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    inside = [
        f"{name}.{field}"
        for name, hint in sections.items()
        for field in typing.get_type_hints(hint)
    ]
    return [*hints, *inside]


def nearest_field(name: str, known: Iterable[str]) -> str:
    """Returns a question with the field that is meant by a name, or the empty string."""
    known = list(known)
    near = fields_named(name, known)
    if not near:  # A field is compared with its own section, because a long prefix fits any.
        section, dot, field = name.rpartition(".")
        prefix = section + dot
        within = {path.removeprefix(prefix): path for path in known if path.startswith(prefix)}
        fields = within or dict(zip(known, known, strict=True))
        found = difflib.get_close_matches(field if within else name, fields, n=1)
        near = [fields[each] for each in found]
    return f" Did you mean {near[0]!r}?" if near else ""


def fields_named(name: str, known: Iterable[str]) -> list[str]:
    """Returns the paths of the fields that a name stands for in any section, the nearest first."""
    section, dot, field = name.rpartition(".")
    named_by_section = f"{name}.name"
    field = _ELSEWHERE.get(named_by_section) or _ELSEWHERE.get(name) or _ELSEWHERE.get(field, field)
    ends = (f".{field}", f".{named_by_section}")
    named = [path for path in known if f".{path}".endswith(ends)]
    return difflib.get_close_matches(section + dot + field, named, n=len(named) or 1, cutoff=0.0)
