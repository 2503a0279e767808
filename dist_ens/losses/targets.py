"""Losses of several targets, of which an example has one label each."""

from collections.abc import Callable

import jax

from dist_ens.ground.numbers import whole_number

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def of_each_target(outputs: jax.Array, num_targets: int | None) -> jax.Array:
    """Returns a network's outputs as those of each target; unchanged without several targets.

    Outputs, float[..., k * targets], hold the first of the k outputs of every target, then the
    second of every target, and so on. The result is float[..., targets, k].

    >>> import jax.numpy as jnp
    >>> of_each_target(jnp.array([1, 2, 30, 40]), 2).tolist()  # means 1 and 2, then raw variances
    [[1, 30], [2, 40]]
    """
    if num_targets is None:
        return outputs
    return outputs.reshape(*outputs.shape[:-1], -1, num_targets).swapaxes(-1, -2)


def summed(loss: Loss, num_targets: int | None) -> Loss:
    """Returns the sum over the targets of the loss of one; the loss itself without several.

    The NLL of independent targets is the sum of theirs. The gradient of an output then does not
    depend on the number of targets.
    """
    if num_targets is None:
        return loss
    return lambda outputs, labels: loss(of_each_target(outputs, num_targets), labels).sum(axis=-1)


def checked_targets(targets: int | None) -> int | None:
    """Returns a number of targets; raises a `UserError` unless it is None or at least 1."""
    return None if targets is None else whole_number("targets", targets, least=1)
