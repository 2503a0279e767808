"""PyTorch, member after member."""

import itertools

import torch

from benchmarks.peers.order import Order
from benchmarks.peers.torch_common import data_of, first_networks, make_optimizer, thread_counts
from benchmarks.peers.torch_networks import loss_of
from benchmarks.workloads import Workload
from dist_ens.execution.timing import fastest


class TorchLoop:
    """Modules and optimizers one after another, as every tutorial has them.

    On one thread or on all cores, the optimizer fused or not, images with their channels last or
    not: of these the fastest.

    Args:
        workload: What to train.
    """

    def __init__(self, workload: Workload) -> None:
        convolves = workload.network in ("convolutional", "resnet8")
        forms = itertools.product(
            thread_counts(), (True, False), (True, False) if convolves else (False,)
        )
        self._fastest = fastest([_Form(workload, *form) for form in forms])

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        self._fastest.run(num_steps)


class _Form:
    def __init__(self, workload: Workload, threads: int, fused: bool, channels_last: bool) -> None:
        self._threads = threads
        self._order = Order(workload)
        self._data = data_of(workload)
        self._loss = loss_of(workload)
        self.networks = first_networks(workload)
        if channels_last:
            for network in self.networks:
                network.to(memory_format=torch.channels_last)
        self._optimizers = [
            make_optimizer(workload, network.parameters(), fused=fused) for network in self.networks
        ]

    def run(self, num_steps: int) -> None:
        torch.set_num_threads(self._threads)
        orders = torch.from_numpy(self._order.draw(num_steps))
        inputs, labels = self._data
        for step in range(num_steps):
            batches = [(inputs[order], labels[order]) for order in orders[:, step]]
            for m, (network, optimizer) in enumerate(
                zip(self.networks, self._optimizers, strict=True)
            ):
                x, y = batches[m % len(batches)]
                optimizer.zero_grad()
                self._loss(network(x), y).backward()
                optimizer.step()
