"""`jit(vmap(step))`, the members laid over the devices by a `NamedSharding`."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers.by_hand import make_step, stacked_first_states
from benchmarks.peers.order import Order
from benchmarks.workloads import Workload


class JaxVmap:
    """Batches are indexed by NumPy and passed in; the devices are as many as divide the members.

    Args:
        workload: What to train.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._order = Order(workload)
        count = workload.num_members
        devices = max(n for n in range(1, jax.device_count() + 1) if count % n == 0)
        mesh = jax.make_mesh(
            (devices,), ("members",), (AxisType.Auto,), devices=jax.devices()[:devices]
        )
        members, everywhere = NamedSharding(mesh, P("members")), NamedSharding(mesh, P())
        batch = members if workload.own_batches else everywhere
        batch_axis = 0 if workload.own_batches else None
        self._step = jax.jit(
            jax.vmap(make_step(workload), in_axes=(0, batch_axis, batch_axis)),
            in_shardings=(members, batch, batch),
            out_shardings=members,
            donate_argnums=0,
        )
        self.states = jax.device_put(stacked_first_states(workload), members)

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        workload, losses = self._workload, []
        orders = self._order.draw(num_steps)
        for step in range(num_steps):
            order = orders[:, step] if workload.own_batches else orders[0, step]
            self.states, loss = self._step(
                self.states, workload.inputs[order], workload.labels[order]
            )
            losses.append(loss)
        jax.block_until_ready((self.states, losses))
