"""Collectives over the axes of the mesh, for functions mapped by `Layout.shard_map`."""

import jax
import jax.numpy as jnp

from dist_ens.layout.specs import DATA, ENSEMBLE


def data_index() -> jax.Array:
    """Returns the column of this device in the mesh, int32[]."""
    return jnp.int32(0) if jax.lax.axis_size(DATA) == 1 else jax.lax.axis_index(DATA)


def all_members(member_leaf: jax.Array) -> jax.Array:
    """Returns an array of all members, [members, ...], gathered from the devices of a column.

    Do not call it in an update, where members do not communicate.

    Args:
        member_leaf: Array of this device's members, [members of the device, ...].
    """
    if jax.lax.axis_size(ENSEMBLE) == 1:
        return member_leaf
    return jax.lax.all_gather(member_leaf, ENSEMBLE, tiled=True)
