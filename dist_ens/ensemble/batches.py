"""What the update of some steps is given: their batches, or a split to draw them from."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.layout import BATCHES, REPLICATED, Layout, data_index
from dist_ens.methods import Cursor, Order


@partial(jax.tree_util.register_dataclass, data_fields=["split", "cursor"], meta_fields=["order"])
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Batches that the update draws itself, from a whole split on every device.

    Attributes:
        split: `inputs` and `labels`, leaves [examples, ...].
        cursor: Where the steps of the call stand, leaves [steps, ...].
        order: Of the examples.
    """

    split: Any
    cursor: Cursor
    order: Order


def steps_of(batches: Any) -> Any:
    """What differs from step to step: leaves [steps, ...]."""
    return batches.cursor if isinstance(batches, Drawn) else batches


def num_steps(batches: Any) -> int:
    """Steps of the call; shapes will do."""
    return len(jax.tree.leaves(steps_of(batches))[0])


def with_steps(batches: Any, steps: Any) -> Any:
    """The same, of other steps; the inverse of `steps_of`."""
    return dataclasses.replace(batches, cursor=steps) if isinstance(batches, Drawn) else steps


def placement(batches: Any) -> Any:
    """How all of it lies on the mesh."""
    return REPLICATED if isinstance(batches, Drawn) else BATCHES


def batch_of(batches: Any, step: Any, member_id: jax.Array, layout: Layout) -> Any:
    """This device's part of a member's batch of one step; only inside `Layout.shard_map`.

    Args:
        batches: Of the call.
        step: Of `steps_of`, without the first axis.
        member_id: The member's.
        layout: Of the mesh.

    Returns:
        `inputs` and `labels`, leaves [batch, ...].
    """
    if not isinstance(batches, Drawn):
        return step
    per_column = batches.order.global_batch_size // layout.data_axis
    rows = data_index() * per_column + jnp.arange(per_column)
    indices = batches.order.indices(step, rows, member_id)
    return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), batches.split)
