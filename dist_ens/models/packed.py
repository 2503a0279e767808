"""Packed ensembles: narrower networks of several heads in one member."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Inputs, Key, ModelState, Outputs, Params
from dist_ens.members import Member


def packed(
    input_shape: tuple[int, ...],
    num_outputs: int,
    hidden_sizes: Sequence[int] = (128, 128),
    *,
    heads: int = 4,
    alpha: float = 2.0,
    gamma: int = 1,
) -> Member:
    """Returns a packed multilayer perceptron with ReLU: heads that are narrower networks.

    Each head has `int(alpha * n) / heads` of a layer's n units. With `alpha = sqrt(heads)` all
    heads have about the parameters of one network. A hidden layer after the first one is divided
    into `gamma` groups of units, which do not see each other.

    Args:
        input_shape: Shape of one example, which is flattened.
        num_outputs: Number of outputs of each head.
        hidden_sizes: Number of units of each hidden layer of one network, at least one.
        heads: Number of heads.
        alpha: Width of all heads together, relative to one network.
        gamma: Number of groups in a hidden layer of a head.

    Returns:
        The member. Its parameters are a list of `{"w": float32[heads, groups, in, out],
        "b": float32[heads, groups * out]}`. Both begin uniform in +-1/sqrt(in).

    Raises:
        UserError: If the units do not divide into heads and groups.

    >>> member = packed((4,), 3, hidden_sizes=(8, 8), heads=4, alpha=2)
    >>> params, _ = member.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> [layer["w"].shape for layer in params]  # 2 * 8 / 4 = 4 units in each head
    [(4, 1, 4, 4), (4, 1, 4, 4), (4, 1, 4, 3)]

    Source: Laurent et al. (2023), https://arxiv.org/abs/2210.09184.
    """
    heads, gamma = whole_number("heads", heads, least=1), whole_number("gamma", gamma, least=1)
    widths = []
    for size in hidden_sizes:
        units = int(alpha * size)
        if units < 1 or units % (heads * gamma):
            raise UserError(
                f"A layer of {size} units has {units} of them with alpha={alpha:g}, which do not "
                f"divide into {heads} heads with gamma={gamma}. Use a multiple of "
                f"{heads * gamma}."
            )
        widths.append(units // heads)
    if not widths:
        raise UserError("hidden_sizes is empty. Give at least one hidden layer.")
    sizes = [math.prod(input_shape), *widths, num_outputs]
    groups = [1, *(gamma for _ in widths[1:]), 1]

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        layers = []
        for number, count in enumerate(groups):
            fan_in, fan_out = sizes[number] // count, sizes[number + 1] // count
            w_key, b_key = jax.random.split(jax.random.fold_in(key, number))
            scale = 1 / math.sqrt(fan_in)
            w_shape, b_shape = (heads, count, fan_in, fan_out), (heads, count * fan_out)
            layers.append(
                {
                    "w": scale * jax.random.uniform(w_key, w_shape, minval=-1),
                    "b": scale * jax.random.uniform(b_key, b_shape, minval=-1),
                }
            )
        return layers, ()

    def apply(
        params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
    ) -> tuple[Outputs, ModelState]:
        x = inputs.reshape(len(inputs), -1).astype(params[0]["w"].dtype)
        x = jnp.broadcast_to(x, (heads, *x.shape))
        for number, layer in enumerate(params):
            count = layer["w"].shape[1]
            parts = x.reshape(*x.shape[:2], count, -1)
            x = jnp.einsum("hbgi,hgio->hbgo", parts, layer["w"]).reshape(*x.shape[:2], -1)
            x = x + layer["b"][:, None]
            x = jax.nn.relu(x) if number < len(params) - 1 else x
        return x, model_state

    return Member(init, apply, name="packed", heads=heads)
