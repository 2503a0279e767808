"""Members whose parameters are finite, read from a state."""

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.layout import MEMBERS, Waves, to_host
from dist_ens.state import State
from dist_ens.types import PyTree


def finite_members(state: State, waves: Waves) -> np.ndarray:
    """Returns which members have only finite parameters and a finite model state.

    The state of the optimizer is not read: some optimizers begin with an infinite number in it.

    Args:
        state: State of an ensemble. Every host must call this.
        waves: Waves in which the members are on the devices.

    Returns:
        Whether each member is finite, bool[members].
    """
    with jax.transfer_guard("allow"):
        read = (state.params, state.model_state)
        if waves.count == 1:
            return np.asarray(to_host(_are_finite(read, state.step)))
        parts = [
            _are_finite(waves.take(read, number), waves.take(state.step, number))
            for number in range(waves.count)
        ]
        return np.asarray(to_host(waves.join(parts, MEMBERS)))


@jax.jit
def _are_finite(tree: PyTree, step: jax.Array) -> jax.Array:
    """Returns whether all numbers of each member are finite, bool[members]."""
    flags = jnp.ones(step.shape, bool)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            flags &= jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim)))
    return flags
