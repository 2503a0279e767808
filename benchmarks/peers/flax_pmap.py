"""The way of Flax's ensembling guide: `pmap` with one member per device, and a shared batch.

Source: https://flax.readthedocs.io/en/stable/guides/parallel_training/ensembling.html
"""

import jax

from benchmarks.peers.by_hand import StepOfAll, batch_axis, make_step, stacked_first_states
from benchmarks.peers.way import Absent
from benchmarks.workloads import Workload


class FlaxPmap(StepOfAll):
    """A way that puts one member on each device.

    Args:
        workload: Workload to train.

    Raises:
        Absent: If there are fewer devices than members.
    """

    def __init__(self, workload: Workload) -> None:
        if jax.local_device_count() < workload.num_members:
            raise Absent(
                f"it needs one device for each of {workload.num_members} members, and there are "
                f"{jax.local_device_count()} devices."
            )
        axis = batch_axis(workload)
        step = jax.pmap(make_step(workload), in_axes=(0, axis, axis), donate_argnums=0)
        super().__init__(workload, step, stacked_first_states(workload))
