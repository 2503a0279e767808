"""Convolutions: what their lowerings share, and the lowering that keeps them apart."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from dist_ens.execution.lowerings.shapes import Param
from dist_ens.execution.spec import Lowering, register

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
