"""The networks that a config can name; one of your own is made with `dist_ens.members`."""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

from dist_ens.config import ModelConfig, did_you_mean
from dist_ens.errors import UserError
from dist_ens.members import Member
from dist_ens.models.convolutional import lenet5, resnet8
from dist_ens.models.mlp import mlp, mlp_bn_dropout
from dist_ens.models.transformer import transformer

_MODELS: dict[str, Callable[..., Member]] = {
    model.__name__: model for model in (mlp, mlp_bn_dropout, lenet5, resnet8, transformer)
}


def model_options(name: str) -> dict[str, tuple[Any, type]]:
    """The options of a network: their defaults, and the types of what may be given for them.

    Args:
        name: As a config has it.

    Raises:
        UserError: For an unknown name.
    """
    if name not in _MODELS:
        raise UserError(
            f"model.name is one of {', '.join(_MODELS)}. Received: {name!r}."
            f"{did_you_mean(name, _MODELS)} A network of your own is written in the config "
            "file, as a function make_member(spec)."
        )
    hints = typing.get_type_hints(_MODELS[name])
    options = [*inspect.signature(_MODELS[name]).parameters.values()][2:]
    return {option.name: (option.default, _type_of(hints[option.name])) for option in options}


def _type_of(hint: Any) -> type:
    """The type in a hint, None apart."""
    kind = next((k for k in typing.get_args(hint) if k is not type(None)), hint)
    return tuple if typing.get_origin(hint) is Sequence else kind


def make_model(config: ModelConfig, input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """The member that a config names.

    Args:
        config: A name, and the options of that network.
        input_shape: Of one example.
        num_outputs: Per label: a logit for each class, or what a loss of real targets takes.

    Returns:
        The member.

    Raises:
        UserError: For an unknown name or option.
    """
    known = model_options(config.name)
    model = _MODELS[config.name]
    unknown = [name for name in config.options if name not in known]
    if unknown:
        raise UserError(
            f"The options of {config.name} are: {', '.join(known) or 'none'}. Received: "
            f"model.{unknown[0]}={config.options[unknown[0]]!r}."
            f"{did_you_mean(unknown[0], known)} Correct the model section of the config file."
        )
    try:
        return model(input_shape, num_outputs, **config.options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The options of {config.name} are such as its docstring says. Received: "
            f"{dict(config.options)}, to which it said: {error}. Correct --config.model."
        ) from error
