"""Lowerings `aligned` and `flat`: matrix products in forms that a CPU runs faster."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from dist_ens.execution.lowerings.shapes import VECTOR, Param, is_float32
from dist_ens.execution.spec import Lowering, register
from dist_ens.ground.types import Leaf
from dist_ens.layout import sum_over_columns

PRODUCT = lax.dot_general_p

# These sides are too short for a kernel that multiplies matrices.
_SHORT = range(2, 5)


def product_in_whole_vectors(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Param
) -> jax.Array:
    """Computes a product of two matrices in a form that fills a CPU's vectors.

    - A product whose sums have 2 to 4 terms is computed as a sum of outer products.
    - A gradient of weights with 2 to 4 rows or columns is computed as one weighted sum for each.
    - In other products, the columns are padded to a multiple of the vector's length. XLA would
      compute the columns beyond the last whole vector one number at a time. A gradient of weights
      with few columns and more rows is transposed first.
    - Products with fewer columns than a vector has numbers, and products of other types than
      float32, are unchanged.
    """
    if not _multiplies_matrices(lhs, rhs, **params):
        return PRODUCT.bind(lhs, rhs, **params)
    ((i,), (j,)), _ = params["dimension_numbers"]
    of_weights = i == j == 0
    if of_weights and columns > 1:
        # The compiler would also sum the padding over the columns.
        of_column = functools.partial(product_in_whole_vectors, **params | {"out_sharding": None})
        return sum_over_columns(of_column, columns, lhs, rhs)
    height, terms, width = _sizes(lhs, rhs, **params)
    if terms in _SHORT:
        left, right = lhs if i == 1 else lhs.T, rhs if j == 0 else rhs.T
        outer_products = (left[:, k, None] * right[None, k] for k in range(terms))
        return functools.reduce(jnp.add, outer_products)
    if of_weights and width < min(height, VECTOR):
        return product_in_whole_vectors(rhs, lhs, **params).T
    if of_weights and height in _SHORT:
        return (lhs.T[:, :, None] * rhs[None]).sum(1)
    if width < VECTOR:
        return PRODUCT.bind(lhs, rhs, **params)
    missing = [(0, 0), (0, 0)]
    missing[1 - j] = (0, -width % VECTOR)
    return PRODUCT.bind(lhs, jnp.pad(rhs, missing), **params)[:, :width]


def flat_gradient_of_weights(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Param
) -> jax.Array:
    """Computes a gradient of weights as a product of matrices, [terms, height] and [terms, width].

    The sums are over all leading axes (examples, positions). XLA's CPU backend would fuse the
    product with its neighbours, and read the factors against their order in memory, at a third of
    the speed. Here the factors are matrices in memory, the narrower first, which is up to twice as
    fast. With fewer terms than rows or columns, the copies would cost more, and the product is
    unchanged.
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


def becomes_flat(lhs: Leaf, rhs: Leaf, **params: Param) -> bool:
    """Returns whether `flat_gradient_of_weights` changes a product, from the factors' shapes."""
    (i, j), batched = params["dimension_numbers"]
    in_front = tuple(range(len(i)))
    if batched[0] or not in_front == tuple(i) == tuple(j) or not is_float32(lhs, rhs, **params):
        return False
    # The factors may be swapped, but a precision of each factor and a sharding of the result would
    # not be.
    sharding = params["out_sharding"]
    if len({*(params["precision"] or ())}) > 1 or (sharding and any(sharding.spec)):
        return False
    terms = math.prod(lhs.shape[: len(i)])
    return all(VECTOR <= math.prod(a.shape[len(i) :]) < terms for a in (lhs, rhs))


def becomes_sums(lhs: Leaf, rhs: Leaf, **params: Param) -> bool:
    """Returns whether `product_in_whole_vectors` computes a product as sums of vectors."""
    if not _multiplies_matrices(lhs, rhs, **params):
        return False
    ((i,), (j,)), _ = params["dimension_numbers"]
    height, terms, width = _sizes(lhs, rhs, **params)
    return terms in _SHORT or (i == j == 0 and (height in _SHORT or width in _SHORT))


register(Lowering("aligned", PRODUCT, product_in_whole_vectors))
register(Lowering("flat", PRODUCT, flat_gradient_of_weights))


def _multiplies_matrices(lhs: Leaf, rhs: Leaf, **params: Param) -> bool:
    """Returns whether both factors are float32 matrices, and no side has length 1."""
    contracted, batched = params["dimension_numbers"]
    return (
        lhs.ndim == rhs.ndim == 2
        and len(contracted[0]) == 1
        and not batched[0]
        and 1 not in (*lhs.shape, *rhs.shape)
        and is_float32(lhs, rhs, **params)
    )


def _sizes(
    lhs: Leaf, rhs: Leaf, *, dimension_numbers: jax.lax.DotDimensionNumbers, **others: object
) -> tuple[int, int, int]:
    ((i,), (j,)), _ = dimension_numbers
    return lhs.shape[1 - i], lhs.shape[i], rhs.shape[1 - j]
