"""Multilayer perceptrons."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.layout import DATA
from dist_ens.members import Member, from_example_functions, from_linen


def mlp(
    input_shape: tuple[int, ...],
    num_outputs: int,
    hidden_sizes: Sequence[int] = (128, 128),
    init: str = "he_normal",
    init_stddev: float | None = None,
) -> Member:
    """A multilayer perceptron with ReLU, in plain JAX.

    Args:
        input_shape: Of one example; it is flattened.
        num_outputs: Per example, such as a logit for each class.
        hidden_sizes: Units of each hidden layer.
        init: How weights and biases begin: `he_normal`, biases at 0; `fan_in_uniform`, both uniform
            in +-1/sqrt(in), as PyTorch's linear layers begin; `normal`, both of `init_stddev`.
        init_stddev: Standard deviation, of `normal` alone.

    Returns:
        The member. Its parameters are a list of `{"w": float32[in, out], "b": float32[out]}`.

    Raises:
        ValueError: For another `init`, one that does not go with `init_stddev`, or layers of no
            units.
    """
    if init not in ("he_normal", "fan_in_uniform", "normal"):
        raise ValueError(f"init is he_normal, fan_in_uniform or normal, not {init!r}")
    if (init == "normal") != (init_stddev is not None):
        raise ValueError(f"init_stddev goes with init='normal', not with {init!r}")
    sizes = [math.prod(input_shape), *_checked(hidden_sizes), num_outputs]

    def layer(key: jax.Array, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        w_key, b_key = jax.random.split(key)
        if init == "he_normal":
            he = math.sqrt(2 / fan_in) * jax.random.normal(w_key, (fan_in, fan_out))
            return {"w": he, "b": jnp.zeros(fan_out)}
        if init == "fan_in_uniform":
            draw: Callable[..., jax.Array] = partial(jax.random.uniform, minval=-1.0)
            scale = 1 / math.sqrt(fan_in)
        else:
            draw, scale = jax.random.normal, init_stddev or 0.0
        return {"w": scale * draw(w_key, (fan_in, fan_out)), "b": scale * draw(b_key, (fan_out,))}

    def init_layers(key: jax.Array) -> list[dict[str, jax.Array]]:
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

    return from_example_functions(init_layers, apply)


class _MlpBnDropout(nn.Module):
    num_outputs: int
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
            drops = train or self.has_rng("dropout")
            x = nn.Dropout(self.dropout_rate, deterministic=not drops)(x)
        return nn.Dense(self.num_outputs)(x)


def mlp_bn_dropout(
    input_shape: tuple[int, ...],
    num_outputs: int,
    hidden_sizes: Sequence[int] = (256, 256),
    dropout_rate: float = 0.2,
) -> Member:
    """A multilayer perceptron with BatchNorm, ReLU and dropout, in flax.linen.

    Args:
        input_shape: Of one example; it is flattened.
        num_outputs: Per example, such as a logit for each class.
        hidden_sizes: Units of each hidden layer.
        dropout_rate: Share of the hidden units that are dropped in training, in [0, 1).

    Returns:
        The member; its model state holds the running statistics.

    Raises:
        ValueError: For layers of no units, or a rate outside of [0, 1).
    """
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate lies in [0, 1), not {dropout_rate}")
    return from_linen(_MlpBnDropout(num_outputs, _checked(hidden_sizes), dropout_rate))


def _checked(hidden_sizes: Sequence[int]) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size > 0 for size in hidden_sizes):
        raise ValueError(f"hidden_sizes are whole numbers above 0, not {tuple(hidden_sizes)}")
    return tuple(hidden_sizes)
