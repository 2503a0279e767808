"""Other forms of slow operations, with the same values. Which of them wins is measured, not known.

Each is a rule for `rewrite.rewritten`. Under `vmap` a convolution of many members becomes a
grouped one, for which XLA has no fast program on a CPU (nor often elsewhere); and inside a `while`
XLA's CPU backend is fast only where the layout of a convolution is canonical. A small network's
matrix products have sides that are no whole number of vectors, or too short for any kernel; and the
gradients of weights are slow where they are sums of many terms.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

CONVOLUTION = lax.conv_general_dilated_p
MAX_POOL_GRADIENT = lax.select_and_scatter_add_p
PRODUCT = lax.dot_general_p

# Numbers in a CPU's widest vectors, and sides too short for a kernel that multiplies matrices.
_VECTOR = 16
_SHORT = range(2, 5)
# Features that a convolution of one feature is given: of more it would multiply zeros for longer
# than it saves. And examples whose patches stay in a core's cache, taken together.
_MOST_NEIGHBOURS = 8
_EXAMPLES_AT_A_TIME = 2


def convolution_as_patches(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution as patches of its input and one matrix product.

    Where the kernel has fewer positions than the output, the patches are those under the kernel;
    else, as in the gradient of the weights, those under each position of the output.

    Args:
        lhs: Input, as `jax.lax.conv_general_dilated` has it.
        rhs: Kernel.
        **params: Of `conv_general_dilated_p`: strides, padding, dilations, groups.

    Returns:
        What the convolution returns.
    """
    lhs, rhs, groups_of_batch = _canonical(lhs, rhs, **params)
    groups, out_spec = _num_groups(params), params["dimension_numbers"].out_spec
    rank = lhs.ndim - 2
    lhs = _padded(lhs, **params)
    # Groups in front: [groups, batch, *space, channels] and [groups, *kernel, channels, features].
    if groups_of_batch:
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
        slices = _slices(
            lhs, kernel, dilations, space, strides
        )  # [groups, batch, *space, channels]
        patches = jnp.stack(slices, axis=-2).reshape(groups, batch * math.prod(space), -1)
        out = _product(patches, rhs.reshape(groups, -1, features), params)
        out = out.reshape(groups, batch, *space, features)
    else:
        # The channels, which are summed over as positions are, stand in front of them: there they
        # are examples, and their positions lie side by side.
        lhs, rhs = jnp.moveaxis(lhs, -1, 2), jnp.moveaxis(rhs, -2, 1)
        slices = _slices(
            lhs, space, strides, kernel, dilations, first_axis=3
        )  # [groups, batch, channels, *kernel]
        patches = jnp.stack(slices, axis=2).reshape(groups, batch * math.prod(space), -1)
        out = _product(patches, rhs.reshape(groups, channels * math.prod(kernel), features), params)
        out = out.reshape(groups, batch, *space, features)
    out = jnp.moveaxis(out, 0, -2).reshape(batch, *space, groups * features)
    return _from_canonical(out, out_spec)


