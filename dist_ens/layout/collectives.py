"""Collectives over the axes of the mesh, and related functions for use where `Layout` maps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout.specs import BATCH, BATCHES, DATA, ENSEMBLE, REPLICATED

if TYPE_CHECKING:
    from dist_ens.layout.mesh import Layout


def data_index() -> jax.Array:
    """Returns the column of this device in the mesh, int32[]."""
    return jnp.int32(0) if jax.lax.axis_size(DATA) == 1 else jax.lax.axis_index(DATA)


def all_members(member_leaf: jax.Array) -> jax.Array:
    """Returns an array of all members, [members, ...]. An update must not call it."""
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


def redistribution_program(layout: "Layout") -> Callable[[PyTree, jax.Array], PyTree]:
    """Returns the program that gathers batches from a sharded split: `deal(parts, indices)`.

    `parts` has leaves [examples, ...] with the spec `BATCH`. `indices` holds the positions of the
    batches' examples, int32[steps, batch] with the spec `BATCHES`. The program returns leaves
    [steps, batch, ...] with the spec `BATCHES`. The data axis divides the examples and the batch.

    A copy of each column's part is passed around the columns of its row, and each column gathers
    its examples from every part. So no device holds the whole split, and nothing crosses the
    ensemble axis.
    """
    columns = layout.data_axis

    def deal(part: Tree, wanted: jax.Array) -> Tree:
        part_length = len(jax.tree.leaves(part)[0])

        def look_and_pass_on(number: jax.Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            passing, found = carry
            owner = (data_index() - number) % columns
            rows = wanted - owner * part_length
            is_here = (rows >= 0) & (rows < part_length)
            rows = jnp.clip(rows, 0, part_length - 1)

            def with_those_here(leaf: jax.Array, so_far: jax.Array) -> jax.Array:
                mask = is_here.reshape(is_here.shape + (1,) * (leaf.ndim - 1))
                return jnp.where(mask, leaf.at[rows].get(mode="promise_in_bounds"), so_far)

            found = jax.tree.map(with_those_here, passing, found)
            ring = [(column, (column + 1) % columns) for column in range(columns)]
            passing = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, DATA, ring), passing)
            return passing, found

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros((*wanted.shape, *leaf.shape[1:]), leaf.dtype), part
        )
        _, found = jax.lax.fori_loop(0, columns, look_and_pass_on, (part, nothing))
        return found

    return jax.jit(layout.shard_map(deal, in_specs=(BATCH, BATCHES), out_specs=BATCHES))
