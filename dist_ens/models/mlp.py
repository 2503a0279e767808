"""Multilayer perceptrons."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.ground.numbers import require_fraction, require_one_of, whole_number
from dist_ens.ground.types import Key
from dist_ens.members import Member, from_example_functions, from_linen


def mlp(
    input_shape: tuple[int, ...],
    num_outputs: int,
    hidden_sizes: Sequence[int] = (128, 128),
    init: str = "he_normal",
    init_stddev: float | None = None,
) -> Member:
    """Returns a multilayer perceptron with ReLU, in plain JAX.

    With h_0 the flattened example, hidden layer k and the output are

        h_k = relu(h_{k-1} w_k + b_k),   output = h_K w_{K+1} + b_{K+1}

    Args:
        input_shape: Shape of one example, which is flattened.
        num_outputs: Number of outputs for each example, such as one logit per class.
        hidden_sizes: Number of units of each hidden layer, each at least 1.
        init: Initialisation of the weights and biases.

            - `he_normal`: weights from a normal distribution with variance 2 / in, biases 0.
            - `fan_in_uniform`: both uniform in +-1/sqrt(in), as PyTorch's linear layers.
            - `normal`: both from a normal distribution with standard deviation `init_stddev`.
        init_stddev: Standard deviation for `init="normal"`. None for any other `init`.

    Returns:
        The member. Its parameters are a list of `{"w": float32[in, out], "b": float32[out]}`.

    >>> member = mlp((2, 2), 3, hidden_sizes=(5,))
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jnp.zeros((1, 2, 2)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # (4 + 1) * 5 + (5 + 1) * 3
    43

    Source: He et al. (2015), https://arxiv.org/abs/1502.01852, for `he_normal`.
    """
    require_one_of("init", init, ("he_normal", "fan_in_uniform", "normal"))
    if (init == "normal") != (init_stddev is not None):
        raise ValueError(f"init={init!r} with init_stddev={init_stddev}: give it for 'normal' only")
    sizes = [math.prod(input_shape), *_sizes(hidden_sizes), num_outputs]

    def layer(key: Key, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
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

    def init_layers(key: Key) -> list[dict[str, jax.Array]]:
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


def dropout(x: jax.Array, rate: jax.typing.ArrayLike, key: jax.Array) -> jax.Array:
    """Returns an array in which each number is 0 with probability `rate`, and else divided by
    `1 - rate`.

    The rate may be a setting of the member, `hyper["dropout_rate"]`. Layers such as
    `flax.linen.Dropout` look at their rate in Python, so that it must be the same for all members.

    Args:
        x: Numbers, float[...].
        rate: Probability in [0, 1), a number or float[].
        key: Key, such as `self.make_rng("dropout")` in flax.linen.

    >>> dropout(jnp.ones(4), 0.0, jax.random.key(0)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    keep = 1 - jnp.asarray(rate, x.dtype)
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)


class _MlpBnDropout(nn.Module):
    num_outputs: int
    hidden_sizes: Sequence[int]
    dropout_rate: float

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool, hyper: Mapping[str, jax.Array] | None = None
    ) -> jax.Array:
        x = x.reshape(len(x), -1)
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
        for size in self.hidden_sizes:
            x = nn.Dense(size, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            drops = train or self.has_rng("dropout")
            if hyper is None or "dropout_rate" not in hyper:
                x = nn.Dropout(self.dropout_rate, deterministic=not drops)(x)
            elif drops:
                x = dropout(x, hyper["dropout_rate"], self.make_rng("dropout"))
        return nn.Dense(self.num_outputs)(x)


def mlp_bn_dropout(
    input_shape: tuple[int, ...],
    num_outputs: int,
    hidden_sizes: Sequence[int] = (256, 256),
    dropout_rate: float = 0.2,
) -> Member:
    """Returns a multilayer perceptron with BatchNorm, ReLU and dropout, in flax.linen.

    With h_0 the flattened example, hidden layer k and the output are

        h_k = dropout(relu(bn(h_{k-1} w_k))),   output = h_K w_{K+1} + b_{K+1}

    Args:
        input_shape: Shape of one example, which is flattened.
        num_outputs: Number of outputs for each example, such as one logit per class.
        hidden_sizes: Number of units of each hidden layer, each at least 1.
        dropout_rate: Probability that a hidden unit is dropped in training, in [0, 1). A setting
            `hyper["dropout_rate"]` of the members takes its place.

    Returns:
        The member. Its model state holds the running statistics of BatchNorm, which are those of
        the global batch.

    >>> member = mlp_bn_dropout((2, 2), 3, hidden_sizes=(5,))
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jnp.zeros((1, 2, 2)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # 4 * 5 + 2 * 5 + (5 + 1) * 3
    48

    Source: Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167, and Srivastava et al.
    (2014), "Dropout: a simple way to prevent neural networks from overfitting".
    """
    require_fraction("dropout_rate", dropout_rate, "0.2 is usual.")
    return from_linen(_MlpBnDropout(num_outputs, _sizes(hidden_sizes), dropout_rate))


def _sizes(hidden_sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(whole_number("A size in hidden_sizes", size, least=1) for size in hidden_sizes)
