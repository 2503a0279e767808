"""Lowering `patches`: convolutions as patches and one matrix product."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from dist_ens.execution.lowerings.convolutions import (
    CONVOLUTION,
    canonical,
    from_canonical,
    num_groups,
    padded,
    sums_over_examples,
)
from dist_ens.execution.lowerings.shapes import Param, slices
from dist_ens.execution.spec import Lowering, register
from dist_ens.layout import sum_over_columns


def convolution_as_patches(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Param
) -> jax.Array:
    """Computes a convolution as one matrix product with patches of its input.

    The patches are made of one slice of the input for each position of the kernel, or of the output
    if that has fewer, as in the gradient of the weights.
    """
    if columns > 1 and sums_over_examples(**params):
        # The compiler would gather the examples, to put them beside the positions of the kernel.
        of_column = functools.partial(convolution_as_patches, **params)
        return sum_over_columns(of_column, columns, lhs, rhs)
    lhs, rhs = canonical(lhs, rhs, **params)
    groups, out_spec = num_groups(params), params["dimension_numbers"].out_spec
    rank = lhs.ndim - 2
    lhs = padded(lhs, **params)
    # The groups come first: [groups, batch, *space, channels] and
    # [groups, *kernel, channels, features].
    if params["batch_group_count"] > 1:
        lhs = lhs.reshape(groups, -1, *lhs.shape[1:])
    else:
        lhs = jnp.moveaxis(lhs.reshape(*lhs.shape[:-1], groups, -1), -2, 0)
    rhs = jnp.moveaxis(rhs.reshape(*rhs.shape[:-1], groups, -1), -2, 0)
    kernel, channels, features = rhs.shape[1 : rank + 1], rhs.shape[-2], rhs.shape[-1]
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    space = tuple(
        max(0, (size - (k - 1) * d - 1) // s + 1)
        for size, k, d, s in zip(lhs.shape[2:-1], kernel, dilations, strides, strict=True)
    )
    batch = lhs.shape[1]
    if math.prod(kernel) <= math.prod(space):
        seen = slices(lhs, kernel, dilations, space, strides)  # [groups, batch, *space, channels]
        patches = jnp.stack(seen, axis=-2)
    else:
        # The product sums over channels and positions. Here the channels are the examples of the
        # batch. They come before the positions, so that the positions of an example are adjacent.
        lhs, rhs = jnp.moveaxis(lhs, -1, 2), jnp.moveaxis(rhs, -2, 1)
        seen = slices(
            lhs, space, strides, kernel, dilations, first_axis=3
        )  # [groups, batch, channels, *kernel]
        patches = jnp.stack(seen, axis=2)
    out = lax.dot_general(
        patches.reshape(groups, batch * math.prod(space), -1),
        rhs.reshape(groups, channels * math.prod(kernel), features),
        (((2,), (1,)), ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    out = jnp.moveaxis(out.reshape(groups, batch, *space, features), 0, -2)
    return from_canonical(out.reshape(batch, *space, groups * features), out_spec)


register(Lowering("patches", CONVOLUTION, convolution_as_patches))
