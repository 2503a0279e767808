"""The way `jax_vmap`: `jit(vmap(step))`, with the members sharded over the devices."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers.by_hand import StepOfAll, batch_axis, make_step, stacked_first_states
from benchmarks.workloads import Workload


class JaxVmap(StepOfAll):
    """A way that calls `jit(vmap(step))` on the largest number of devices that divides the members.

    Args:
        workload: Workload to train.
    """

    def __init__(self, workload: Workload) -> None:
        count = workload.num_members
        devices = max(n for n in range(1, jax.device_count() + 1) if count % n == 0)
        mesh = jax.make_mesh(
            (devices,), ("members",), (AxisType.Auto,), devices=jax.devices()[:devices]
        )
        members, everywhere = NamedSharding(mesh, P("members")), NamedSharding(mesh, P())
        axis = batch_axis(workload)
        batch = everywhere if axis is None else members
        step = jax.jit(
            jax.vmap(make_step(workload), in_axes=(0, axis, axis)),
            in_shardings=(members, batch, batch),
            out_shardings=members,
            donate_argnums=0,
        )
        super().__init__(workload, step, jax.device_put(stacked_first_states(workload), members))
