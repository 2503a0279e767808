"""What the update of some steps is given: their batches, or a split to take them from."""

import dataclasses
from functools import partial
from typing import Any

import jax

from dist_ens.layout import BATCHES, MEMBER_BATCHES, MEMBERS, REPLICATED, Layout, data_index


@partial(jax.tree_util.register_dataclass, data_fields=["split", "indices"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Batches that the update takes from a whole split, which lies on every device.

    Attributes:
        split: `inputs` and `labels`, leaves [examples, ...].
        indices: Of the examples, int32[steps, batch]; int32[members, steps, batch] where each
            member has batches of its own.
    """

    split: Any
    indices: Any

    @property
    def per_member(self) -> bool:
        """Whether each member has batches of its own."""
        return self.indices.ndim == 3


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
        return batches.indices.shape[-2]
    leaf = jax.tree.leaves(batches)[0]
    return leaf.shape[1] if isinstance(batches, Own) else leaf.shape[0]


def placement(batches: Any) -> Any:
    """How it lies on the mesh: specs for its leaves, or for branches of them."""
    if isinstance(batches, Drawn):
        return Drawn(REPLICATED, MEMBERS if batches.per_member else REPLICATED)
    return Own(MEMBER_BATCHES) if isinstance(batches, Own) else BATCHES


def one_step(batches: Any, number: jax.Array) -> Any:
    """The call of one of its steps."""
    if isinstance(batches, Drawn):
        axis = batches.indices.ndim - 2
        step = jax.lax.dynamic_slice_in_dim(batches.indices, number, 1, axis)
        return dataclasses.replace(batches, indices=step)
    axis = 1 if isinstance(batches, Own) else 0
    return jax.tree.map(lambda b: jax.lax.dynamic_slice_in_dim(b, number, 1, axis), batches)


def by_member(batches: Any) -> tuple[Any, Any]:
    """What differs between members, leaves [members, steps, ...] or None; and what does not."""
    if isinstance(batches, Drawn) and batches.per_member:
        return batches.indices, Drawn(batches.split, None)
    return (batches.examples, None) if isinstance(batches, Own) else (None, batches)


def with_members(own: Any, shared: Any) -> Any:
    """The inverse of `by_member`."""
    if own is None:
        return shared
    return Own(own) if shared is None else dataclasses.replace(shared, indices=own)


def steps_of_member(own: Any, shared: Any) -> Any:
    """What differs between a member's steps: leaves [steps, ...]."""
    if own is not None:
        return own
    return shared.indices if isinstance(shared, Drawn) else shared


def batch_of(shared: Any, step: Any, layout: Layout) -> Any:
    """This device's part of a member's batch of one step; only inside `Layout.shard_map`.

    Args:
        shared: What does not differ between members.
        step: Of `steps_of_member`, without the first axis.
        layout: Of the mesh.

    Returns:
        `inputs` and `labels`, leaves [batch, ...]; and where the split lies on the device `index`,
        the examples' positions in it, int32[batch].
    """
    if not isinstance(shared, Drawn):
        return step
    if layout.data_axis > 1:
        size = len(step) // layout.data_axis
        step = jax.lax.dynamic_slice_in_dim(step, data_index() * size, size)
    drawn = jax.tree.map(lambda leaf: leaf.at[step].get(mode="promise_in_bounds"), shared.split)
    return {**drawn, "index": step}
