"""Networks, losses and methods by the names that a config gives.

A name is looked up in the `__all__` of its module, so that a network of `dist_ens.models`, an
objective of `dist_ens.losses` and a method of `dist_ens.methods` need no other entry. The options
of a config are the further arguments of the function.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dist_ens import losses, methods, models
from dist_ens.experiment.reading import nearest_field
from dist_ens.experiment.schema import LossConfig, ModelConfig
from dist_ens.ground.errors import UserError, did_you_mean, first_line
from dist_ens.ground.records import checked_type
from dist_ens.losses import Objective
from dist_ens.members import Member
from dist_ens.methods import Method

# Names of losses in a config, where a function of the name computes the loss of each example. The
# function beside it makes the objective.
_OBJECTIVES = {
    "softmax_cross_entropy": "categorical",
    "class_mean_cross_entropy": "class_mean_categorical",
    "sigmoid_cross_entropy": "one_vs_rest",
    "gaussian_nll": "gaussian",
    "beta_nll": "beta_gaussian",
    "mse": "squared_error",
    "pinball": "quantiles",
}
_CLASSES, _RANGES = "num_classes", "input_ranges"  # Arguments that the data gives.
Options = dict[str, tuple[object, type]]


def _made_by(module: ModuleType, returned: object) -> dict[str, Callable[..., Any]]:
    """Returns the public functions of a module that are annotated to return a type, by name."""
    public = {name: getattr(module, name) for name in module.__all__}
    return {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function)
        and inspect.signature(function).return_annotation == returned
    }


_MODELS = _made_by(models, Member)
_LOSSES = _made_by(losses, Objective)
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
    if name not in _MODELS:
        raise UserError(
            f"model.name={name!r} is not a network of dist_ens.models.{did_you_mean(name, _MODELS)}"
            f" Choose one of {', '.join(_MODELS)}, or write make_member(spec) in the config file."
        )
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
    _require_options("model", config.name, config.options, model_options(config.name))
    try:
        return _MODELS[config.name](input_shape, num_outputs, **config.options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.name} refuses the options {dict(config.options)}: {first_line(error)}"
        ) from error


def loss_names() -> tuple[str, ...]:
    """Returns the names of the losses, each once."""
    others = [name for name in _LOSSES if name not in _OBJECTIVES.values()]
    return (*_OBJECTIVES, *others)


def loss_options(name: str) -> Options:
    """Returns the default and the type of each option of a loss, and of each method."""
    of_loss = _options(_objective(name), (_CLASSES, "standardize"))
    return of_loss | method_options()


def method_options() -> Options:
    """Returns the default and the type of each method that is an option of a loss."""
    return dict.fromkeys(_METHODS, (0.0, float))


def _objective(name: str) -> Callable[..., Objective]:
    """Returns the function that makes the objective of a loss, by the name of a config."""
    function = _LOSSES.get(_OBJECTIVES.get(name, name))
    if function is None:
        raise UserError(
            f"loss.name={name!r} is unknown.{did_you_mean(name, loss_names())} Choose one of "
            f"{', '.join(loss_names())}, or write make_objective(spec) in the config file."
        )
    return function


def make_objective(config: LossConfig, num_classes: int | None) -> Objective:
    """Returns the objective of the loss that a config names."""
    known = loss_options(config.name)
    _require_options("loss", config.name, config.options, known)
    function = _objective(config.name)
    is_of_classes = _CLASSES in inspect.signature(function).parameters
    labels, fitting = ("classes", "softmax_cross_entropy")
    if num_classes is None:
        labels, fitting = ("real targets", "gaussian_nll")
    if is_of_classes != (num_classes is not None):
        raise UserError(
            f"loss.name={config.name!r} does not fit labels that are {labels}. Try {fitting}."
        )
    options = {name: value for name, value in config.options.items() if name not in _METHODS}
    return function(*([num_classes] if is_of_classes else []), **options)


def make_methods(config: LossConfig, input_ranges: Callable[[], np.ndarray]) -> list[Method]:
    """Returns the methods that a config names, in the order of `dist_ens.methods.__all__`."""
    chosen = {n: config.options[n] for n in _METHODS if config.options.get(n)}
    made = []
    for name, value in chosen.items():
        takes_ranges = _RANGES in inspect.signature(_METHODS[name]).parameters
        made.append(_METHODS[name](value, **({_RANGES: input_ranges()} if takes_ranges else {})))
    return made


def _require_options(section: str, name: str, given: Mapping[str, object], known: Options) -> None:
    """Raises a `UserError` unless a function has all options of a section, of these types."""
    for option, value in given.items():
        if option not in known:
            raise UserError(
                f"{section}.{option} is not an option of {name}."
                f"{nearest_field(option, known)} Its options are: {', '.join(known) or 'none'}."
            )
        if known[option][1] is float:
            checked_type(f"{section}.{option}", value, float)
