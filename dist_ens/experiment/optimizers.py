"""Optimizers of `optax` and `optax.contrib`, by the names that a config gives.

The config file may define any other optimizer, as a function `make_optimizer(spec)`.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping

import jax
import numpy as np
import optax
import optax.contrib

from dist_ens.experiment.named import Options, checked_options
from dist_ens.experiment.schema import OptimizerConfig
from dist_ens.ground.errors import UserError, did_you_mean, first_line
from dist_ens.ground.numbers import require_coefficient

# These arguments are fields of `OptimizerConfig`, so they are not options.
_FIELDS = ("learning_rate", "momentum", "weight_decay")
_FUNCTIONS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: function
    for name, function in (vars(optax.contrib) | vars(optax)).items()
    if inspect.isfunction(function) or isinstance(function, functools.partial)
    if not name.startswith("_")
}
_WAY_OUT = "Name another one, or write make_optimizer(spec) in the config file."


def make_optimizer(
    config: OptimizerConfig, hyper: Mapping[str, jax.Array] | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer of one member that a config names.

    Gradients are clipped first. For `sgd`, `weight_decay` adds the gradient of an L2 penalty before
    the momentum. Settings of the member take the place of fields and options of the same name.

    >>> optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.5))
    >>> updates, _ = optimizer.update({"w": 2.0}, optimizer.init({"w": 1.0}), {"w": 1.0})
    >>> float(updates["w"])
    -1.0
    """
    make = _optimizer(config.name)
    hyper = hyper or {}
    options = checked_options("optimizer", config, optimizer_options(config.name))
    own = {name: hyper[name] for name in hyper.keys() & inspect.signature(make).parameters.keys()}
    arguments = _fields(config, make) | options | own
    if "learning_rate" in own:
        arguments["learning_rate"] = _schedule(own["learning_rate"], config)
    try:
        optimizer = make(**arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{config.name} does not accept {', '.join(arguments)}: {first_line(error)}"
        ) from error
    if config.name == "sgd":
        decay = hyper.get("weight_decay", config.weight_decay or None)
        penalty = optax.identity() if decay is None else optax.add_decayed_weights(decay)
        optimizer = optax.chain(penalty, optimizer)
    if config.clip_norm is not None:
        require_coefficient("optimizer.clip_norm", config.clip_norm, "1.0 is usual.")
    clip_norm = hyper.get("clip_norm", config.clip_norm)
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def optimizer_options(name: str) -> Options:
    """Returns `(default, type)` of the arguments that a config can set beside its fields.

    They are numbers, strings, tuples and types of arrays (as strings).
    """
    options = {}
    for parameter in inspect.signature(_optimizer(name)).parameters.values():
        kind = _type_of(parameter)
        if kind is not None and parameter.name not in _FIELDS:
            is_dtype = kind is str and not isinstance(parameter.default, str | None)
            default = np.dtype(parameter.default).name if is_dtype else parameter.default
            options[parameter.name] = (default, kind)
    return options


def own_fields(name: str) -> set[str]:
    """Returns the fields of `OptimizerConfig` that an optimizer has, by its name."""
    decays = {"weight_decay"} if name == "sgd" else set()
    return decays | ({*_FIELDS} & inspect.signature(_optimizer(name)).parameters.keys())


def _optimizer(name: str) -> Callable[..., optax.GradientTransformation]:
    """Returns Optax's function that makes an optimizer, by its name."""
    function = _FUNCTIONS.get(name)
    if function is None:
        hint = did_you_mean(name, _names())
        raise UserError(f"optimizer.name={name!r} is not an optimizer of Optax.{hint} {_WAY_OUT}")
    refusal = _refusal(function)
    if refusal:
        hint = did_you_mean(name.removeprefix("scale_by_"), _names())
        raise UserError(f"optimizer.name={name!r} cannot be used: it {refusal}.{hint} {_WAY_OUT}")
    return function


def _refusal(function: Callable[..., object]) -> str | None:
    """Returns the reason why a config cannot use a function of Optax; None if it can use it."""
    signature = inspect.signature(function)
    returned = signature.return_annotation
    parameters = signature.parameters.values()
    if returned is signature.empty and "learning_rate" in signature.parameters:
        returned = optax.GradientTransformation  # A few optimizers have no annotations.
    returned = getattr(returned, "__name__", str(returned)).rpartition(".")[2]
    if returned not in ("GradientTransformation", "GradientTransformationExtraArgs"):
        return "does not return a gradient transformation"
    needed = [p.name for p in parameters if p.default is p.empty and p.name != "learning_rate"]
    if needed:
        return f"needs {', '.join(needed)}, which have no default"
    descends = any(p.name.endswith("learning_rate") for p in parameters)
    if not descends or getattr(function, "__name__", "").startswith("scale_by_"):
        return "transforms gradients without taking a step against them"
    return None


@functools.cache
def _names() -> tuple[str, ...]:
    """Returns the names of all optimizers that a config can use."""
    return tuple(name for name in sorted(_FUNCTIONS) if _refusal(_FUNCTIONS[name]) is None)


def _fields(
    config: OptimizerConfig, make: Callable[..., optax.GradientTransformation]
) -> dict[str, object]:
    """Returns the arguments of an optimizer that are fields of its config."""
    parameters = inspect.signature(make).parameters
    arguments: dict[str, object] = {}
    rate = parameters.get("learning_rate")
    if config.learning_rate is not None and rate is not None:
        schedules = config.schedule == "constant" or "Callable" in str(rate.annotation)
        if not schedules:
            raise UserError(f"{config.name} takes no schedule: use optimizer.schedule=constant.")
        arguments["learning_rate"] = _schedule(config.learning_rate, config)
    elif config.learning_rate not in (None, OptimizerConfig.learning_rate):
        raise UserError(f"{config.name} takes no optimizer.learning_rate: leave it out.")
    for name in ("momentum", "weight_decay"):
        value = getattr(config, name)
        if name in parameters:
            arguments[name] = value or (None if parameters[name].default is None else 0.0)
        elif value and (config.name, name) != ("sgd", "weight_decay"):
            instead = ": use adamw" if name == "weight_decay" else ""
            raise UserError(f"{config.name} takes no optimizer.{name}={value}{instead}.")
    return arguments


def _type_of(parameter: inspect.Parameter) -> type | None:
    """Returns the type of an argument's value in a config; None if a config cannot set it."""
    if isinstance(parameter.default, optax.GradientTransformation):
        return None  # It is a tuple too.
    for kind in (bool, int, float, str, tuple):
        if isinstance(parameter.default, kind):
            return kind
    if "dtype" in parameter.name:
        return str
    allowed = typing.get_args(parameter.annotation)
    takes_tree = any(typing.get_origin(kind) is Mapping for kind in allowed)
    if parameter.default is not None or takes_tree or parameter.name == "key":
        return None
    return next((kind for kind in (float, int, str) if kind in allowed), None)


def _schedule(learning_rate: float | jax.Array, config: OptimizerConfig) -> optax.ScalarOrSchedule:
    """Returns the learning rate if it is constant, and its schedule otherwise."""
    if isinstance(learning_rate, float):
        require_coefficient("optimizer.learning_rate", learning_rate, "0.001 is usual.")
    if config.schedule_steps is None:
        return learning_rate
    if config.schedule == "linear":
        return optax.linear_schedule(learning_rate, 0.0, config.schedule_steps)
    return optax.cosine_decay_schedule(learning_rate, config.schedule_steps)
