"""The way `torch_loop`: a PyTorch loop over the members."""

import itertools

import torch

from benchmarks.peers.order import Order
from benchmarks.peers.torch_common import data_of, first_networks, make_optimizer, thread_counts
from benchmarks.peers.torch_networks import loss_of
from benchmarks.peers.way import fastest
from benchmarks.workloads import Workload


class TorchLoop:
    """A way that trains the members' modules one after another, as PyTorch's tutorials do.

    The fastest of several forms is used: one thread or all cores, with or without the fused
    optimizer, and for images with or without the channels last.

    Args:
        workload: Workload to train.
    """

    def __init__(self, workload: Workload) -> None:
        convolves = workload.network in ("convolutional", "resnet8")
        forms = itertools.product(
            thread_counts(), (True, False), (True, False) if convolves else (False,)
        )
        self._fastest = fastest([_Form(workload, *form) for form in forms])

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, in the fastest form."""
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
