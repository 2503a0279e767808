"""Lowerings that every step on several columns of the mesh has, where the compiler does badly.

- It does not divide some sums over the examples, or sends more than their results.
- JAX refuses calls of Python functions, such as `jax.pure_callback`, where the compiler divides the
  work. Every column makes the call, with whole arrays.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from dist_ens.execution.lowerings.products import PRODUCT
from dist_ens.layout import sum_over_columns
from dist_ens.layout.collectives import on_every_column

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
    """Adds the rows of a batch at some positions, as the gradient of an embedding does."""
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


def product_of_swapped_factors(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: object,
    **params: object,
) -> jax.Array:
    """Computes a gradient of weights as the transpose of the product of its swapped factors.

    JAX multiplies the gradient of the outputs with the inputs, and transposes the product. On
    several columns, the compiler would sum the product before it is transposed, and copy it.
    Swapped, the two transpositions cancel. A sum over more axes than the batch, as over the
    positions of a sequence, takes 15 % longer if it is swapped (a transformer on two CPU devices).
    """
    (i, j), (batched, _) = dimension_numbers
    params["precision"] = precision
    differ = isinstance(precision, tuple) and precision[0] != precision[1]
    if batched or not i == j == (0,) or differ:  # The precisions would not be swapped.
        return PRODUCT.bind(lhs, rhs, dimension_numbers=dimension_numbers, **params)
    params["out_sharding"] = None
    product = PRODUCT.bind(rhs, lhs, dimension_numbers=((j, i), ((), ())), **params)
    num_of_rhs = rhs.ndim - len(j)
    return product.transpose(*range(num_of_rhs, product.ndim), *range(num_of_rhs))


@functools.cache
def pure_callback() -> Primitive:
    """Returns the primitive of `jax.pure_callback`, which JAX does not export."""
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.make_jaxpr(lambda: jax.pure_callback(float, result))().eqns[0].primitive


def call_on_every_column(*arrays: jax.Array, **params: object) -> list[jax.Array]:
    """Calls a Python function without side effects on every column of a row."""

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return pure_callback().bind(*arrays, **params)

    return on_every_column(call)(*arrays)
