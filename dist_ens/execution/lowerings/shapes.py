"""Shapes on which several lowerings depend: the windows of an array, and the vectors of a CPU."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from numpy.typing import DTypeLike

from dist_ens.ground.types import Leaf

Param: TypeAlias = Any
"""A parameter of an operation of JAX, such as its strides or its precision."""

# The widest vectors hold this number of float32 values.
VECTOR = 16


def slices(
    array: jax.Array,
    window: Sequence[int],
    steps_in_window: Sequence[int],
    space: Sequence[int],
    strides: Sequence[int],
    first_axis: int = 2,
) -> list[jax.Array]:
    """Returns, for each position in a window, the values of all windows at that position.

    The windows lie along `len(window)` axes of the array from `first_axis` on. `steps_in_window`
    are the distances of neighbouring positions of a window, `space` the numbers of windows, and
    `strides` their distances. The results [..., *space, ...] are in row-major order.
    """
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


def is_float32(
    lhs: Leaf, rhs: Leaf, *, preferred_element_type: DTypeLike | None, **_: object
) -> bool:
    """Returns whether both factors and their product are float32."""
    types = lhs.dtype, rhs.dtype, preferred_element_type or lhs.dtype
    return all(dtype == jnp.float32 for dtype in types)
