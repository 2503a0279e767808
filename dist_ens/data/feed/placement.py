"""Placement of the training set during training."""

import dataclasses
import enum

import jax

from dist_ens.ensemble import Batches, Drawn, MemberBatches
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ground.types import Shapes, Specs
from dist_ens.layout import BATCHES, MEMBER_BATCHES, REPLICATED, Layout
from dist_ens.sampling import Order

# A split is kept on the devices if it needs at most this part of their free memory.
PART_OF_THE_MEMORY = 0.25
INDEX_BYTES = 4


class Placement(enum.IntEnum):
    """Placement of a split during training."""

    REPLICATED = enum.auto()  # Every device holds all examples, and draws the batch of each step.
    SHARDED = enum.auto()  # A column holds a part, and gets its part of an epoch's batches.
    STREAMED = enum.auto()  # The hosts send every batch.

    def __str__(self) -> str:
        return {
            Placement.REPLICATED: "the training set whole on every device",
            Placement.SHARDED: "the training set divided over the columns",
            Placement.STREAMED: "batches sent by the hosts",
        }[self]


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The sizes of a split and of a call, which decide its placement."""

    order: Order
    example_bytes: int
    call_examples: int  # In all steps of a call.

    @property
    def num_examples(self) -> int:
        """Number of examples of all groups."""
        return self.order.num_examples * self.order.num_groups

    def is_worth_keeping(self, *, in_memory: bool, last_step: int, batch_size: int) -> bool:
        """Returns whether to keep the split on the devices if it fits there.

        A split in memory is always kept there, and any split if each member has its own order.
        Any other split is kept there if the whole run needs at least as many examples as it has.
        """
        return in_memory or self.order.per_member or last_step * batch_size >= self.num_examples

    def place_on(self, layout: Layout, free_bytes: float) -> Placement:
        """Returns the first placement that fits: replicated, sharded, otherwise streamed.

        `free_bytes` is the free memory of a device that holds its part of the state.
        """
        places = [Placement.REPLICATED]
        # Members with their own orders would each need their own copy of the redistributed batches.
        if layout.data_axis > 1 and not self.order.per_member:
            places.append(Placement.SHARDED)
        room = PART_OF_THE_MEMORY * free_bytes
        fitting = (p for p in places if self.device_bytes(p, layout) <= room)
        return next(fitting, Placement.STREAMED)

    def device_bytes(self, place: Placement, layout: Layout) -> int:
        """Returns the bytes that a device keeps of the split between two calls."""
        if place is Placement.REPLICATED:
            return self.num_examples * self.example_bytes
        if place is Placement.STREAMED:
            return 0
        # A column holds its part of the split, and its part of an epoch's batches in whole calls.
        of_part, dealt = (
            -(-count // layout.data_axis)
            for count in (self.num_examples, self.num_examples + self.call_examples)
        )
        return of_part * self.example_bytes + dealt * (self.example_bytes + INDEX_BYTES)


def abstract_batches(
    layout: Layout,
    example: Shapes,
    steps: int,
    global_batch_size: int,
    place: Placement,
    *,
    order: Order | None = None,
    per_member: bool = False,
) -> CallBatches:
    """Returns shapes, types and shardings of the batches of one call.

    A replicated split needs the `order` of its examples.
    """

    def stacked(leading: tuple[int, ...], where: Specs, tree: Shapes) -> Shapes:
        sharding = layout.sharding(where)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (*leading, *leaf.shape), leaf.dtype, sharding=sharding
            ),
            tree,
        )

    if place is Placement.REPLICATED and order is not None:
        cursor = jax.ShapeDtypeStruct((steps, 3), "uint32", sharding=layout.sharding(REPLICATED))
        count = order.num_examples * order.num_groups
        return Drawn(stacked((count,), REPLICATED, example), cursor, order)
    of_call = steps, global_batch_size
    index = jax.ShapeDtypeStruct((), "int32")
    if per_member:
        leading = (layout.num_members, *of_call)
        return MemberBatches(*stacked(leading, MEMBER_BATCHES, (example, index)))
    return Batches(*stacked(of_call, BATCHES, (example, index)))
