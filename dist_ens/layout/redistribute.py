"""Gathering of batches from a split that is sharded over the columns of the mesh."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout.collectives import data_index
from dist_ens.layout.mesh import Layout
from dist_ens.layout.specs import BATCH, BATCHES, DATA


def redistribution_program(layout: Layout) -> Callable[[PyTree, jax.Array], PyTree]:
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
