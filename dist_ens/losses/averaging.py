"""Weighted means over a batch, for use inside a loss."""

from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import PyTree


class Ratio(NamedTuple):
    """A (weighted) mean in two parts, which a loss may return as its value and in `aux`.

    Totals and weights of several batches can be summed before they are divided. So a set that does
    not fit in memory as one batch has the loss of the whole set, and a batch that is taken in
    microbatches has the loss of the whole batch. The mean is `total / weight`, and 0 where the
    weight is 0.

    Attributes:
        total: Sum of the weighted values; float[]. A term without examples, such as a penalty of
            the parameters, is added as `weight * term`.
        weight: Sum of the weights, not negative; float[]. With microbatches, no gradient passes
            through it.

    >>> Ratio(total=jnp.float32(3.0), weight=jnp.float32(2.0)).weight
    Array(2., dtype=float32)
    """

    total: jax.Array
    weight: jax.Array


@overload
def batch_mean(
    values: jax.Array, weights: jax.Array | None = None, *, ratio: Literal[False] = False
) -> jax.Array: ...
@overload
def batch_mean(
    values: jax.Array, weights: jax.Array | None = None, *, ratio: Literal[True]
) -> Ratio: ...
def batch_mean(
    values: jax.Array, weights: jax.Array | None = None, *, ratio: bool = False
) -> jax.Array | Ratio:
    """Returns the weighted mean over a batch.

        sum(weights * values) / sum(weights)

    Args:
        values: Values, such as the loss of each example, in any unit; float[batch, ...].
        weights: Weights, not negative: the shape of `values`, or [batch]. Default: all ones.
            Weights that are all zero give 0, and gradient 0.
        ratio: Whether to return the mean as a `Ratio`, for microbatches, and for sets that do not
            fit in memory as one batch.

    Returns:
        The mean, in the unit of the values; float[]. It is computed at least in float32.

    Raises:
        UserError: If the weights have neither the shape of the values nor [batch].

    >>> float(batch_mean(jnp.array([1.0, 2.0, 6.0]), weights=jnp.array([1, 1, 0])))
    1.5
    """
    values = _at_least_float32(values)
    if weights is None:
        parts = Ratio(values.sum(), jnp.asarray(values.size, values.dtype))
    else:
        weights = _as_wide_as(values, weights)
        parts = Ratio((weights * values).sum(), weights.sum())
    return parts if ratio else averaged(parts)


def averaged(results: PyTree) -> PyTree:
    """Returns a pytree, such as the results of a loss, with the mean in place of every `Ratio`."""

    def mean(part: PyTree) -> PyTree:
        if not isinstance(part, Ratio):
            return part
        total, weight = map(_at_least_float32, part)
        # Two `where` are needed so that neither the value nor its gradient divides by zero.
        return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))

    return jax.tree.map(mean, results, is_leaf=lambda part: isinstance(part, Ratio))


def _at_least_float32(values: ArrayLike) -> jax.Array:
    """Returns values in a type whose sums are right for more than a few hundred examples."""
    values = jnp.asarray(values)
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _as_wide_as(values: jax.Array, weights: jax.Array) -> jax.Array:
    weights = jnp.asarray(weights)
    shapes = dict.fromkeys([values.shape, values.shape[:1]])
    if weights.shape not in shapes:
        raise UserError(
            f"weights have the shape {list(weights.shape)}, and values {list(values.shape)}. Give "
            f"weights of shape {' or '.join(str(list(shape)) for shape in shapes)}."
        )
    missing = (1,) * (values.ndim - weights.ndim)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *missing), values.shape).astype(
        values.dtype
    )
