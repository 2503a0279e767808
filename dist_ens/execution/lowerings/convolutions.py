"""Lowerings of convolutions: as patches, in canonical layout, or apart for each member."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from dist_ens.execution.lowerings.vectors import VECTOR, is_float32
from dist_ens.execution.lowerings.windows import slices
from dist_ens.layout import sum_over_columns

CONVOLUTION = lax.conv_general_dilated_p

# A convolution of one feature is given at most this number of features. With more, multiplying
# zeros takes longer than it saves.
_MOST_NEIGHBOURS = 8
# The patches or shifts of this number of examples fit in a core's cache.
_EXAMPLES_AT_A_TIME = 2
# Shifts may copy, and multiply, this many times as many numbers as patches and still be faster.
_COPIES_OF_SHIFTS = 1.5
_PRODUCTS_OF_SHIFTS = 1.5


def convolution_as_patches(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Any
) -> jax.Array:
    """Computes a convolution as one matrix product with patches of its input.

    The patches are made of one slice of the input for each position of the kernel. If the output
    has fewer positions, as in the gradient of the weights, they are made of one slice for each
    position of the output.

    Args:
        lhs: Input, in any layout of `jax.lax.conv_general_dilated`.
        rhs: Kernel, in any layout of `jax.lax.conv_general_dilated`.
        columns: Number of columns of the mesh, over which the examples are divided.
        **params: Parameters of `conv_general_dilated_p`: strides, padding, dilations, groups.

    Returns:
        The result of the convolution, up to rounding.
    """
    if columns > 1 and _sums_over_examples(**params):
        # The compiler would gather the examples, to put them beside the positions of the kernel.
        of_column = functools.partial(convolution_as_patches, **params)
        return sum_over_columns(of_column, columns, lhs, rhs)
    lhs, rhs, groups_of_batch = _canonical(lhs, rhs, **params)
    groups, out_spec = _num_groups(params), params["dimension_numbers"].out_spec
    rank = lhs.ndim - 2
    lhs = _padded(lhs, **params)
    # The groups come first: [groups, batch, *space, channels] and
    # [groups, *kernel, channels, features].
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
        seen = slices(lhs, kernel, dilations, space, strides)  # [groups, batch, *space, channels]
        patches = jnp.stack(seen, axis=-2).reshape(groups, batch * math.prod(space), -1)
        out = _product(patches, rhs.reshape(groups, -1, features), params)
        out = out.reshape(groups, batch, *space, features)
    else:
        # The product sums over channels and positions. Here the channels are the examples of the
        # batch. They come before the positions, so that the positions of an example are adjacent.
        lhs, rhs = jnp.moveaxis(lhs, -1, 2), jnp.moveaxis(rhs, -2, 1)
        seen = slices(
            lhs, space, strides, kernel, dilations, first_axis=3
        )  # [groups, batch, channels, *kernel]
        patches = jnp.stack(seen, axis=2).reshape(groups, batch * math.prod(space), -1)
        out = _product(patches, rhs.reshape(groups, channels * math.prod(kernel), features), params)
        out = out.reshape(groups, batch, *space, features)
    out = jnp.moveaxis(out, 0, -2).reshape(batch, *space, groups * features)
    return _from_canonical(out, out_spec)


def convolution_in_canonical_layout(
    lhs: jax.Array, rhs: jax.Array, *, columns: int = 1, **params: Any
) -> jax.Array:
    """Computes a convolution in the layout NHWC x HWIO, and many members' one after another.

    - The gradient of a kernel is a convolution too. Its channels are the examples, and its kernel
      is as large as an image. Memory limits XLA's program for it in every layout. Here it is
      computed by matrix products with shifts or patches, whichever needs less time for copies. Two
      examples are taken at a time, so that the copies fit in a core's cache.
    - XLA has a fast program for other convolutions if they have more than 16 channels or features.
      A convolution of fewer is computed as one whose features are several neighbouring outputs.

    With shifts or neighbours, an infinite input may also turn neighbouring results into NaN.

    Args:
        lhs: Input, in any layout of `jax.lax.conv_general_dilated`.
        rhs: Kernel, in any layout of `jax.lax.conv_general_dilated`.
        columns: Number of columns of the mesh, over which the examples are divided.
        **params: Parameters of `conv_general_dilated_p`.

    Returns:
        The result of the convolution, up to rounding.
    """

    def one(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        out = jax.eval_shape(lambda a, b: CONVOLUTION.bind(a, b, **params), lhs, rhs)
        if lhs.ndim == 2 or 0 in (*lhs.shape, *rhs.shape, *out.shape):
            return CONVOLUTION.bind(lhs, rhs, **params)
        is_gradient = (
            _num_groups(params) == 1 and _sums_over_examples(**params)
            if columns > 1
            else _is_gradient_of_kernel(rhs.shape, out.shape, params)
        )
        if is_gradient:
            by_examples = functools.partial(_by_examples, out=out, **params)
            return sum_over_columns(by_examples, columns, lhs, rhs)
        lhs, rhs, _ = _canonical(lhs, rhs, **params)
        few = rhs.shape[-2] <= VECTOR and rhs.shape[-1] < 4 * VECTOR
        is_plain = _num_groups(params) == 1 and is_float32(lhs, rhs, **params)
        convolved = _of_few_channels if few and is_plain else _in_place
        out_spec = params["dimension_numbers"].out_spec
        return _from_canonical(convolved(lhs, rhs, **params), out_spec)

    return _member_by_member(one, lambda fn, args: lax.map(lambda pair: fn(*pair), args))(lhs, rhs)


def convolutions_apart(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Computes a convolution unchanged. `vmap` keeps one convolution for each member.

    Args:
        lhs: Input, in any layout of `jax.lax.conv_general_dilated`.
        rhs: Kernel, in any layout of `jax.lax.conv_general_dilated`.
        **params: Parameters of `conv_general_dilated_p`.

    Returns:
        The result of the convolution.
    """

    def each(fn: Callable[..., jax.Array], args: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.stack([fn(a, b) for a, b in zip(*args, strict=True)])

    return _member_by_member(lambda a, b: CONVOLUTION.bind(a, b, **params), each)(lhs, rhs)


def _sums_over_examples(
    *, dimension_numbers: lax.ConvDimensionNumbers, feature_group_count: int, **_: object
) -> bool:
    """Returns whether a convolution sums over the first axis of both its operands.

    Its channels are then the examples of a batch, as in the gradient of a kernel.
    """
    channels = dimension_numbers.lhs_spec[1], dimension_numbers.rhs_spec[1]
    return channels == (0, 0) and feature_group_count == 1


def _is_gradient_of_kernel(
    rhs: Sequence[int], out: Sequence[int], params: Mapping[str, Any]
) -> bool:
    """Returns whether a convolution of one group has more positions in its kernel than its output.

    Args:
        rhs: Shape of the kernel.
        out: Shape of the output.
        params: Parameters of `conv_general_dilated_p`.
    """
    spec = params["dimension_numbers"]
    kernel, space = (
        math.prod(shape[axis] for axis in axes[2:])
        for shape, axes in ((rhs, spec.rhs_spec), (out, spec.out_spec))
    )
    return _num_groups(params) == 1 and space < kernel


def _by_examples(
    lhs: jax.Array, rhs: jax.Array, *, out: jax.ShapeDtypeStruct, **params: Any
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
    lhs: Sequence[int], rhs: Sequence[int], space: Sequence[int], params: Mapping[str, Any]
) -> bool:
    """Returns whether `_as_shifts_of_both` supports a convolution and should beat patches.

    Args:
        lhs: Shape of the input.
        rhs: Shape of the kernel.
        space: Shape of the output, without batch and features.
        params: Parameters of `conv_general_dilated_p`, with one group.
    """
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
    lhs: jax.Array, rhs: jax.Array, *, space: Sequence[int], **params: Any
) -> jax.Array:
    """Computes a convolution from shifts of the input by rows and of the kernel by columns.

    A column is a position along the last axis, a row a position along the other axes. For an output
    of 3x3, patches would be nine copies of the input. Here three copies of the input are shifted by
    rows, and three copies of the kernel by columns. Their product has all nine outputs. Its sums go
    over the columns of the input without its padding, which would add zeros.

    Args:
        lhs: Input, in any layout of `jax.lax.conv_general_dilated`.
        rhs: Kernel, in any layout of `jax.lax.conv_general_dilated`.
        space: Shape of the output, without batch and features.
        **params: Parameters of `conv_general_dilated_p`, with one group and without dilations of
            columns.

    Returns:
        The result of the convolution, up to rounding.
    """
    lhs, rhs, _ = _canonical(lhs, rhs, **params)
    # The channels come first, as the product sums over them. The axes that the output keeps come
    # last.
    lhs, rhs = jnp.swapaxes(lhs, 0, -1), jnp.moveaxis(rhs, -2, 0)
    width, (taps, features), num_columns = lhs.shape[-2], rhs.shape[-2:], space[-1]
    *others, (low, _) = params["padding"]
    *strides, stride = params["window_strides"]
    *dilations, _ = params["rhs_dilation"]
    lhs = _padded(lhs, padding=(*others, (0, 0)), lhs_dilation=params["lhs_dilation"])
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
    return _from_canonical(jnp.moveaxis(out, -3, 0), params["dimension_numbers"].out_spec)


