"""The jitted JAX loop: one step of one member, dispatched member after member."""

import jax

from benchmarks.peers.by_hand import first_states, make_step
from benchmarks.peers.order import Order
from benchmarks.workloads import Workload


class JaxLoop:
    """Batches are indexed by NumPy and passed in.

    Args:
        workload: What to train.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._order = Order(workload)
        self._step = jax.jit(make_step(workload), donate_argnums=0)
        self.states = first_states(workload)

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        workload, losses = self._workload, []
        orders = self._order.draw(num_steps)
        for step in range(num_steps):
            batches = [(workload.inputs[i], workload.labels[i]) for i in orders[:, step]]
            if not workload.own_batches:
                batches = [jax.device_put(batches[0])] * workload.num_members
            for m, batch in enumerate(batches):
                self.states[m], loss = self._step(self.states[m], *batch)
                losses.append(loss)
        jax.block_until_ready((self.states, losses))
