"""Dispatch of programs in which devices wait for each other, on CPUs.

The devices of a CPU share a pool of threads, and a device that waits for others keeps one. With
many calls under way, no thread may be left for the device that all wait for, and XLA ends the
process. Accelerators have no such pool.
"""

from itertools import combinations

import jax
import jax.numpy as jnp
from jax.stages import Lowered, Traced, Wrapped

from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout.mesh import Layout
from dist_ens.layout.specs import REPLICATED
from dist_ens.processes import cluster


def in_turn(layout: Layout, program: Wrapped) -> Wrapped:
    """Returns a jitted program that can be called any number of times without waiting.

    On CPU devices that compute a member together, a call first waits for its arguments, which an
    earlier call computes. Programs of several rows still compute at the same time.
    """
    is_alone = layout.data_axis == layout.model_axis == 1
    return program if is_alone or layout.platform != "cpu" else _InTurn(program)


def settled(layout: Layout, results: Tree) -> Tree:
    """Returns results of a program, for which it waits if the layout has several CPU devices."""
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


def connect_hosts(layout: Layout) -> None:
    """Opens the connections that collectives use between hosts. Every host must call this.

    On CPUs the arrays travel by Gloo. It gives a host 30 s to come when a connection is opened, and
    more time afterwards. The first collective may follow a compilation, whose times on the hosts
    can differ by more. So the connections are opened before it, when the hosts have just met.
    """
    if jax.process_count() == 1 or layout.platform != "cpu":
        return
    cluster.as_main_sees(0)  # The hosts wait here for each other.

    def sums(one: jax.Array) -> tuple[jax.Array, ...]:
        names = layout.mesh.axis_names
        sets = (axes for k in range(len(names)) for axes in combinations(names, k + 1))
        return tuple(jax.lax.psum(one, axes) for axes in sets)

    program = layout.shard_map(sums, in_specs=(REPLICATED,), out_specs=REPLICATED)
    jax.block_until_ready(jax.jit(program)(jnp.float32(1)))
