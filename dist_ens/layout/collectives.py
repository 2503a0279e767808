"""Collectives over the axes of the mesh, and related functions for use where `Layout` maps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout.specs import BATCH, DATA, ENSEMBLE, REPLICATED


def data_index() -> jax.Array:
    """Returns the column of this device in the mesh, int32[]."""
    return jnp.int32(0) if jax.lax.axis_size(DATA) == 1 else jax.lax.axis_index(DATA)


def all_members(member_leaf: jax.Array) -> jax.Array:
    """Returns an array of all members, [members, ...], gathered from the devices of a column.

    Do not call it in an update, where members do not communicate.
    """
    if jax.lax.axis_size(ENSEMBLE) == 1:
        return member_leaf
    return jax.lax.all_gather(member_leaf, ENSEMBLE, tiled=True)


def sum_over_columns(fn: Callable[..., jax.Array], columns: int, *arrays: jax.Array) -> jax.Array:
    """Returns a sum over examples, as the sum of `fn`'s results for each column's examples.

    It is for functions mapped by `Layout.map_rows` where the compiler would gather the batch. `fn`
    must not use other arrays of the mapped function. If the examples do not divide over the
    columns, it is called once, with all of them.
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


def on_every_column(fn: Callable) -> Callable:
    """Returns a function, for use in `Layout.map_rows`, that every column computes by itself."""
    return jax.shard_map(
        fn, in_specs=REPLICATED, out_specs=REPLICATED, axis_names={DATA}, check_vma=False
    )


def without_axes(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns a function that raises a `UserError` where `fn` names an axis of the devices."""

    def explained(*args: PyTree) -> Tree:
        try:
            return fn(*args)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise UserError(
                f"The program names an axis of the devices: {str(error).partition('. ')[0]}. A "
                "step is written for one member and the whole batch, so means and batch statistics "
                "need no axis. Leave out psum and the like, and axis_name of BatchNorm."
            ) from error

    return explained
