"""Members whose numbers are finite, read from a state."""

import itertools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.checkpoint import Leaf
from dist_ens.ensemble import Ensemble
from dist_ens.ground.types import PyTree
from dist_ens.layout import MEMBERS, Waves, to_host


def finite_members(tree: PyTree, ensemble: Ensemble) -> np.ndarray:
    """Returns which members have only finite numbers in a part of the state, bool[members].

    Every host must call this.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        return np.ones(ensemble.num_members, bool)
    waves = Waves(ensemble.layout, ensemble.waves)
    with jax.transfer_guard("allow"):
        if waves.count == 1:
            return np.asarray(to_host(_are_finite(leaves)))
        parts = [_are_finite(waves.take(leaves, number)) for number in range(waves.count)]
        return np.asarray(to_host(waves.join(parts, MEMBERS)))


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether all numbers of each member are finite, bool[members]."""
    flags = [jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim))) for leaf in leaves]
    return jnp.stack(flags).all(axis=0)


def has_finite_member(saved: Mapping[str, Leaf]) -> bool:
    """Returns whether a member has only finite parameters in a state that one host saves."""
    leaves = [
        leaf
        for name, leaf in saved.items()
        if name.split(".")[0] == "params" and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    members = range(leaves[0].shape[0]) if leaves else range(1)
    return any(  # As a rule, the first one is finite.
        all(np.isfinite(part).all() for part in itertools.chain(*(_of(leaf, k) for leaf in leaves)))
        for k in members
    )


def _of(leaf: Leaf, position: int) -> Iterator[np.ndarray]:
    """Yields the parts of a leaf that belong to the member at a position."""
    for piece in leaf.pieces:
        start, stop, _ = piece.index[0].indices(leaf.shape[0])
        if start <= position < stop:
            yield np.asarray(piece.array)[position - start]
