"""Networks, losses, methods and data sources by the names that a config gives.

A name is looked up in the `__all__` of its module, so that a network of `dist_ens.models`, an
objective of `dist_ens.losses` and a method of `dist_ens.methods` need no other entry. The options
of a config are the further arguments of the function.

The name `npz:FILE` calls `open_npz(FILE)` of a module of `dist_ens.data`: a kind of source is such
a function, and needs no other entry. The fields of `DataConfig` of the same name are its other
arguments.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dist_ens import data, losses, methods, models
from dist_ens.data import Source, Spec, Split
from dist_ens.data.held_out import num_held_out
from dist_ens.data.idx import open_idx_test
from dist_ens.execution.spec import AUTO
from dist_ens.experiment.reading import checked_field, nearest_field, words_of_a_config
from dist_ens.experiment.schema import DataConfig, LossConfig, ModelConfig, OptimizerConfig
from dist_ens.ground.errors import UserError, did_you_mean, first_line
from dist_ens.ground.numbers import require_one_of
from dist_ens.ground.paths import shortened
from dist_ens.losses import Objective
from dist_ens.members import Member
from dist_ens.methods import Method

# Arguments that the data gives. The labels of a loss are told by the first that it has of three.
_CLASSES, _LABELS, _TARGETS = "num_classes", "num_labels", "targets"
_RANGES = "input_ranges"
_FITTING = {
    _CLASSES: ("classes", "categorical"),
    _LABELS: ("several columns of 0 or 1", "multilabel"),
    _TARGETS: ("real targets", "gaussian"),
}
Options = dict[str, tuple[object, type]]
_Function = Callable[..., Any]
_OPEN, _DESCRIBE = "open_", "describe_"
_PLACES = {"folder": "DIR", "idx": "DIR", "tfds": "NAME", "digits": ""}  # Others are files.
_MODULES = [
    importlib.import_module(f"{data.__name__}.{found.name}")
    for found in pkgutil.iter_modules(data.__path__)
]


def _sources(verb: str) -> dict[str, _Function]:
    """Returns the functions of `dist_ens.data` whose names begin with a verb, by kind of source."""
    return {
        name.removeprefix(verb): function
        for module in _MODULES
        for name, function in vars(module).items()
        if name.startswith(verb) and function.__module__ == module.__name__
    }


_OPENING, _DESCRIBING = _sources(_OPEN), _sources(_DESCRIBE)
_KINDS = sorted(_OPENING.keys() - {"idx_test"})
# Fields that only some kinds of source have.
_OF_KINDS = (
    *("target", "task", "row_id", "group", "time", "categories", "leave_out", "test"),
    "image_size",
)
_KNOWN = ", ".join(f"{each}:{_PLACES.get(each, 'FILE')}".rstrip(":") for each in _KINDS)


def _made_by(module: ModuleType, returned: object) -> dict[str, _Function]:
    """Returns the public functions of a module that are annotated to return a type, by name."""
    public = {name: getattr(module, name) for name in module.__all__}
    return {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function)
        and inspect.signature(function).return_annotation == returned
    }


_MODELS = _made_by(models, Member)
LOSSES = _made_by(losses, Objective)
# `bootstrap` takes no number: `data.examples` names it.
_METHODS = {
    name: function
    for name, function in _made_by(methods, Method).items()
    if inspect.signature(function).parameters
}


def _options(function: Callable[..., object], given: Sequence[str]) -> Options:
    """Returns the default and the type of each argument that is not `given`, by its name."""
    hints = typing.get_type_hints(function)
    return {
        name: (parameter.default, _type_of(hints[name]))
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given
    }


def _type_of(hint: Any) -> type:
    """Returns the type in a type hint without None; tuple for a sequence."""
    kind = next((k for k in typing.get_args(hint) if k is not type(None)), hint)
    return tuple if typing.get_origin(hint) in (Sequence, tuple) else kind


def model_options(name: str) -> Options:
    """Returns the default and the type of each option of a network; tuple for a sequence."""
    require_one_of("model.name", name, [*_MODELS])
    return _options(_MODELS[name], ("input_shape", "num_outputs"))


def make_model(config: ModelConfig, input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """Returns the member that a config names.

    Args:
        config: Name of the network, and its options.
        input_shape: Shape of one example, without the batch.
        num_outputs: Number of outputs for each label, such as one logit per class.

    >>> import jax
    >>> member = make_model(ModelConfig(name="mlp", options={"hidden_sizes": (8,)}), (64,), 10)
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jax.numpy.zeros((1, 64)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # (64 + 1) * 8 + (8 + 1) * 10
    610
    """
    options = checked_options("model", config, model_options(config.name))
    try:
        return _MODELS[config.name](input_shape, num_outputs, **options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.name} refuses the options {options}: {first_line(error)}"
        ) from error


def loss_options(name: str) -> Options:
    """Returns the default and the type of each option of a loss, and of each method."""
    require_one_of("loss.name", name, [AUTO, *LOSSES])
    if name == AUTO:
        return method_options()
    return _options(LOSSES[name], (*_FITTING, "standardize")) | method_options()


def method_options() -> Options:
    """Returns the default and the type of each method that is an option of a loss."""
    return dict.fromkeys(_METHODS, (0.0, float))


def _given_by(num_classes: int | None, num_targets: int | None) -> tuple[str, int | None]:
    """Returns the argument by which a loss is told of labels, and its value."""
    if num_classes is None:
        return _TARGETS, num_targets
    return (_CLASSES, num_classes) if num_targets is None else (_LABELS, num_targets)


def chosen_loss(config: LossConfig, spec: Spec) -> LossConfig:
    """Returns a config of a loss with the name of one in place of `auto`."""
    given, _ = _given_by(spec.num_classes, spec.num_targets)
    return dataclasses.replace(config, name=_FITTING[given][1]) if config.name == AUTO else config


def make_objective(
    config: LossConfig, num_classes: int | None, num_targets: int | None = None
) -> Objective:
    """Returns the objective of the loss that a config names, for data with the `Spec`'s numbers."""
    given, number = _given_by(num_classes, num_targets)
    options = checked_options("loss", config, loss_options(config.name))
    function = LOSSES[config.name]
    if given not in inspect.signature(function).parameters:
        labels, fitting = _FITTING[given]
        one_hot = " If the rows are one-hot, save argmax(axis=1)." if given == _LABELS else ""
        raise UserError(
            f"loss.name={config.name!r} does not fit labels that are {labels}. Try "
            f"{fitting}.{one_hot}"
        )
    options = {name: value for name, value in options.items() if name not in _METHODS}
    return function(**{given: number}, **options)


def make_methods(config: LossConfig, input_ranges: Callable[[], np.ndarray]) -> list[Method]:
    """Returns the methods that a config names, in the order of `dist_ens.methods.__all__`."""
    chosen = {n: config.options[n] for n in _METHODS if config.options.get(n)}
    made = []
    for name, value in chosen.items():
        takes_ranges = _RANGES in inspect.signature(_METHODS[name]).parameters
        made.append(_METHODS[name](value, **({_RANGES: input_ranges()} if takes_ranges else {})))
    return made


def checked_options(
    section: str, config: ModelConfig | LossConfig | OptimizerConfig, known: Options
) -> dict[str, Any]:
    """Returns the options of a section, each an argument of its function and of that type."""
    checked = {}
    for option, value in config.options.items():
        path = f"{section}.{option}"
        if option not in known:
            meant = nearest_field(option, [*known, *vars(config)])
            raise UserError(
                f"{path} is not an option of {config.name}.{meant} Its options are: "
                f"{', '.join(known) or 'none'}."
            )
        default, kind = known[option]
        hint = tuple[object, ...] if kind is tuple else kind
        checked[option] = checked_field(path, value, hint | None if default is None else hint)
    return checked


def open_source(config: DataConfig) -> Source:
    """Opens the data set that a config names.

    It has a validation split if `config.validation` is above 0. Its `source` is `digits`,
    `csv:FILE`, `parquet:FILE`, `folder:DIR`, `idx:DIR`, `npz:FILE`, `tfds:NAME`, `text:FILE` or
    `uci:FILE`. Examples in memory have been checked. A TFDS source checks them when it reads them.
    """
    return _opened(config).with_validation(config.validation)


def open_test(config: DataConfig) -> Split:
    """Opens the test split of the data set that a config names, without a training split."""
    kind, place = _parse(config.source)
    return open_idx_test(place) if kind == "idx" else _opened(config).test


def describe_source(config: DataConfig) -> tuple[Spec, int | None]:
    """Describes the examples of a data set, reading little, with the number of training examples.

    The number is None if TFDS has not prepared the data set.
    """
    if (describe := _DESCRIBING.get(_parse(config.source)[0])) is not None:
        spec, count = _call(describe, config)
        return spec, count and count - num_held_out(config.validation, count)
    source = open_source(config)
    return source.spec, source.num_train_examples


def comes_in_memory(config: DataConfig) -> bool:
    """Returns whether opening the data set that a config names reads its examples into memory."""
    return _parse(config.source)[0] not in ("folder", "tfds")


def _opened(config: DataConfig) -> Source:
    """Returns the data set that a config names."""
    return _call(_OPENING[_parse(config.source)[0]], config)


@words_of_a_config()
def _call(function: _Function, config: DataConfig) -> Any:
    """Calls the function of a kind of source with its arguments from a config."""
    kind, place = _parse(config.source)
    for name in _OF_KINDS:
        if (value := getattr(config, name)) != getattr(DataConfig(), name) and (
            name not in inspect.signature(function).parameters
        ):
            raise UserError(f"data.{name}={value!r} has no effect on {kind!r}. Leave it out.")
    names = [*inspect.signature(function).parameters][bool(place) :]
    arguments = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return function(*([place] if place else []), **arguments)


def _parse(source: str) -> tuple[str, str]:
    """Splits the name of a source into its kind and its path or name."""
    kind, _, place = source.partition(":")
    if kind not in _KINDS or bool(place) == (_PLACES.get(kind) == ""):
        meant = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
        raise UserError(
            f"data.source={shortened(source)} is not a data source.{meant} Choose one of {_KNOWN}."
        )
    return kind, place
