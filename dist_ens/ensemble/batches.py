"""The batches of one call of the update, given as arrays or drawn from a split on the devices."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

from dist_ens.ground.shared import NOTHING_SHARED, Shared
from dist_ens.ground.types import Batch, Leaf, PyTree, Shapes, Specs
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCHES,
    REPLICATED,
    Layout,
    is_spec,
    put_everywhere,
)
from dist_ens.sampling import Order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["examples", "index", "steps", "shared"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of some steps, the same for all members.

    `examples` has leaves [steps, batch, ...], or [steps, ...] of any shape with a data axis of 1.
    `index` holds the examples' positions in the training split, int32[steps, batch]. `steps` is any
    array [steps], needed only if the examples have no arrays. `shared` holds the arrays that all
    members share, in each of the three forms.
    """

    examples: PyTree
    index: Leaf | None = None
    steps: Leaf | None = None
    shared: Shared = NOTHING_SHARED

    @classmethod
    def put(cls, layout: Layout, steps: Sequence[Batch], specs: Specs) -> "Batches":
        """Returns the batches of some steps on a layout, from this host's part of each batch."""
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        of_call = jax.tree.map(
            lambda spec: BATCHES if spec == BATCH else spec, specs, is_leaf=is_spec
        )
        if jax.tree.leaves(stacked):
            return cls(layout.put(stacked, of_call))
        return cls(stacked, steps=put_everywhere(layout, np.zeros(len(steps), np.int32)))

    @classmethod
    def shapes_of_step(cls, batch: Shapes, index: Shapes = None) -> "Batches":
        """Returns the shapes of the batches of one step, from those of a batch and positions."""
        examples, index = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), (batch, index)
        )
        return cls(examples, index, None if jax.tree.leaves(examples) else np.zeros(1, np.int32))


@partial(
    jax.tree_util.register_dataclass, data_fields=["examples", "index", "shared"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class MemberBatches:
    """The batches of some steps, different for each member.

    `examples` has leaves [members, steps, batch, ...], and `index` is int32[members, steps, batch].
    """

    examples: PyTree
    index: Leaf | None = None
    shared: Shared = NOTHING_SHARED


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["split", "cursor", "shared"],
    meta_fields=["order"],
)
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Batches that the update draws from a whole split, which is on every device.

    `split` has leaves [examples, ...]. `cursor` holds the positions of the steps in the stream of
    examples, uint32[steps, 3].
    """

    split: PyTree
    cursor: Leaf
    order: Order
    shared: Shared = NOTHING_SHARED


# The batches of a call of the update, in one of the three forms.
CallBatches: TypeAlias = Batches | MemberBatches | Drawn


def as_batches(batches: CallBatches | PyTree) -> CallBatches:
    """Returns the batches of a call. A bare pytree [steps, batch, ...] becomes `Batches`."""
    return batches if isinstance(batches, Batches | MemberBatches | Drawn) else Batches(batches)


def rows_of(batch: Shapes) -> int | None:
    """Returns the number of rows that every leaf of a batch has; None if they do not agree."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None


def steps_in(batches: CallBatches | PyTree) -> int:
    """Returns the number of steps of a call, from its batches or their shapes."""
    if isinstance(batches, Drawn):
        return len(batches.cursor)
    leaf = jax.tree.leaves(batches)[0]
    return leaf.shape[1] if isinstance(batches, MemberBatches) else leaf.shape[0]


def specs_of(batches: CallBatches | PyTree) -> Specs:
    """Returns the specs of batches on their mesh, a tree prefix of them."""
    if not isinstance(batches, Batches | MemberBatches | Drawn):
        return BATCHES
    kind: Callable[..., PyTree] = type(batches)
    if isinstance(batches, Drawn):
        return kind(REPLICATED, REPLICATED, batches.order, REPLICATED)
    spec = MEMBER_BATCHES if isinstance(batches, MemberBatches) else BATCHES
    names = [field.name for field in dataclasses.fields(batches)]
    return kind(**dict.fromkeys(names, spec) | {"shared": REPLICATED})


def one_step(batches: CallBatches, number: jax.Array) -> CallBatches:
    """Returns the batches of one step of a call."""
    if isinstance(batches, Drawn):
        cursor = jax.lax.dynamic_slice_in_dim(batches.cursor, number, 1)
        return dataclasses.replace(batches, cursor=cursor)
    axis = 1 if isinstance(batches, MemberBatches) else 0
    per_step = dataclasses.replace(batches, shared=NOTHING_SHARED)
    one = jax.tree.map(lambda b: jax.lax.dynamic_slice_in_dim(b, number, 1, axis), per_step)
    return dataclasses.replace(one, shared=batches.shared)


def located(batches: Drawn, member_ids: jax.Array, layout: Layout, column: jax.Array) -> jax.Array:
    """Returns positions of drawn examples in their split, int32[steps, batch] or [members, ...]."""
    size = batches.order.global_batch_size // layout.data_axis
    rows = column * size + np.arange(size)
    indices = batches.order.member_indices(batches.cursor, rows, member_ids)
    # Without the barrier, XLA might compute an index again for every number of its example.
    return jax.lax.optimization_barrier(indices)
