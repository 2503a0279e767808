"""The way `jax_loop`: a Python loop that calls the jitted step of each member."""

import jax

from benchmarks.peers.by_hand import first_states, make_step
from benchmarks.peers.order import Order
from benchmarks.workloads import Workload


class JaxLoop:
    """A way that calls the jitted step of each member, on batches that NumPy gathers on the host.

    Args:
        workload: Workload to train.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._order = Order(workload)
        self._step = jax.jit(make_step(workload), donate_argnums=0)
        self.states = first_states(workload)

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits until they are done."""
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
