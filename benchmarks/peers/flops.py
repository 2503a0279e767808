"""How much of the machine's arithmetic a training step of MLPs uses."""

import math

import jax
import jax.numpy as jnp

from benchmarks.peers.by_hand import first_states
from benchmarks.workloads import Workload

_SIZE = 2048
MATMUL_FLOPS = 2 * _SIZE**3


class Matmul:
    """A plain product of two float32[2048, 2048] matrices; a step is one of them."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self._factors = [jax.random.normal(key, (_SIZE, _SIZE)) for key in keys]
        self._product = jax.jit(jnp.matmul)

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        jax.block_until_ready([self._product(*self._factors) for _ in range(num_steps)])


def model_flops(workload: Workload) -> float:
    """Floating-point operations of the matrix products in one step of all members of an MLP.

    Forward, and backward for weights and inputs, but for the first layer's inputs. What the
    optimizer and the nonlinearities compute is not counted; the time that they take is a step's.
    """
    params = first_states(workload)[0].params
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    per_example = 2 * (3 * sum(sizes) - sizes[0])
    return float(workload.num_members * workload.batch_size * per_example)
