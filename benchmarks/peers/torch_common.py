"""Functions that the PyTorch ways share: threads, modules, optimizers and data."""

from collections.abc import Iterable

import jax
import numpy as np
import psutil
import torch
from torch import Tensor, nn

from benchmarks.peers.by_hand import first_states
from benchmarks.peers.torch_networks import network_of
from benchmarks.peers.way import Absent
from benchmarks.workloads import Workload


def thread_counts() -> list[int]:
    """Returns the numbers of threads to try: one, and the number of cores.

    Several threads wait for each other at the end of every operation. For small operations, or
    beside other processes, the wait can be many times longer than the work.

    Raises:
        Absent: If JAX does not compute on the CPU.
    """
    if jax.default_backend() != "cpu":
        raise Absent(
            f"it is written for CPUs, and JAX computes on the platform {jax.default_backend()!r}."
        )
    return sorted({1, psutil.cpu_count() or 1})


def first_networks(workload: Workload) -> list[nn.Module]:
    """Returns a network for each member, with the parameters of the JAX member."""
    states = jax.device_get(first_states(workload))
    return [network_of(workload, state.params) for state in states]


def make_optimizer(
    workload: Workload, params: Iterable[Tensor], *, fused: bool
) -> torch.optim.Optimizer:
    """Returns the optimizer of a workload.

    Args:
        workload: Workload to train.
        params: Parameters to optimize.
        fused: Whether to use PyTorch's fused form. If not, the `foreach` form is used.
    """
    config = workload.optimizer
    form = {"fused": fused, "foreach": not fused}
    if config.name == "adam":
        return torch.optim.Adam(params, config.learning_rate, **form)
    return torch.optim.SGD(
        params,
        config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        **form,
    )


def data_of(workload: Workload) -> tuple[Tensor, Tensor]:
    """Returns all inputs and labels. Integer labels are int64, as PyTorch's loss requires."""
    labels = workload.labels
    if labels.dtype.kind == "i":
        labels = labels.astype(np.int64)
    return torch.from_numpy(workload.inputs), torch.from_numpy(labels)
