"""Connections between the hosts of a mesh."""

import jax
import jax.numpy as jnp

from dist_ens import cluster
from dist_ens.layout.mesh import Layout
from dist_ens.layout.specs import DATA, ENSEMBLE, REPLICATED


def connect_hosts(layout: Layout) -> None:
    """Opens the connections that collectives over the axes of the mesh use between hosts.

    On CPUs the arrays travel by Gloo. It gives a host 30 s to come when a connection is opened,
    and more time afterwards. The first collective may follow a compilation, for which the hosts can
    need times that differ by more than 30 s. So the connections are opened before it, when the
    hosts have just met.

    Args:
        layout: Layout of the ensemble. Every host must call this.
    """
    if jax.process_count() == 1 or layout.platform != "cpu":
        return
    cluster.as_main_sees(0)  # The hosts wait here for each other.

    def sums(one: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.psum(one, axes) for axes in (DATA, ENSEMBLE, (ENSEMBLE, DATA)))

    program = layout.shard_map(sums, in_specs=(REPLICATED,), out_specs=REPLICATED)
    jax.block_until_ready(jax.jit(program)(jnp.float32(1)))
