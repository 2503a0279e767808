"""The way `jax_scan`: one `lax.scan` over the steps of each member, with the data on the device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.by_hand import MemberState, first_states, make_step
from benchmarks.peers.order import Order
from benchmarks.workloads import Workload


class JaxScan:
    """A way that runs one program for each member, which gathers its batches on the device.

    Args:
        workload: Workload to train.
    """

    def __init__(self, workload: Workload) -> None:
        self._order = Order(workload)
        self._data = jax.device_put((workload.inputs, workload.labels))
        step = make_step(workload)

        @partial(jax.jit, donate_argnums=0)
        def steps(state: MemberState, data: Any, orders: jax.Array) -> Any:
            def body(state: MemberState, order: jax.Array) -> tuple[MemberState, jax.Array]:
                batch = [leaf.at[order].get(mode="promise_in_bounds") for leaf in data]
                return step(state, *batch)

            return jax.lax.scan(body, state, orders)

        self._steps = steps
        self.states = first_states(workload)

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits until they are done.

        A new number of steps is compiled first.
        """
        orders, losses = [jnp.asarray(rows, jnp.int32) for rows in self._order.draw(num_steps)], []
        for m in range(len(self.states)):
            self.states[m], of_member = self._steps(
                self.states[m], self._data, orders[m % len(orders)]
            )
            losses.append(of_member)
        jax.block_until_ready((self.states, losses))
