"""Lowering of scatters: a sum of scattered rows is taken for each column's examples alone."""

import jax
import jax.numpy as jnp
from jax import lax

from dist_ens.layout import sum_over_columns

SCATTER_ADD = lax.scatter_add_p


def scatter_add_by_columns(
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    columns: int,
    dimension_numbers: lax.ScatterDimensionNumbers,
    **params: object,
) -> jax.Array:
    """Adds the rows of a batch to an array at some positions, as the gradient of an embedding does.

    Args:
        operand: Array to which rows are added.
        indices: Positions of the rows, int[batch, ..., 1].
        updates: Rows, [batch, ...].
        columns: Number of columns of the mesh, over which the batch is divided.
        dimension_numbers: Meaning of the axes, as in `jax.lax.scatter_add`.
        **params: Other parameters of `jax.lax.scatter_add_p`.

    Returns:
        The result of the scatter, up to rounding. A scatter of another kind is left as it is.
    """
    numbers = dimension_numbers

    def added(to: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        return SCATTER_ADD.bind(to, indices, updates, dimension_numbers=numbers, **params)

    def rows(indices: jax.Array, updates: jax.Array) -> jax.Array:
        return added(jnp.zeros(operand.shape, operand.dtype), indices, updates)

    # With several inserted axes, or with examples inside a row, the operand may hold the examples.
    is_of_rows = len(numbers.inserted_window_dims) == 1 and not numbers.operand_batching_dims
    if indices.ndim == 1 or 0 in numbers.update_window_dims or not is_of_rows:
        return added(operand, indices, updates)
    return operand + sum_over_columns(rows, columns, indices, updates)
