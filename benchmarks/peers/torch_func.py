"""The way of PyTorch's ensembling tutorial: `stack_module_state` and `vmap` over the members.

Source: https://docs.pytorch.org/tutorials/intermediate/ensembling.html
"""

import itertools
import warnings
from typing import Any

import torch
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from benchmarks.peers.order import Order
from benchmarks.peers.torch_common import data_of, first_networks, make_optimizer, thread_counts
from benchmarks.peers.torch_networks import loss_of
from benchmarks.peers.way import fastest
from benchmarks.workloads import Workload


class TorchFunc:
    """A way with `vmap` over the members, and one optimizer over the stacked parameters.

    One optimizer is enough, because it updates each number separately. The fastest of four forms is
    used: one thread or all cores, with or without the fused optimizer. BatchNorm's running
    statistics are stacked too, and updated in place. Attention has no batched form and is computed
    for one member after another. Written as matrix products it took longer.

    Args:
        workload: Workload to train.
    """

    def __init__(self, workload: Workload) -> None:
        warnings.filterwarnings("ignore", message="There is a performance drop")
        forms = itertools.product(thread_counts(), (True, False))
        self._fastest = fastest([_Form(workload, *form) for form in forms])

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, in the fastest form."""
        self._fastest.run(num_steps)


class _Form:
    def __init__(self, workload: Workload, threads: int, fused: bool) -> None:
        self._threads = threads
        self._own_batches = workload.own_batches
        self._order = Order(workload)
        self._data = data_of(workload)
        networks = first_networks(workload)
        self.params, self._buffers = stack_module_state(networks)
        loss, network = loss_of(workload), networks[0]

        def loss_of_member(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            return loss(functional_call(network, (params, buffers), (x,)), y)

        batch_axis = 0 if workload.own_batches else None
        self._grads = vmap(grad_and_value(loss_of_member), (0, 0, batch_axis, batch_axis))
        self._optimizer = make_optimizer(workload, self.params.values(), fused=fused)

    def run(self, num_steps: int) -> None:
        torch.set_num_threads(self._threads)
        orders = torch.from_numpy(self._order.draw(num_steps))
        inputs, labels = self._data
        for step in range(num_steps):
            order = orders[:, step] if self._own_batches else orders[0, step]
            with torch.no_grad():  # `grad_and_value` records the operations itself.
                grads, _ = self._grads(self.params, self._buffers, inputs[order], labels[order])
            for name, param in self.params.items():
                param.grad = grads[name]
            self._optimizer.step()
