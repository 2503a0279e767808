"""Products of matrices that fill a CPU's vectors, and gradients of weights with the grain."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dist_ens.execution.lowerings.vectors import VECTOR, is_float32

PRODUCT = lax.dot_general_p

# Sides too short for a kernel that multiplies matrices.
_SHORT = range(2, 5)


def product_in_whole_vectors(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A product of two matrices in a form that fills a CPU's vectors.

    Of 2 to 4 terms it is a sum of outer products; the gradient of weights with 2 to 4 rows, or
    columns, is so many weighted sums. Of other products the columns are padded to whole vectors,
    for XLA computes those beyond the last whole one number by number; a gradient of weights, whose
    sides may as well change places, has the more of them. Products of fewer columns stay as they
    are, and so does what is not float32.

    Args:
        lhs: As `jax.lax.dot_general` has it.
        rhs: Likewise.
        **params: Of `dot_general_p`.

    Returns:
        What the product returns, to rounding.
    """
    if not _multiplies_matrices(lhs, rhs, **params):
        return PRODUCT.bind(lhs, rhs, **params)
    ((i,), (j,)), _ = params["dimension_numbers"]
    height, terms, width = _sizes(lhs, rhs, **params)
    if terms in _SHORT:
        columns, rows = lhs if i == 1 else lhs.T, rhs if j == 0 else rhs.T
        outer_products = (columns[:, k, None] * rows[None, k] for k in range(terms))
        return functools.reduce(jnp.add, outer_products)
    of_weights = i == j == 0
    if of_weights and width < min(height, VECTOR):
        return product_in_whole_vectors(rhs, lhs, **params).T
    if of_weights and height in _SHORT:
        return (lhs.T[:, :, None] * rhs[None]).sum(1)
    if width < VECTOR:
        return PRODUCT.bind(lhs, rhs, **params)
    missing = [(0, 0), (0, 0)]
    missing[1 - j] = (0, -width % VECTOR)
    return PRODUCT.bind(lhs, jnp.pad(rhs, missing), **params)[:, :width]


def flat_gradient_of_weights(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A gradient of weights as the product of two matrices, `[terms, height]` and `[terms, width]`.

    The sum is over all axes in front (examples, positions). Left to itself XLA:CPU works what made
    the factors into the product, and the product into what is made of it, so that both are taken
    against the grain: a third of the speed. Here they are matrices that lie in memory, row by row,
    and the narrower stands first, which is up to twice as fast. Of fewer terms than the result has
    rows or columns, moving them costs more: such products stay as they are, and so does what is not
    float32.

    Args, Returns: As `product_in_whole_vectors`; the arrays may have more than two axes.
    """
    if not becomes_flat(lhs, rhs, **params):
        return PRODUCT.bind(lhs, rhs, **params)
    num_axes = len(params["dimension_numbers"][0][0])
    of_result = lhs.shape[num_axes:] + rhs.shape[num_axes:]
    terms = math.prod(lhs.shape[:num_axes])
    factors = lax.optimization_barrier((lhs.reshape(terms, -1), rhs.reshape(terms, -1)))
    wide = factors[0].shape[1] > factors[1].shape[1]
    over_terms = {**params, "dimension_numbers": (((0,), (0,)), ((), ())), "out_sharding": None}
    product = PRODUCT.bind(*(reversed(factors) if wide else factors), **over_terms)
    product = lax.optimization_barrier(product)
    return (product.T if wide else product).reshape(of_result)


def becomes_flat(lhs: Any, rhs: Any, **params: Any) -> bool:
    """Whether `flat_gradient_of_weights` makes another product of one; shapes will do."""
    (i, j), batched = params["dimension_numbers"]
    in_front = tuple(range(len(i)))
    if batched[0] or not in_front == tuple(i) == tuple(j) or not is_float32(lhs, rhs, **params):
        return False
    # The factors may change places, which what is said of each or of the result would not.
    sharding = params["out_sharding"]
    if len({*(params["precision"] or ())}) > 1 or (sharding and any(sharding.spec)):
        return False
    terms = math.prod(lhs.shape[: len(i)])
    return all(VECTOR <= math.prod(a.shape[len(i) :]) < terms for a in (lhs, rhs))


def becomes_sums(lhs: Any, rhs: Any, **params: Any) -> bool:
    """Whether `product_in_whole_vectors` makes sums of vectors of a product; shapes will do."""
    if not _multiplies_matrices(lhs, rhs, **params):
        return False
    ((i,), (j,)), _ = params["dimension_numbers"]
    height, terms, width = _sizes(lhs, rhs, **params)
    return terms in _SHORT or (i == j == 0 and (height in _SHORT or width in _SHORT))


def _multiplies_matrices(lhs: Any, rhs: Any, **params: Any) -> bool:
    """Whether both are matrices of float32, and neither is a vector."""
    contracted, batched = params["dimension_numbers"]
    return (
        lhs.ndim == rhs.ndim == 2
        and len(contracted[0]) == 1
        and not batched[0]
        and 1 not in (*lhs.shape, *rhs.shape)
        and is_float32(lhs, rhs, **params)
    )


def _sizes(lhs: Any, rhs: Any, *, dimension_numbers: Any, **_: Any) -> tuple[int, int, int]:
    """Rows of a product of two matrices, the terms of each of its sums, and its columns."""
    ((i,), (j,)), _ = dimension_numbers
    return lhs.shape[1 - i], lhs.shape[i], rhs.shape[1 - j]