def _in_place(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Computes a convolution in canonical layout. Operands and result have this layout."""
    if min(itertools.chain(*params["padding"])) < 0:
        # With negative padding, XLA's program reads beyond the cropped input (jaxlib 0.10.2).
        lhs = _padded(lhs, **params)
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


def _of_few_channels(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
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


def _by_neighbours(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Computes a convolution as `_in_place` does, with neighbouring outputs as its features.

    The neighbours lie along the last axis of space. The new kernel holds one copy of the given
    kernel for each neighbour, shifted by the stride. It multiplies more numbers, some of them
    zeros, but moves fewer patches.
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


def _canonical(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    batch_group_count: int,
    **_: object,
) -> tuple[jax.Array, jax.Array, bool]:
    """Returns the operands in canonical layout, and whether the batch is grouped.

    Returns:
        The input [batch, *space, channels], the kernel [*kernel, channels, features], and whether
        `batch_group_count` is above 1.
    """
    n, c, *space = dimension_numbers.lhs_spec
    o, i, *kernel = dimension_numbers.rhs_spec
    return lhs.transpose(n, *space, c), rhs.transpose(*kernel, i, o), batch_group_count > 1


def _padded(
    lhs: jax.Array, *, padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int], **_: object
) -> jax.Array:
    """Returns an input [batch, *space, channels] with its dilation and padding applied."""
    pads = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *pads, (0, 0, 0)])


def _from_canonical(out: jax.Array, out_spec: Sequence[int]) -> jax.Array:
    """Returns an output [batch, *space, features] with its axes in the order of `out_spec`."""
    last = out.ndim - 1
    places = dict(zip(out_spec, (0, last, *range(1, last)), strict=True))
    return out.transpose([places[axis] for axis in range(out.ndim)])


def _num_groups(params: Mapping[str, Any]) -> int:
    return max(params["feature_group_count"], params["batch_group_count"])


def _product(patches: jax.Array, kernel: jax.Array, params: Mapping[str, Any]) -> jax.Array:
    return lax.dot_general(
        patches,
        kernel,
        (((2,), (1,)), ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _member_by_member(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    each: Callable[[Callable[..., jax.Array], tuple[jax.Array, jax.Array]], jax.Array],
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `fn` as a function that `vmap` turns into `each(fn, (lhs, rhs))`.

    Args:
        fn: Function of two arrays.
        each: Function that applies `fn` to the members of two arrays, leaves [members, ...].
    """
    batched = custom_vmap(fn)

    @batched.def_vmap
    def _(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple[jax.Array, bool]:
        lhs, rhs = (
            a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip(args, in_batched, strict=True)
        )
        return each(batched, (lhs, rhs)), True

    return batched
