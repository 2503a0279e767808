"""Flax's ensembling guide: `pmap`, one member per device, the batch given to all.

Source: https://flax.readthedocs.io/en/stable/guides/parallel_training/ensembling.html
"""

import jax

from benchmarks.peers.by_hand import StepOfAll, batch_axis, make_step, stacked_first_states
from benchmarks.peers.way import Absent
from benchmarks.workloads import Workload


class FlaxPmap(StepOfAll):
    """A member on each device.

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
        axis = batch_axis(workload)
        step = jax.pmap(make_step(workload), in_axes=(0, axis, axis), donate_argnums=0)
        super().__init__(workload, step, stacked_first_states(workload))
