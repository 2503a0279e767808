"""Dispatch, one after another, of programs in which the devices of a CPU wait for each other.

The devices of a CPU share a pool of threads, and a device that waits for others keeps one. With
many calls under way, no thread may be left for the device that all wait for, and XLA ends the
process. Accelerators have no such pool.
"""

import jax
from jax.stages import Lowered, Traced, Wrapped

from dist_ens.layout.mesh import Layout
from dist_ens.types import PyTree, Tree


def in_turn(layout: Layout, program: Wrapped) -> Wrapped:
    """Returns a jitted program that can be called any number of times without waiting.

    A call first waits for its arguments, which an earlier call computes. Programs of several rows
    still compute at the same time.

    Args:
        layout: Layout of the program.
        program: Program made by `jax.jit`. It is returned itself unless the layout has several
            columns of CPU devices.
    """
    return program if layout.data_axis == 1 or layout.platform != "cpu" else _InTurn(program)


def settled(layout: Layout, results: Tree) -> Tree:
    """Returns results of a program in which rows or columns wait for each other.

    Args:
        layout: Layout of the program.
        results: Results, for which it waits if the layout has several CPU devices.
    """
    is_alone = layout.mesh.size == 1 or layout.platform != "cpu"
    return results if is_alone else jax.block_until_ready(results)


class _InTurn(Wrapped):
    """A jitted program that waits for its arguments before it is dispatched."""

    def __init__(self, program: Wrapped) -> None:
        self._program = program

    def __call__(self, *args: PyTree, **options: PyTree) -> PyTree:
        return self._program(*jax.block_until_ready(args), **options)

    def trace(self, *args: PyTree, **options: PyTree) -> Traced:
        return self._program.trace(*args, **options)

    def lower(self, *args: PyTree, **options: PyTree) -> Lowered:
        return self._program.lower(*args, **options)
