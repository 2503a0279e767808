"""Lowering `canonical`: convolutions in the layout NHWC x HWIO, in the fastest form for a CPU."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dist_ens.execution.lowerings.convolutions import (
    CONVOLUTION,
    canonical,
    convolution_as_patches,
    from_canonical,
    member_by_member,
    num_groups,
    padded,
    sums_over_examples,
)
from dist_ens.execution.lowerings.shapes import VECTOR, Param, is_float32, slices
from dist_ens.execution.spec import Lowering, register
from dist_ens.layout import sum_over_columns

# A convolution of one feature is given at most this number of features. With more, multiplying
# zeros takes longer than it saves.
_MOST_NEIGHBOURS = 8
# The patches or shifts of this number of examples fit in a core's cache.
_EXAMPLES_AT_A_TIME = 2
# Shifts may copy, and multiply, this many times as many numbers as patches and still be faster.
_COPIES_OF_SHIFTS = 1.5
_PRODUCTS_OF_SHIFTS = 1.5


def convolution_in_canonical_layout(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Param
) -> jax.Array:
    """Computes a convolution in the layout NHWC x HWIO, and many members' one after another.

    - The gradient of a kernel is a convolution whose channels are the examples, and whose kernel is
      as large as an image. Memory limits XLA's program for it in every layout. Here it is computed
      by matrix products with shifts or patches, whichever needs less time for copies. Two examples
      are taken at a time, so that the copies fit in a core's cache.
    - XLA has a fast program for other convolutions if they have more than 16 channels or features.
      A convolution of fewer is computed as one whose features are several neighbouring outputs.

    With shifts or neighbours, an infinite input may also turn neighbouring results into NaN.
    """

    def one(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        out = jax.eval_shape(lambda a, b: CONVOLUTION.bind(a, b, **params), lhs, rhs)
        if lhs.ndim == 2 or 0 in (*lhs.shape, *rhs.shape, *out.shape):
            return CONVOLUTION.bind(lhs, rhs, **params)
        is_gradient = (
            num_groups(params) == 1 and sums_over_examples(**params)
            if columns > 1
            else _is_gradient_of_kernel(rhs.shape, out.shape, params)
        )
        if is_gradient:
            by_examples = functools.partial(_by_examples, out=out, **params)
            return sum_over_columns(by_examples, columns, lhs, rhs)
        lhs, rhs = canonical(lhs, rhs, **params)
        few = rhs.shape[-2] <= VECTOR and rhs.shape[-1] < 4 * VECTOR
        is_plain = num_groups(params) == 1 and is_float32(lhs, rhs, **params)
        convolved = _of_few_channels if few and is_plain else _in_place
        out_spec = params["dimension_numbers"].out_spec
        return from_canonical(convolved(lhs, rhs, **params), out_spec)

    return member_by_member(one, lambda fn, args: lax.map(lambda pair: fn(*pair), args))(lhs, rhs)


def _is_gradient_of_kernel(
    rhs: Sequence[int], out: Sequence[int], params: Mapping[str, Param]
) -> bool:
    """Returns whether a convolution of one group has a kernel larger than its output."""
    spec = params["dimension_numbers"]
    kernel, space = (
        math.prod(shape[axis] for axis in axes[2:])
        for shape, axes in ((rhs, spec.rhs_spec), (out, spec.out_spec))
    )
    return num_groups(params) == 1 and space < kernel


def _by_examples(
    lhs: jax.Array, rhs: jax.Array, *, out: jax.ShapeDtypeStruct, **params: Param
) -> jax.Array:
    """Computes a convolution of one group as a sum over its channels, a few at a time."""
    spec = params["dimension_numbers"]
    channels = spec.lhs_spec[1], spec.rhs_spec[1]
    space = [out.shape[axis] for axis in spec.out_spec[2:]]
    convolved = convolution_as_patches
    if _shifts_are_faster(lhs.shape, rhs.shape, space, params):
        convolved = functools.partial(_as_shifts_of_both, space=space)
    count = math.gcd(lhs.shape[channels[0]], _EXAMPLES_AT_A_TIME)
    chunks = []
    for array, axis in zip((lhs, rhs), channels, strict=True):
        in_front = jnp.moveaxis(array, axis, 0)
        chunks.append(in_front.reshape(-1, count, *in_front.shape[1:]))

    def add(total: jax.Array, chunk: list[jax.Array]) -> tuple[jax.Array, None]:
        operands = (jnp.moveaxis(a, 0, axis) for a, axis in zip(chunk, channels, strict=True))
        return total + convolved(*operands, **params).astype(total.dtype), None

    # A sum in bfloat16 would stop growing when a term is less than its last bit.
    wide = jnp.zeros(out.shape, jnp.promote_types(out.dtype, jnp.float32))
    return lax.scan(add, wide, chunks)[0].astype(out.dtype)


def _shifts_are_faster(
    lhs: Sequence[int], rhs: Sequence[int], space: Sequence[int], params: Mapping[str, Param]
) -> bool:
    """Returns whether `_as_shifts_of_both` supports a convolution and should beat patches."""
    spec = params["dimension_numbers"]
    batch, width = lhs[spec.lhs_spec[0]], lhs[spec.lhs_spec[-1]]
    features, taps = rhs[spec.rhs_spec[0]], rhs[spec.rhs_spec[-1]]
    shifted = (math.prod(space[:-1]) * batch + space[-1] * features) * width
    patched = (math.prod(space) * batch + features) * taps
    is_dilated = {params["lhs_dilation"][-1], params["rhs_dilation"][-1]} != {1}
    # With shifts, a sum has one term for each column of the input; with patches, one for each
    # column of the kernel.
    return (
        not is_dilated
        and shifted < _COPIES_OF_SHIFTS * patched
        and width < _PRODUCTS_OF_SHIFTS * taps
    )


def _as_shifts_of_both(
    lhs: jax.Array, rhs: jax.Array, *, space: Sequence[int], **params: Param
) -> jax.Array:
    """Computes a convolution from shifts of the input by rows and of the kernel by columns.

    A column is a position along the last axis, a row a position along the other axes. For an output
    of 3x3, patches would be nine copies of the input. Here three copies of the input are shifted by
    rows, and three copies of the kernel by columns. Their product has all nine outputs.
    `space` is the shape of the output without batch and features.
    """
    lhs, rhs = canonical(lhs, rhs, **params)
    # The channels come first, as the product sums over them. The axes that the output keeps come
    # last.
    lhs, rhs = jnp.swapaxes(lhs, 0, -1), jnp.moveaxis(rhs, -2, 0)
    width, (taps, features), num_columns = lhs.shape[-2], rhs.shape[-2:], space[-1]
    *others, (low, _) = params["padding"]
    *strides, stride = params["window_strides"]
    *dilations, _ = params["rhs_dilation"]
    lhs = padded(lhs, padding=(*others, (0, 0)), lhs_dilation=params["lhs_dilation"])
    by_rows = slices(lhs, space[:-1], strides, rhs.shape[1:-2], dilations, first_axis=1)
    around = [(0, 0, 0)] * rhs.ndim
    around[-2] = ((num_columns - 1) * stride - low, low + width - taps, 0)
    rhs = lax.pad(rhs, jnp.zeros((), rhs.dtype), around)
    # The first column of the output belongs to the kernel with the largest shift, so the shifts are
    # reversed.
    by_columns = slices(rhs, (num_columns,), (stride,), (width,), (1,), first_axis=rhs.ndim - 2)
    # XLA multiplies two matrices as they lie in memory. For more axes its program is slower.
    lhs, rhs = (
        jnp.concatenate(moved, axis=-1).reshape(-1, len(moved) * moved[0].shape[-1])
        for moved in (by_rows, by_columns[::-1])
    )
    out = lax.dot_general(
        lhs,
        rhs,
        (((0,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    out = out.reshape(*space[:-1], -1, num_columns, features)
    return from_canonical(jnp.moveaxis(out, -3, 0), params["dimension_numbers"].out_spec)


def _in_place(lhs: jax.Array, rhs: jax.Array, **params: Param) -> jax.Array:
    """Computes a convolution in canonical layout. Operands and result have this layout."""
    if min(itertools.chain(*params["padding"])) < 0:
        # With negative padding, XLA's program reads beyond the cropped input (jaxlib 0.10.2).
        lhs = padded(lhs, **params)
        rank = lhs.ndim - 2
        params |= {"padding": ((0, 0),) * rank, "lhs_dilation": (1,) * rank}
    # Without the barriers, XLA would merge the transpositions before and after into the
    # convolution.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    last = lhs.ndim - 1
    spec = lax.ConvDimensionNumbers(
        (0, last, *range(1, last)),
        (last, last - 1, *range(last - 1)),
        (0, last, *range(1, last)),
    )
    out = CONVOLUTION.bind(lhs, rhs, **{**params, "dimension_numbers": spec})
    return lax.optimization_barrier(out)


def _of_few_channels(lhs: jax.Array, rhs: jax.Array, **params: Param) -> jax.Array:
    """Computes a convolution as `_in_place` does, in the fastest form for at most 16 channels."""
    *_, taps, channels, features = rhs.shape
    if channels % 2 and channels > 1:
        # With an odd number of channels, XLA reads patches one number at a time.
        zero, none = jnp.zeros((), rhs.dtype), [(0, 0, 0)] * (rhs.ndim - 2)
        lhs = lax.pad(lhs, zero, [*none, (0, 0, 0), (0, 1, 0)])
        rhs = lax.pad(rhs, zero, [*none, (0, 1, 0), (0, 0, 0)])
    is_dilated = {*params["lhs_dilation"], *params["rhs_dilation"]} != {1}
    if features > VECTOR or taps == 1 or is_dilated:
        return _in_place(lhs, rhs, **params)
    return _by_neighbours(lhs, rhs, **params)


def _by_neighbours(lhs: jax.Array, rhs: jax.Array, **params: Param) -> jax.Array:
    """Computes a convolution as `_in_place` does, with neighbouring outputs as its features.

    The new kernel holds one copy of the given kernel for each neighbour along the last axis of
    space, shifted by the stride. It multiplies more numbers, some of them zeros, but moves fewer
    patches.
    """
    taps, features = rhs.shape[-3], rhs.shape[-1]
    # The new features fill more than one vector and at most two.
    count = min(_MOST_NEIGHBOURS, 2 ** int(math.log2(2 * VECTOR / features)))
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


register(Lowering("canonical", CONVOLUTION, convolution_in_canonical_layout))
