"""Means over the global batch, for use inside a loss.

A loss is computed on one column's part of the batch, and the results are averaged over the columns.
A plain mean inside the loss is correct, because all parts have the same number of examples. A
weighted mean is correct only if the weights are summed over all columns first.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.typing import ArrayLike

from dist_ens.errors import UserError
from dist_ens.layout import data_sum
from dist_ens.types import PyTree, Tree


class Ratio(NamedTuple):
    """A (weighted) mean in two parts, which a loss may return as its value and in `aux`.

    Totals and weights of several batches can be summed before they are divided, so a set that does
    not fit in memory as one batch has the loss of the whole set. In training a ratio is
    `total / weight` over the global batch, and 0 where the weight is 0.

    Attributes:
        total: Sum of the weighted values; float[]. A term without examples, such as a penalty of
            the parameters, is added as `weight * term`.
        weight: Sum of the weights, not negative; float[].

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
    """Returns the mean over the global batch, the same number in every column of the mesh.

        psum(sum(weights * values)) / psum(sum(weights))

    where `psum` sums over the data axis. The gradient that `Ensemble` takes of it is that of the
    mean over the global batch; do not sum it again. Outside a lifted function this is the plain
    weighted mean. With microbatches the weights are summed over all of them first.

    Args:
        values: Values, such as the loss of each example, in any unit; float[batch, ...].
        weights: Weights, not negative: the shape of `values`, or [batch]. Default: all ones.
            Weights that are all zero give 0, and gradient 0.
        ratio: Whether to return the mean as a `Ratio`, for a loss that is evaluated on sets that do
            not fit in memory as one batch.

    Returns:
        The mean, in the unit of the values; float[]. It is computed at least in float32.

    Raises:
        UserError: If the weights have neither the shape of the values nor [batch], or are given
            inside a transformation of the loss such as `vmap` with several microbatches.

    >>> float(batch_mean(jnp.array([1.0, 2.0, 6.0]), weights=jnp.array([1, 1, 0])))
    1.5
    """
    values = _at_least_float32(values)
    if _SCOPES:
        _SCOPES[-1].uses_batch_mean = True
    counted = counted_as_drawn(values)
    if weights is None:
        total, weight = counted.sum(), jnp.asarray(values.size, values.dtype)
        return Ratio(total, weight) if ratio else data_sum(total) / data_sum(weight)
    weights = _as_wide_as(values, weights)
    parts = Ratio((weights * counted).sum(), weights.sum())
    return parts if ratio else _mean_of(parts)


def averaged(results: PyTree) -> PyTree:
    """Returns a pytree with the mean over the global batch in place of every `Ratio`.

    Args:
        results: Results of a loss in training, any pytree.
    """

    def is_ratio(part: object) -> bool:
        return isinstance(part, Ratio)

    return jax.tree.map(
        lambda part: _mean_of(part) if is_ratio(part) else part, results, is_leaf=is_ratio
    )


def _mean_of(ratio: Ratio) -> jax.Array:
    """Returns the mean over the global batch, and records its weight."""
    scope = _SCOPES[-1] if _SCOPES else _Scope()
    scope.uses_batch_mean = True
    is_inside = scope.place != get_opaque_trace_state()
    if is_inside and scope.is_of_part:
        raise UserError(
            "The loss calls batch_mean with weights inside a transformation such as vmap, scan or "
            "jit, so that the weights cannot be summed over microbatches. Call it outside, or set "
            "microbatches=1."
        )
    total, weight = (data_sum(_at_least_float32(part)) for part in ratio)
    scope.weights.append(weight)
    if scope.totals is not None:
        weight = scope.totals[len(scope.weights) - 1]
    if not is_inside:
        scope.all_zero.append(weight == 0)
    # Two `where` are needed so that neither the value nor its gradient divides by zero.
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def counted_as_drawn(values: jax.Array) -> jax.Array:
    """Returns the values of each example times its count in the bootstrap sample.

    Args:
        values: Values of the examples of one column's part of the batch, float[batch, ...].

    Returns:
        The weighted values, float[batch, ...]. Without a bootstrap they are the values themselves.
    """
    counts = _SCOPES[-1].counts if _SCOPES else None
    return values if counts is None else values * _as_wide_as(values, counts)


@dataclasses.dataclass
class _Scope:
    """The record of a loss while it is traced.

    Attributes:
        counts: Number of times each example counts, float[batch]. None: every example counts once.
        totals: Sums of the weights over all microbatches, divided by the number of microbatches,
            one for each call of `batch_mean` with weights. None if they are not known.
        is_of_part: Whether the loss is that of one of several microbatches.
        uses_batch_mean: Whether the loss called `batch_mean`.
        weights: Sums of the weights over the columns, one for each call with weights.
        all_zero: Whether the weights are all zero, one for each call with weights outside a
            transformation such as vmap or jit. Inside one, the result could not leave it.
        place: Transformations inside which the loss is traced.
    """

    counts: jax.Array | None = None
    totals: list[jax.Array] | None = None
    is_of_part: bool = False
    uses_batch_mean: bool = False
    weights: list[jax.Array] = dataclasses.field(default_factory=list)
    all_zero: list[jax.Array] = dataclasses.field(default_factory=list)
    place: object = dataclasses.field(default_factory=get_opaque_trace_state)


_SCOPES: list[_Scope] = []


@contextlib.contextmanager
def tracing_loss(
    totals: list[jax.Array] | None = None, *, is_of_part: bool = False
) -> Iterator[_Scope]:
    """Records how a loss that is traced inside a `with` block uses `batch_mean`.

    Args:
        totals: Sums of the weights over all microbatches; see `_Scope`.
        is_of_part: Whether the loss is that of one of several microbatches.

    Yields:
        The record.
    """
    scope = _Scope(totals=totals, is_of_part=is_of_part)
    _SCOPES.append(scope)
    try:
        yield scope
    finally:
        _SCOPES.pop()


@contextlib.contextmanager
def inside_transformation() -> Iterator[None]:
    """Allows `batch_mean` inside a transformation that the weights can leave, such as `grad`.

    The `with` block stands inside the function that is transformed, around the call of the loss.
    """
    scope = _SCOPES[-1] if _SCOPES else _Scope()
    before, scope.place = scope.place, get_opaque_trace_state()
    try:
        yield
    finally:
        scope.place = before


def traced_anew(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns a function whose jitted parts are traced again whenever it is traced.

    JAX caches the trace of a jitted function. A cached `batch_mean` could belong to another mesh or
    number of microbatches, and the call would not be recorded.

    Args:
        fn: Function of positional arguments. Arguments and results are pytrees of arrays.
    """
    # JAX caches a trace for each set of named axes, and no other trace has this axis name.
    return jax.vmap(fn, in_axes=None, out_axes=None, axis_size=1, axis_name=object())


@contextlib.contextmanager
def counting_examples(counts: jax.Array) -> Iterator[None]:
    """Makes the means inside a `with` block count each example several times.

    The mean is still divided by the number of examples, or by the sum of the weights.

    Args:
        counts: Number of times each example counts, float[batch].

    Raises:
        RuntimeError: If no loss is being traced.
    """
    if not _SCOPES:
        raise RuntimeError("counting_examples was called outside a loss that is being traced.")
    scope = _SCOPES[-1]
    before, scope.counts = scope.counts, counts
    try:
        yield
    finally:
        scope.counts = before


def _at_least_float32(values: ArrayLike) -> jax.Array:
    """Returns values in a type whose sums are right for more than a few hundred examples."""
    values = jnp.asarray(values)
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _as_wide_as(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns weights in the shape and type of the values."""
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
