"""Collectives over the axes of the mesh, for use inside lifted functions."""

import jax
import jax.numpy as jnp

from dist_ens.layout.specs import DATA, ENSEMBLE
from dist_ens.types import Tree


def has_data_axis() -> bool:
    """Returns whether the function that is being traced runs on a mesh with a data axis."""
    try:
        jax.lax.axis_size(DATA)
    except NameError:
        return False
    return True


def data_size() -> int:
    """Returns the number of columns of the mesh; 1 outside a lifted function."""
    return jax.lax.axis_size(DATA) if has_data_axis() else 1


def data_mean(tree: Tree) -> Tree:
    """Returns the mean over the data axis of every floating-point or complex leaf.

    Other leaves are unchanged. Outside a lifted function, all leaves are unchanged.

    Args:
        tree: Pytree of arrays, such as the gradients of one column's part of the batch.

    Returns:
        The pytree of means, which are equal in every column.

    >>> float(data_mean(jnp.float32(3.0)))
    3.0
    """
    if data_size() == 1:
        # XLA's CPU backend would keep the collective of one device. It would then no longer run the
        # operations of a small program in one thread, which costs a third of a small network's
        # step.
        return tree

    def mean(leaf: jax.Array) -> jax.Array:
        return jax.lax.pmean(leaf, DATA) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(mean, tree)


def data_sum(tree: Tree) -> Tree:
    """Returns the sum over the data axis of every leaf of a pytree of floating-point arrays."""
    return tree if data_size() == 1 else jax.lax.psum(tree, DATA)


def data_index() -> jax.Array:
    """Returns the column of this device in the mesh, int32[]; 0 outside a lifted function."""
    # With one column the index is a constant, so the function works without a mesh.
    return jnp.int32(0) if data_size() == 1 else jax.lax.axis_index(DATA)


def all_members(member_leaf: jax.Array) -> jax.Array:
    """Returns an array of all members, [members, ...], gathered from the devices of a column.

    Call it only inside a function lifted by `Layout.shard_map`, and not in an update, where members
    do not communicate.

    Args:
        member_leaf: Array of this device's members, [members of the device, ...].
    """
    if jax.lax.axis_size(ENSEMBLE) == 1:
        return member_leaf
    return jax.lax.all_gather(member_leaf, ENSEMBLE, tiled=True)
