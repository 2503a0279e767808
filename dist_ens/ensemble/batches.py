"""What the update of some steps is given: their batches, or a split to take them from."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from dist_ens.layout import BATCHES, MEMBER_BATCHES, REPLICATED, Layout, data_index
from dist_ens.sampling import Order


@partial(jax.tree_util.register_dataclass, data_fields=["split", "cursor"], meta_fields=["order"])
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Batches that the update takes from a whole split, which lies on every device.

    Attributes:
        split: `inputs` and `labels`, leaves [examples, ...].
        cursor: Where the steps stand in the order, uint32[steps, 3].
        order: In which the examples come.
    """

    split: Any
    cursor: Any
    order: Order


@partial(jax.tree_util.register_dataclass, data_fields=["split", "indices"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Located:
    """A device's part of drawn batches inside the update, which knows what examples they are.

    Attributes:
        split: From which they are drawn.
        indices: Of the examples, int32[steps, batch]; int32[members, steps, batch] where each
            member has batches of its own.
    """

    split: Any
    indices: Any


@partial(jax.tree_util.register_dataclass, data_fields=["examples"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Own:
    """Batches of which each member has its own, from the host.

    Attributes:
        examples: `inputs`, `labels` and `index`, leaves [members, steps, batch, ...].
    """

    examples: Any


def steps_in(batches: Any) -> int:
    """Steps of the call; shapes will do."""
    if isinstance(batches, Drawn):
        return len(batches.cursor)
    leaf = jax.tree.leaves(batches)[0]
    return leaf.shape[1] if isinstance(batches, Own) else leaf.shape[0]


def placement(batches: Any) -> Any:
    """How it lies on the mesh: specs for its leaves, or for branches of them."""
    if isinstance(batches, Drawn):
        return dataclasses.replace(batches, split=REPLICATED, cursor=REPLICATED)
    return Own(MEMBER_BATCHES) if isinstance(batches, Own) else BATCHES


def one_step(batches: Any, number: jax.Array) -> Any:
    """The call of one of its steps."""
    if isinstance(batches, Drawn):
        cursor = jax.lax.dynamic_slice_in_dim(batches.cursor, number, 1)
        return dataclasses.replace(batches, cursor=cursor)
    axis = 1 if isinstance(batches, Own) else 0
    return jax.tree.map(lambda b: jax.lax.dynamic_slice_in_dim(b, number, 1, axis), batches)


def located(batches: Any, member_ids: jax.Array, layout: Layout) -> Any:
    """`Drawn` batches as `Located`, others as they are; only inside `Layout.shard_map`.

    Each program does so for itself: that of one member, dispatched for every member, as often.

    Args:
        batches: Of the call.
        member_ids: The names of this device's members, int32[members].
        layout: Of the mesh.
    """
    if not isinstance(batches, Drawn):
        return batches
    size = batches.order.global_batch_size // layout.data_axis
    rows = data_index() * size + np.arange(size)
    indices = batches.order.member_indices(batches.cursor, rows, member_ids)
    # Else XLA might compute an index anew for every number of its example.
    return Located(batches.split, jax.lax.optimization_barrier(indices))


def by_member(batches: Any) -> tuple[Any, Any]:
    """What differs between members, leaves [members, steps, ...] or None; and what does not."""
    if isinstance(batches, Located) and batches.indices.ndim == 3:
        return batches.indices, Located(batches.split, None)
    return (batches.examples, None) if isinstance(batches, Own) else (None, batches)


def with_members(own: Any, shared: Any) -> Any:
    """The inverse of `by_member`, of what is given to an update."""
    return shared if own is None else Own(own)


def steps_of_member(own: Any, shared: Any) -> Any:
    """What differs between a member's steps: leaves [steps, ...]."""
    if own is not None:
        return own
    return shared.indices if isinstance(shared, Located) else shared


def batch_of(shared: Any, step: Any) -> Any:
    """This device's part of a member's batch of one step; only inside an update.

    Args:
        shared: What does not differ between members.
        step: Of `steps_of_member`, without the first axis.

    Returns:
        `inputs` and `labels`, leaves [batch, ...]; and where the split lies on the device `index`,
        the examples' positions in it, int32[batch].
    """
    if not isinstance(shared, Located):
        return step
    drawn = jax.tree.map(lambda leaf: leaf.at[step].get(mode="promise_in_bounds"), shared.split)
    return {**drawn, "index": step}
