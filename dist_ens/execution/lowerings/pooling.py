"""Lowering `masks`: the gradient of max-pooling by comparison, without a scatter."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from dist_ens.execution.lowerings.shapes import slices
from dist_ens.execution.spec import Lowering, register

MAX_POOL_GRADIENT = lax.select_and_scatter_add_p


def max_pool_gradient_as_masks(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    columns: int = 1,
) -> jax.Array:
    """Computes the gradient of max-pooling, or min-pooling, by comparing the values of a window.

    `source` is the gradient of the pooled values, one per window, and `operand` was pooled. The
    gradient goes to the largest (smallest) value of each window, in a tie to the first in row-major
    order, and in a window with NaN to the same value as in XLA.
    """
    offsets = list(itertools.product(*map(range, window_dimensions)))
    # JAX pads with this value. Where the padding is selected, the gradient is dropped.
    last = -jnp.inf if select_prim is lax.ge_p else jnp.inf
    padded = lax.pad(operand, jnp.asarray(last, operand.dtype), [(a, b, 0) for a, b in padding])
    ones = (1,) * operand.ndim
    best, *others = slices(
        padded, window_dimensions, ones, source.shape, window_strides, first_axis=0
    )
    chosen = jnp.zeros(source.shape, jnp.int32)
    for k, candidate in enumerate(others, start=1):
        keeps = select_prim.bind(best, candidate)
        best, chosen = jnp.where(keeps, best, candidate), jnp.where(keeps, chosen, k)
    if tuple(window_dimensions) == tuple(window_strides):
        spread = _spread_apart(source, chosen, window_dimensions)
    else:
        spread = _spread_overlapping(source, chosen, offsets, window_strides, padded.shape)
    # The windows may cover less than the padded operand, or more than the operand.
    crop = [
        (-low, size + low - covered, 0)
        for (low, _), size, covered in zip(padding, operand.shape, spread.shape, strict=True)
    ]
    return lax.pad(spread, jnp.zeros((), spread.dtype), crop)


register(Lowering("masks", MAX_POOL_GRADIENT, max_pool_gradient_as_masks))


def _spread_apart(source: jax.Array, chosen: jax.Array, window: Sequence[int]) -> jax.Array:
    """Puts each value at the chosen position of its window; for windows without gaps or overlap."""
    shape = [n for pair in zip(source.shape, window, strict=True) for n in pair]
    position = jnp.zeros((), jnp.int32)
    for axis, size in enumerate(window):
        position = position * size + lax.broadcasted_iota(jnp.int32, shape, 2 * axis + 1)
    of_windows = tuple(range(0, 2 * source.ndim, 2))
    here = lax.broadcast_in_dim(chosen, shape, of_windows) == position
    spread = jnp.where(here, lax.broadcast_in_dim(source, shape, of_windows), 0)
    return spread.reshape([n * size for n, size in zip(source.shape, window, strict=True)])


def _spread_overlapping(
    source: jax.Array,
    chosen: jax.Array,
    offsets: Sequence[Sequence[int]],
    strides: Sequence[int],
    shape: Sequence[int],
) -> jax.Array:
    """Puts each value at the chosen position of its window, and adds where windows overlap."""
    zero = jnp.zeros((), source.dtype)
    total = jnp.zeros(shape, source.dtype)
    for k, offset in enumerate(offsets):
        spread = [
            (o, size - o - ((n - 1) * stride + 1), stride - 1)
            for o, size, n, stride in zip(offset, shape, source.shape, strides, strict=True)
        ]
        total += lax.pad(jnp.where(chosen == k, source, zero), zero, spread)
    return total
