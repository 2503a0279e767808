"""Dispatch of programs with sums over the data axis, one after another on the devices of a CPU."""

import jax
from jax.stages import Lowered, Traced, Wrapped

from dist_ens.layout.mesh import Layout
from dist_ens.types import PyTree


def in_turn(layout: Layout, program: Wrapped) -> Wrapped:
    """Returns a jitted program that can be called any number of times without waiting.

    The devices of a CPU share a pool of threads, and a device that waits for the others of its row
    keeps one. With many calls under way, no thread may be left for the device that all wait for,
    and XLA ends the process. So a call first waits for its arguments, which an earlier call
    computes. Programs of several rows still compute at the same time.

    Args:
        layout: Layout of the program.
        program: Program made by `jax.jit`. It is returned itself unless the layout has several
            columns of CPU devices.
    """
    return program if layout.data_axis == 1 or layout.platform != "cpu" else _InTurn(program)


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
