"""Collectives over the axes of the mesh, for functions mapped by `Layout`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dist_ens.layout.specs import BATCH, DATA, ENSEMBLE, REPLICATED


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


def sum_over_columns(fn: Callable[..., jax.Array], columns: int, *arrays: jax.Array) -> jax.Array:
    """Returns a sum over examples, as the sum of `fn`'s results for each column's examples.

    Use it in a function mapped by `Layout.map_rows` where the compiler would gather the batch.

    Args:
        fn: Function of arrays of some examples that returns a sum over them. It must not use other
            arrays of the mapped function.
        columns: Number of columns of the mesh. If the number of examples does not divide over them,
            `fn` is called once, with all examples.
        *arrays: Arguments of `fn`, [batch, ...].
    """
    if columns == 1 or any(len(array) % columns for array in arrays):
        return fn(*arrays)
    return jax.shard_map(
        lambda *parts: jax.lax.psum(fn(*parts), DATA),
        in_specs=BATCH,
        out_specs=REPLICATED,
        axis_names={DATA},
        check_vma=False,
    )(*arrays)
