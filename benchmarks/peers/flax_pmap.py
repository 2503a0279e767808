"""Flax's ensembling guide: `pmap`, one member per device, the batch given to all.

Source: https://flax.readthedocs.io/en/stable/guides/parallel_training/ensembling.html
"""

import jax

from benchmarks.peers.by_hand import make_step, stacked_first_states
from benchmarks.peers.order import Order
from benchmarks.peers.way import Absent
from benchmarks.workloads import Workload


class FlaxPmap:
    """Batches are indexed by NumPy and passed in.

    Args:
        workload: What to train.

    Raises:
        Absent: If the devices are fewer than the members.
    """

    def __init__(self, workload: Workload) -> None:
        if jax.local_device_count() < workload.num_members:
            raise Absent(
                f"it puts each of {workload.num_members} members on a device of its own, and there "
                f"are {jax.local_device_count()}."
            )
        self._workload = workload
        self._order = Order(workload)
        batch_axis = 0 if workload.own_batches else None
        self._step = jax.pmap(
            make_step(workload), in_axes=(0, batch_axis, batch_axis), donate_argnums=0
        )
        self.states = stacked_first_states(workload)

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