def convolution_in_canonical_layout(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution in the layout NHWC x HWIO; those of many members one after another.

    The gradient of a convolution's kernel is one too, whose channels are the examples and whose
    kernel is as large as an image. XLA's program for it waits for memory, whatever its layout: it
    becomes patches, of two examples at a time, which stay in a core's cache. XLA's faster program
    for the others takes those of more than 16 channels or features: one of fewer becomes one that
    has several neighbours of its output for features. An infinity then makes NaN of neighbours too.

    Args, Returns: As `convolution_as_patches`.
    """

    def one(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        out = jax.eval_shape(lambda a, b: CONVOLUTION.bind(a, b, **params), lhs, rhs)
        if lhs.ndim == 2 or 0 in (*lhs.shape, *rhs.shape, *out.shape):
            return CONVOLUTION.bind(lhs, rhs, **params)
        if _is_gradient_of_kernel(rhs.shape, out.shape, params):
            return _by_examples(lhs, rhs, out, **params)
        lhs, rhs, _ = _canonical(lhs, rhs, **params)
        few = rhs.shape[-2] <= _VECTOR and rhs.shape[-1] < 4 * _VECTOR
        is_plain = _num_groups(params) == 1 and _is_float32(lhs, rhs, **params)
        convolved = _of_few_channels if few and is_plain else _in_place
        out_spec = params["dimension_numbers"].out_spec
        return _from_canonical(convolved(lhs, rhs, **params), out_spec)

    return _member_by_member(one, lambda fn, args: lax.map(lambda pair: fn(*pair), args))(lhs, rhs)


def convolutions_apart(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution as it is; those of many members stay so many, none grouped.

    Args, Returns: As `convolution_as_patches`.
    """

    def each(fn: Callable[..., jax.Array], args: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.stack([fn(a, b) for a, b in zip(*args, strict=True)])

    return _member_by_member(lambda a, b: CONVOLUTION.bind(a, b, **params), each)(lhs, rhs)


def max_pool_gradient_as_masks(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """The gradient of max- (or min-) pooling: to each window's first extremum, found by comparing.

    A tie goes to the first in row-major order, and of a window that holds NaN the same element is
    taken as XLA takes.

    Args:
        source: Gradient of the pooled values, one per window.
        operand: What was pooled.
        select_prim: `ge` for the largest, `le` for the smallest.
        window_dimensions: Size of a window along each axis.
        window_strides: From window to window.
        padding: Before and after each axis.

    Returns:
        The gradient of the operand.
    """
    offsets = list(itertools.product(*map(range, window_dimensions)))
    # What JAX pads with: it is a candidate like others, and a gradient that it wins is lost.
    last = -jnp.inf if select_prim is lax.ge_p else jnp.inf
    padded = lax.pad(operand, jnp.asarray(last, operand.dtype), [(a, b, 0) for a, b in padding])
    ones = (1,) * operand.ndim
    best, *others = _slices(
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
    # Windows may cover less than the padded operand, or more than the operand.
    crop = [
        (-low, size + low - covered, 0)
        for (low, _), size, covered in zip(padding, operand.shape, spread.shape, strict=True)
    ]
    return lax.pad(spread, jnp.zeros((), spread.dtype), crop)


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
    if of_weights and width < min(height, _VECTOR):
        return product_in_whole_vectors(rhs, lhs, **params).T
    if of_weights and height in _SHORT:
        return (lhs.T[:, :, None] * rhs[None]).sum(1)
    if width < _VECTOR:
        return PRODUCT.bind(lhs, rhs, **params)
    missing = [(0, 0), (0, 0)]
    missing[1 - j] = (0, -width % _VECTOR)
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
    if batched[0] or not in_front == tuple(i) == tuple(j) or not _is_float32(lhs, rhs, **params):
        return False
    # The factors may change places, which what is said of each or of the result would not.
    sharding = params["out_sharding"]
    if len({*(params["precision"] or ())}) > 1 or (sharding and any(sharding.spec)):
        return False
    terms = math.prod(lhs.shape[: len(i)])
    return all(_VECTOR <= math.prod(a.shape[len(i) :]) < terms for a in (lhs, rhs))


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
        and _is_float32(lhs, rhs, **params)
    )


def _is_float32(lhs: Any, rhs: Any, *, preferred_element_type: Any, **_: Any) -> bool:
    """Whether factors and product are."""
    types = lhs.dtype, rhs.dtype, preferred_element_type or lhs.dtype
    return all(dtype == jnp.float32 for dtype in types)


def _sizes(lhs: Any, rhs: Any, *, dimension_numbers: Any, **_: Any) -> tuple[int, int, int]:
    """Rows of a product of two matrices, the terms of each of its sums, and its columns."""
    ((i,), (j,)), _ = dimension_numbers
    return lhs.shape[1 - i], lhs.shape[i], rhs.shape[1 - j]


def _is_gradient_of_kernel(rhs: Sequence[int], out: Sequence[int], params: Any) -> bool:
    """Whether a convolution of one group has more positions in its kernel than in its output."""
    spec = params["dimension_numbers"]
    kernel, space = (
        math.prod(shape[axis] for axis in axes[2:])
        for shape, axes in ((rhs, spec.rhs_spec), (out, spec.out_spec))
    )
    return _num_groups(params) == 1 and space < kernel


def _by_examples(lhs: jax.Array, rhs: jax.Array, out: Any, **params: Any) -> jax.Array:
    """A convolution of one group as the sum of its channels', a few at a time, each as patches."""
    spec = params["dimension_numbers"]
    channels = spec.lhs_spec[1], spec.rhs_spec[1]
    count = math.gcd(lhs.shape[channels[0]], _EXAMPLES_AT_A_TIME)
    chunks = []
    for array, axis in zip((lhs, rhs), channels, strict=True):
        in_front = jnp.moveaxis(array, axis, 0)
        chunks.append(in_front.reshape(-1, count, *in_front.shape[1:]))

    def add(total: jax.Array, chunk: list[jax.Array]) -> tuple[jax.Array, None]:
        operands = (jnp.moveaxis(a, 0, axis) for a, axis in zip(chunk, channels, strict=True))
        return total + convolution_as_patches(*operands, **params).astype(total.dtype), None

    # A sum in bfloat16 would stop growing where an example is less than its last bit.
    wide = jnp.zeros(out.shape, jnp.promote_types(out.dtype, jnp.float32))
    return lax.scan(add, wide, chunks)[0].astype(out.dtype)


def _in_place(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A convolution of operands in canonical layout, which the result has too."""
    if min(itertools.chain(*params["padding"])) < 0:
        # XLA's program would read beyond what is left (jaxlib 0.10.2).
        lhs = _padded(lhs, **params)
        rank = lhs.ndim - 2
        params |= {"padding": ((0, 0),) * rank, "lhs_dilation": (1,) * rank}
    # Without the barriers XLA would put transpositions before and after back into it.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    last = lhs.ndim - 1
    spec = lax.ConvDimensionNumbers(
        (0, last, *range(1, last)),
        (last, last - 1, *range(last - 1)),
        (0, last, *range(1, last)),
    )
    out = CONVOLUTION.bind(lhs, rhs, **{**params, "dimension_numbers": spec})
    return lax.optimization_barrier(out)


def _of_few_channels(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """As `_in_place`, in the form that is fastest for as few channels as a vector has numbers."""
    *_, taps, channels, features = rhs.shape
    if channels % 2 and channels > 1:
        # Of an odd number of channels XLA reads patches one number at a time.
        zero, none = jnp.zeros((), rhs.dtype), [(0, 0, 0)] * (rhs.ndim - 2)
        lhs = lax.pad(lhs, zero, [*none, (0, 0, 0), (0, 1, 0)])
        rhs = lax.pad(rhs, zero, [*none, (0, 1, 0), (0, 0, 0)])
    is_dilated = {*params["lhs_dilation"], *params["rhs_dilation"]} != {1}
    if features > _VECTOR or taps == 1 or is_dilated:
        return _in_place(lhs, rhs, **params)
    return _by_neighbours(lhs, rhs, **params)


def _by_neighbours(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """As `_in_place`, by a convolution that has neighbours along the last axis as its features.

    Its kernel holds the given one once for each of them, moved on by a stride. It multiplies more,
    zeros among them, but has fewer patches to move.
    """
    taps, features = rhs.shape[-3], rhs.shape[-1]
    # Features of more than one vector and not more than two.
    count = min(_MOST_NEIGHBOURS, 2 ** int(math.log2(2 * _VECTOR / features)))
    *others, (low, high) = params["padding"]
    *_, stride = strides = params["window_strides"]
    wanted = (low + lhs.shape[-2] + high - taps) // stride + 1
    num_moves = -(-wanted // count) - 1
    zero, spaces = jnp.zeros((), rhs.dtype), [(0, 0, 0)] * rhs.ndim
    kernels = []
    for k in range(count):
        spaces[-3] = (k * stride, (count - 1 - k) * stride, 0)
        kernels.append(lax.pad(rhs, zero, spaces))
    wide = jnp.stack(kernels, axis=-2).reshape(*kernels[0].shape[:-1], count * features)
    reach = num_moves * count * stride + wide.shape[-3]
    params["padding"] = (*others, (low, reach - lhs.shape[-2] - low))
    params["window_strides"] = (*strides[:-1], count * stride)
    out = _in_place(lhs, wide, **params)
    out = out.reshape(*out.shape[:-2], out.shape[-2] * count, features)
    return lax.slice_in_dim(out, 0, wanted, axis=-2)


def _canonical(
    lhs: jax.Array, rhs: jax.Array, *, dimension_numbers: Any, batch_group_count: int, **_: Any
) -> tuple[jax.Array, jax.Array, bool]:
    """[batch, *space, channels], [*kernel, channels, features], whether the batch is grouped."""
    n, c, *space = dimension_numbers.lhs_spec
    o, i, *kernel = dimension_numbers.rhs_spec
    return lhs.transpose(n, *space, c), rhs.transpose(*kernel, i, o), batch_group_count > 1


def _padded(lhs: jax.Array, *, padding: Any, lhs_dilation: Any, **_: Any) -> jax.Array:
    """[batch, *space, channels] with its dilation and padding."""
    pads = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *pads, (0, 0, 0)])


def _from_canonical(out: jax.Array, out_spec: Sequence[int]) -> jax.Array:
    """[batch, *space, features] with its axes where `out_spec` wants them."""
    last = out.ndim - 1
    places = dict(zip(out_spec, (0, last, *range(1, last)), strict=True))
    return out.transpose([places[axis] for axis in range(out.ndim)])


def _num_groups(params: Any) -> int:
    return max(params["feature_group_count"], params["batch_group_count"])


def _product(patches: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
    return lax.dot_general(
        patches,
        kernel,
        (((2,), (1,)), ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _slices(
    array: jax.Array,
    window: Sequence[int],
    steps_in_window: Sequence[int],
    space: Sequence[int],
    strides: Sequence[int],
    first_axis: int = 2,
) -> list[jax.Array]:
    """For each position in a window, in row-major order, what lies there in every window."""
    before, after = first_axis, array.ndim - first_axis - len(window)
    found = []
    for position in itertools.product(*map(range, window)):
        start = [p * step for p, step in zip(position, steps_in_window, strict=True)]
        limit = [
            a + (n - 1) * s + 1 if n else a for a, n, s in zip(start, space, strides, strict=True)
        ]
        found.append(
            lax.slice(
                array,
                (0,) * before + tuple(start) + (0,) * after,
                (*array.shape[:before], *limit, *array.shape[array.ndim - after :]),
                (1,) * before + tuple(strides) + (1,) * after,
            )
        )
    return found


def _spread_apart(source: jax.Array, chosen: jax.Array, window: Sequence[int]) -> jax.Array:
    """Each value at its window's chosen position; windows side by side."""
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
    """Each value at its window's chosen position, added where windows overlap."""
    zero = jnp.zeros((), source.dtype)
    total = jnp.zeros(shape, source.dtype)
    for k, offset in enumerate(offsets):
        spread = [
            (o, size - o - ((n - 1) * stride + 1), stride - 1)
            for o, size, n, stride in zip(offset, shape, source.shape, strides, strict=True)
        ]
        total += lax.pad(jnp.where(chosen == k, source, zero), zero, spread)
    return total


def _member_by_member(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    each: Callable[[Callable[..., jax.Array], tuple[jax.Array, jax.Array]], jax.Array],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`fn`, which `vmap` turns into `each(fn, (lhs, rhs))`, not into one batched operation."""
    batched = custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple[jax.Array, bool]:
        lhs, rhs = (
            a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip(args, in_batched, strict=True)
        )
        return each(batched, (lhs, rhs)), True

    return batched
