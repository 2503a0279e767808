"""Lowerings `apart` and `patches` of convolutions, and what all their lowerings share."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from dist_ens.execution.lowerings.shapes import Param, slices
from dist_ens.execution.spec import Lowering, register
from dist_ens.layout import sum_over_columns

CONVOLUTION = lax.conv_general_dilated_p


def convolutions_apart(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Param
) -> jax.Array:
    """Computes a convolution unchanged. `vmap` keeps one convolution for each member."""

    def each(fn: Callable[..., jax.Array], args: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.stack([fn(a, b) for a, b in zip(*args, strict=True)])

    return member_by_member(lambda a, b: CONVOLUTION.bind(a, b, **params), each)(lhs, rhs)


register(Lowering("apart", CONVOLUTION, convolutions_apart))


def member_by_member(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    each: Callable[[Callable[..., jax.Array], tuple[jax.Array, jax.Array]], jax.Array],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `fn` as a function that `vmap` turns into `each(fn, (lhs, rhs))`."""
    batched = custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple[jax.Array, bool]:
        lhs, rhs = (
            a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip(args, in_batched, strict=True)
        )
        return each(batched, (lhs, rhs)), True

    return batched


def sums_over_examples(
    *, dimension_numbers: lax.ConvDimensionNumbers, feature_group_count: int, **_: object
) -> bool:
    """Returns whether a convolution sums over the first axis of both operands, the examples."""
    channels = dimension_numbers.lhs_spec[1], dimension_numbers.rhs_spec[1]
    return channels == (0, 0) and feature_group_count == 1


def canonical(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: lax.ConvDimensionNumbers, **_: object
) -> tuple[jax.Array, jax.Array]:
    """Returns the operands as [batch, *space, channels] and [*kernel, channels, features]."""
    n, c, *space = dimension_numbers.lhs_spec
    o, i, *kernel = dimension_numbers.rhs_spec
    return lhs.transpose(n, *space, c), rhs.transpose(*kernel, i, o)


def padded(
    lhs: jax.Array, *, padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int], **_: object
) -> jax.Array:
    """Returns an input [batch, *space, channels] with its dilation and padding applied."""
    pads = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *pads, (0, 0, 0)])


def from_canonical(out: jax.Array, out_spec: Sequence[int]) -> jax.Array:
    """Returns an output [batch, *space, features] with its axes in the order of `out_spec`."""
    last = out.ndim - 1
    places = dict(zip(out_spec, (0, last, *range(1, last)), strict=True))
    return out.transpose([places[axis] for axis in range(out.ndim)])


def num_groups(params: Mapping[str, Param]) -> int:
    """Returns the number of groups of channels, or of examples, in a convolution."""
    return max(params["feature_group_count"], params["batch_group_count"])


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
