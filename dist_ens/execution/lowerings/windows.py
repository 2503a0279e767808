"""Slices of an array at one position of every window."""

import itertools
from collections.abc import Sequence

import jax
from jax import lax


def slices(
    array: jax.Array,
    window: Sequence[int],
    steps_in_window: Sequence[int],
    space: Sequence[int],
    strides: Sequence[int],
    first_axis: int = 2,
) -> list[jax.Array]:
    """Returns, for each position in a window, the values of all windows at that position.

    Args:
        array: Array [..., *axes of the windows, ...].
        window: Size of a window along each of these axes.
        steps_in_window: Distance between neighbouring positions of a window, along each axis.
        space: Number of windows along each axis.
        strides: Distance between neighbouring windows, along each axis.
        first_axis: Position of the first of these axes in `array`.

    Returns:
        One array [..., *space, ...] for each position of a window, in row-major order.
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
