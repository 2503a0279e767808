"""Sums over the examples of a batch whose parts lie on the columns of the mesh.

The compiler divides most sums over the columns by itself. It gathers the batch for a scatter, and
for a loop over the examples. Here such a sum is taken for each column's examples alone, and the
results are added.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

SCATTER_ADD = lax.scatter_add_p


def summed_by_columns(
    fn: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    axes: Sequence[int],
    columns: int,
) -> jax.Array:
    """Returns a sum over examples as the sum of its parts over the columns.

    Args:
        fn: Function of arrays of some examples that returns a sum over them.
        arrays: Arguments of `fn`.
        axes: Position of the examples in each array. Column c holds the c-th part of them. If
            their number does not divide over the columns, `fn` is called once.
        columns: Number of columns of the mesh.
    """
    if math.gcd(columns, *(a.shape[axis] for a, axis in zip(arrays, axes, strict=True))) < columns:
        return fn(*arrays)
    split = [
        a.reshape(*a.shape[:axis], columns, -1, *a.shape[axis + 1 :])
        for a, axis in zip(arrays, axes, strict=True)
    ]
    sums = jax.vmap(fn, in_axes=tuple(axes))(*split)
    return sums.sum(axis=0, dtype=sums.dtype)  # A sum of bytes would be of 32 bits.


def scatter_add_by_columns(
    columns: int,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    **params: object,
) -> jax.Array:
    """Adds the rows of a batch to an array at some positions, as the gradient of an embedding does.

    Args:
        columns: Number of columns of the mesh.
        operand: Array to which rows are added.
        indices: Positions of the rows, int[batch, ..., 1].
        updates: Rows.
        dimension_numbers: Meaning of the axes, as in `jax.lax.scatter_add`.
        **params: Other parameters of `jax.lax.scatter_add_p`.

    Returns:
        The result of the scatter, up to rounding. A scatter of another kind is left as it is.
    """
    numbers = dimension_numbers
    scattered = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
    is_of_rows = len(numbers.inserted_window_dims) == 1 and not numbers.operand_batching_dims

    def added(indices: jax.Array, updates: jax.Array, to: jax.Array) -> jax.Array:
        return SCATTER_ADD.bind(to, indices, updates, dimension_numbers=numbers, **params)

    if not (is_of_rows and scattered and indices.ndim > 1):
        return added(indices, updates, to=operand)
    rows = partial(added, to=jnp.zeros_like(operand))
    return operand + summed_by_columns(rows, (indices, updates), (0, scattered[0]), columns)
