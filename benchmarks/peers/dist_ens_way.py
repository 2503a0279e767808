"""The way `dist_ens`: an `Ensemble` with the data on the devices."""

import jax

from benchmarks.workloads import Workload
from dist_ens.data import ArraySplit, Source, Spec
from dist_ens.ensemble import Drawn, Ensemble
from dist_ens.execution.heuristics import candidates
from dist_ens.execution.spec import AUTO
from dist_ens.execution.timing import Candidate
from dist_ens.experiment import make_optimizer
from dist_ens.experiment.bench import Updates
from dist_ens.layout import Layout
from dist_ens.processes import cluster
from dist_ens.sampling import Order


class DistEns(Updates):
    """A way that draws the batch of each step on the devices, from the whole set.

    Args:
        workload: Workload to train.
        execution: Execution of the members, such as "vmap". With "auto" it is chosen by timing.
        layout: Layout of the members. Default: that of a run, with the cores of a CPU as devices.
    """

    def __init__(
        self, workload: Workload, execution: str = AUTO, layout: Layout | None = None
    ) -> None:
        split = ArraySplit(workload.inputs, workload.labels)
        inputs = workload.batch["inputs"]
        super().__init__(
            make_ensemble(
                workload,
                layout or layout_of(workload),
                "vmap" if execution == AUTO else execution,
            ),
            Source(Spec(inputs.shape[1:], inputs.dtype.name, (), 1), split, split),
            order_of(workload),
            workload.steps_per_call,
            chosen=execution == AUTO,
        )


def order_of(workload: Workload) -> Order:
    """Returns the order of a workload's examples."""
    return Order(len(workload.inputs), workload.batch_size, per_member=workload.own_batches)


def layout_of(workload: Workload) -> Layout:
    """Returns the layout that a run gives the members of a workload."""
    count = workload.num_members
    return Layout.make(count, devices=cluster.devices_for(count))


def make_ensemble(workload: Workload, layout: Layout, execution: str) -> Ensemble:
    """Returns the ensemble of a workload.

    Args:
        workload: Workload to train.
        layout: Layout of the members.
        execution: Execution of the members, such as "vmap".
    """
    return Ensemble(
        workload.member,
        make_optimizer(workload.optimizer),
        workload.objective,
        num_members=layout.num_members,
        layout=layout,
        execution=execution,
    )


def fixed_executions(workload: Workload) -> dict[str, Candidate]:
    """Returns what trains by every candidate execution, by the execution's name.

    Each runs on all devices. If these are the cores of a CPU, there are others on one device.
    """
    layout = layout_of(workload)
    ensemble = make_ensemble(workload, layout, "vmap")
    steps = workload.steps_per_call
    split = jax.eval_shape(lambda: {"inputs": workload.inputs, "labels": workload.labels})
    cursor = jax.ShapeDtypeStruct((steps, 3), "uint32")
    batches = Drawn(split, cursor, order_of(workload))
    state = ensemble.abstract_state(workload.batch)
    traced = ensemble.traced_update(state, batches)

    def executions_on(layout: Layout) -> dict[str, Candidate]:
        names = candidates(layout, traced, steps)
        return {name: DistEns(workload, name, layout) for name in names}

    found = executions_on(layout)
    if cluster.cores_are_devices() and layout.mesh.size > 1:
        on_one = executions_on(layout.on_one_device())
        found |= {f"{name} on one device": timed for name, timed in on_one.items()}
    return found
