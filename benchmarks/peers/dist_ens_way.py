"""dist_ens itself: the ensemble with the execution that it chooses, the data on the devices."""

from collections.abc import Iterator

import jax

from benchmarks.workloads import Workload
from dist_ens import cluster
from dist_ens.data import calls
from dist_ens.ensemble import Drawn, Ensemble
from dist_ens.ensemble.choice import choose
from dist_ens.execution import AUTO
from dist_ens.feed import index_program
from dist_ens.layout import MEMBERS, Layout, make_layout
from dist_ens.methods import Order
from dist_ens.optimizers import make_optimizer

_SEED = 0
# Of a run so long that all executions worth trying are timed.
_RUN_STEPS = 10**6


class DistEns:
    """Each step draws its batch on the devices, from the whole set.

    Args:
        workload: What to train.
        execution: See `dist_ens.execution`; `auto` to have it chosen.

    Attributes:
        execution: The one that is used.
    """

    def __init__(self, workload: Workload, execution: str = AUTO) -> None:
        self._workload = workload
        self._order = Order(
            len(workload.inputs), workload.batch_size, per_member=workload.own_batches
        )
        count = workload.num_members
        layout = make_layout(count, devices=cluster.devices_for(count))
        ensemble = Ensemble(
            workload.member,
            make_optimizer(workload.optimizer),
            layout,
            workload.loss,
            workload.training_scores,
            execution="vmap" if execution == AUTO else execution,
        )
        self.state = ensemble.init(_SEED, workload.batch_of_inputs)
        self._draw_on(layout)
        self.execution = execution
        if execution == AUTO:
            first = next(self._batches(workload.steps_per_call))
            ensemble, choice = choose(ensemble, self.state, first, _RUN_STEPS)
            self.execution = choice.option
        if ensemble.layout is not layout:
            self.state = ensemble.layout.moved(self.state, MEMBERS)
            self._draw_on(ensemble.layout)
        self._update = ensemble.update

    def run(self, num_steps: int) -> None:
        """See `Way`. A number of steps that is new is compiled anew."""
        for batches in self._batches(num_steps):
            self.state, metrics = self._update(self.state, batches)
        jax.block_until_ready((self.state, metrics))

    def _draw_on(self, layout: Layout) -> None:
        split = {"inputs": self._workload.inputs, "labels": self._workload.labels}
        self._split = layout.put_everywhere(split)
        self._indices = index_program(self._order, layout)

    def _batches(self, num_steps: int) -> Iterator[Drawn]:
        for steps in calls(0, num_steps, self._workload.steps_per_call):
            yield Drawn(self._split, self._indices(self._order.cursor(_SEED, steps)))
