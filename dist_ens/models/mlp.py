"""Multilayer perceptrons."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.layout import DATA
from dist_ens.member import Member, from_example_functions, from_linen


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden_sizes: Sequence[int] = (128, 128),
    init_stddev: float | None = None,
) -> Member:
    """A multilayer perceptron with ReLU, in plain JAX.

    Args:
        input_shape: Of one example; it is flattened.
        num_classes: Logits per example.
        hidden_sizes: Units of each hidden layer.
        init_stddev: Standard deviation of all weights and biases at the start; None for He's
            initialisation with zero biases.

    Returns:
        The member. Its parameters are a list of `{"w": float32[in, out], "b": float32[out]}`.
    """
    sizes = [math.prod(input_shape), *hidden_sizes, num_classes]

    def layer(key: jax.Array, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        w_key, b_key = jax.random.split(key)
        if init_stddev is None:
            he = math.sqrt(2 / fan_in) * jax.random.normal(w_key, (fan_in, fan_out))
            return {"w": he, "b": jnp.zeros(fan_out)}
        return {
            "w": init_stddev * jax.random.normal(w_key, (fan_in, fan_out)),
            "b": init_stddev * jax.random.normal(b_key, (fan_out,)),
        }

    def init(key: jax.Array) -> list[dict[str, jax.Array]]:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            layer(k, fan_in, fan_out)
            for k, fan_in, fan_out in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    def apply(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        x = x.astype(params[0]["w"].dtype).ravel()
        for hidden in params[:-1]:
            x = jax.nn.relu(x @ hidden["w"] + hidden["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return from_example_functions(init, apply)


class _MlpBnDropout(nn.Module):
    num_classes: int
    hidden_sizes: Sequence[int]
    dropout_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(len(x), -1)
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
        for size in self.hidden_sizes:
            x = nn.Dense(size, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=DATA)(x)
            x = nn.relu(x)
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


def mlp_bn_dropout(
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden_sizes: Sequence[int] = (256, 256),
    dropout_rate: float = 0.2,
) -> Member:
    """A multilayer perceptron with BatchNorm, ReLU and dropout, in flax.linen.

    Args:
        input_shape: Of one example; it is flattened.
        num_classes: Logits per example.
        hidden_sizes: Units of each hidden layer.
        dropout_rate: Share of the hidden units that are dropped in training, in [0, 1).

    Returns:
        The member; its model state holds the running statistics.
    """
    return from_linen(_MlpBnDropout(num_classes, tuple(hidden_sizes), dropout_rate))
