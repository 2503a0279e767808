"""The networks that a config can name.

`dist_ens.members.as_member` makes a member from a network of your own.
"""

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

MODELS: dict[str, Callable[..., Member]] = {
    model.__name__: model for model in (mlp, mlp_bn_dropout, lenet5, resnet8, transformer)
}


def model_options(name: str) -> dict[str, tuple[Any, type]]:
    """Returns the default and the type of each option of a network.

    Args:
        name: Name of the network, such as "mlp".

    Returns:
        Pairs `(default, type)` by the name of the option. Options given as sequences have the type
        tuple.

    Raises:
        UserError: If no network has this name.

    >>> model_options("mlp_bn_dropout")["dropout_rate"]
    (0.2, <class 'float'>)
    """
    if name not in MODELS:
        raise UserError(
            f"model.name={name!r} is not a network of dist_ens.models.{did_you_mean(name, MODELS)}"
            f" Choose one of {', '.join(MODELS)}, or write a network of your own in the config "
            "file, as a function make_member(spec)."
        )
    hints = typing.get_type_hints(MODELS[name])
    options = [*inspect.signature(MODELS[name]).parameters.values()][2:]
    return {option.name: (option.default, _type_of(hints[option.name])) for option in options}


def _type_of(hint: Any) -> type:
    """Returns the type in a type hint without None; tuple for a sequence."""
    kind = next((k for k in typing.get_args(hint) if k is not type(None)), hint)
    return tuple if typing.get_origin(hint) is Sequence else kind


def make_model(config: ModelConfig, input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """Returns the member that a config names.

    Args:
        config: Name of the network, and its options.
        input_shape: Shape of one example, without the batch.
        num_outputs: Number of outputs for each label: one logit per class, or the number of outputs
            that a loss of real targets needs.

    Returns:
        The member.

    Raises:
        UserError: If the name or an option is unknown, or an option has a value that the network
            refuses.

    >>> import jax
    >>> member = make_model(ModelConfig(name="mlp", options={"hidden_sizes": (8,)}), (64,), 10)
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jax.numpy.zeros((1, 64)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # (64 + 1) * 8 + (8 + 1) * 10
    610
    """
    known = model_options(config.name)
    model = MODELS[config.name]
    unknown = [name for name in config.options if name not in known]
    if unknown:
        raise UserError(
            f"model.{unknown[0]}={config.options[unknown[0]]!r} is not an option of {config.name}."
            f"{did_you_mean(unknown[0], known)} Its options are: {', '.join(known) or 'none'}. "
            "Correct the model section of the config file."
        )
    try:
        return model(input_shape, num_outputs, **config.options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.name} refuses the options {dict(config.options)}: {error}. Correct "
            "--config.model."
        ) from error
