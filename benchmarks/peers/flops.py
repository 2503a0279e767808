"""FLOPs of a training step of MLPs, and of a matrix product to compare with."""

import math

import jax
import jax.numpy as jnp

from benchmarks.peers.by_hand import first_states
from benchmarks.workloads import Workload

_SIZE = 2048
MATMUL_FLOPS = 2 * _SIZE**3


class Matmul:
    """A way whose step is one product of two float32[2048, 2048] matrices."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self._factors = [jax.random.normal(key, (_SIZE, _SIZE)) for key in keys]
        self._product = jax.jit(jnp.matmul)

    def run(self, num_steps: int) -> None:
        """Computes the product some times, and waits until it is done."""
        jax.block_until_ready([self._product(*self._factors) for _ in range(num_steps)])


def model_flops(workload: Workload) -> float:
    """Returns the FLOPs of the matrix products in one step of all members of an ensemble of MLPs.

        members * batch * 2 * (3 * sum(sizes of the weights) - size of the first weights)

    The backward pass has a product for the weights and one for the inputs of each layer, except for
    the inputs of the first layer. The FLOPs of the optimizer and the nonlinearities do not count.

    Args:
        workload: Workload whose network is an MLP.
    """
    params = first_states(workload)[0].params
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    per_example = 2 * (3 * sum(sizes) - sizes[0])
    return float(workload.num_members * workload.batch_size * per_example)
