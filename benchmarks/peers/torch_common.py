"""What the PyTorch ways share: threads, the members' modules, optimizers and data."""

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
    """How many threads to try: one, and as many as there are cores.

    More than one wait for each other at the end of every operation; for small operations, and
    beside other processes, that can take many times as long as the work.

    Raises:
        Absent: Where JAX computes on something else than the CPU.
    """
    if jax.default_backend() != "cpu":
        raise Absent("the PyTorch ways are written for CPUs, and JAX has something else here.")
    return sorted({1, psutil.cpu_count() or 1})


def first_networks(workload: Workload) -> list[nn.Module]:
    """A network per member, with the parameters of the JAX ways' member."""
    states = jax.device_get(first_states(workload))
    return [network_of(workload, state.params) for state in states]


def make_optimizer(
    workload: Workload, params: Iterable[Tensor], *, fused: bool
) -> torch.optim.Optimizer:
    """The workload's optimizer; not fused, it goes through lists of arrays (`foreach`)."""
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
    """All examples; labels that are classes in the type that the loss wants."""
    labels = workload.labels
    if labels.dtype.kind == "i":
        labels = labels.astype(np.int64)
    return torch.from_numpy(workload.inputs), torch.from_numpy(labels)
