"""dist_ens itself: the ensemble with the execution that it chooses."""

import jax
import numpy as np

from benchmarks.peers.order import Order
from benchmarks.peers.way import Absent
from benchmarks.workloads import Workload
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.choice import choose
from dist_ens.layout import BATCHES, make_layout
from dist_ens.optimizers import make_optimizer

_SEED = 0
# Of a run so long that all executions worth trying are timed.
_RUN_STEPS = 100_000


class DistEns:
    """Batches are drawn on the host and put on the devices, one step a call.

    Args:
        workload: What to train.

    Attributes:
        execution: The one chosen.

    Raises:
        Absent: Where each member has batches of its own.
    """

    def __init__(self, workload: Workload) -> None:
        if workload.own_batches:
            raise Absent("its members share their batches.")
        self._workload = workload
        self._order = Order(workload)
        self._layout = make_layout(workload.num_members)
        ensemble = Ensemble(
            workload.member, make_optimizer(workload.optimizer), self._layout, workload.loss
        )
        self.state = ensemble.init(_SEED, workload.batch_of_inputs)
        batches = self._put(Order(workload).draw(1)[0])
        self._ensemble, choice = choose(ensemble, self.state, batches, _RUN_STEPS)
        self.execution = choice.execution

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        for order in self._order.draw(num_steps)[0]:
            self.state, metrics = self._ensemble.update(self.state, self._put(order[None]))
        jax.block_until_ready((self.state, metrics))

    def _put(self, order: np.ndarray) -> dict[str, jax.Array]:
        batches = {"inputs": self._workload.inputs[order], "labels": self._workload.labels[order]}
        return self._layout.put(batches, self._workload.batch_size, BATCHES)
