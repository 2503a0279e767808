"""What lies at one position of every window."""

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
    """For each position in a window, in row-major order, what lies there in every window.

    Args:
        array: [..., *axes of windows, ...].
        window: Sizes of a window along these axes.
        steps_in_window: From one of its positions to the next.
        space: How many windows there are along these axes.
        strides: From window to window.
        first_axis: Of these axes.

    Returns:
        As many arrays as a window has positions, each [..., *space, ...].
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
