"""Where the training set lies while members are trained on it."""

import dataclasses
import enum
from typing import Any

import jax

from dist_ens.ensemble import Batches, Drawn, MemberBatches
from dist_ens.layout import BATCHES, MEMBER_BATCHES, REPLICATED, Layout
from dist_ens.sampling import Order

# A split is kept on the devices if it takes at most this part of the memory that is free there.
PART_OF_THE_MEMORY = 0.25
INDEX_BYTES = 4


class Placement(enum.IntEnum):
    """Where a split is while members are trained on it."""

    REPLICATED = enum.auto()  # whole on every device, where each step draws its batch
    SHARDED = enum.auto()  # a part in each column, which receives its part of an epoch's batches
    STREAMED = enum.auto()  # the hosts send every batch

    def __str__(self) -> str:
        return {
            Placement.REPLICATED: "the training set whole on every device",
            Placement.SHARDED: "the training set divided over the columns",
            Placement.STREAMED: "batches sent by the hosts",
        }[self]


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The sizes of a split, which decide where it goes.

    Attributes:
        order: Order of the examples.
        example_bytes: Bytes of one example, all its leaves together.
        call_examples: Number of examples in all steps of a call.
    """

    order: Order
    example_bytes: int
    call_examples: int

    @property
    def num_examples(self) -> int:
        """Number of examples of all groups."""
        return self.order.num_examples * self.order.num_groups

    def is_worth_keeping(self, *, in_memory: bool, last_step: int, batch_size: int) -> bool:
        """Returns whether to read the split for the devices.

        A split that is read lazily is kept only if the run needs as many examples.

        Args:
            in_memory: Whether the split is read already.
            last_step: Number of steps of the whole run, so that a resumed run has the same batches.
            batch_size: Number of examples of each step, on all devices.
        """
        return in_memory or self.order.per_member or last_step * batch_size >= self.num_examples

    def place_on(self, layout: Layout, free_bytes: float) -> Placement:
        """Returns where the split goes.

        Args:
            layout: Layout of the members and the data.
            free_bytes: Free bytes on a device once the ensemble's state lies there.
        """
        places = [Placement.REPLICATED]
        if layout.data_axis > 1 and not self.order.per_member:  # else it is dealt as many times
            places.append(Placement.SHARDED)
        room = PART_OF_THE_MEMORY * free_bytes
        fitting = (p for p in places if self.device_bytes(p, layout) <= room)
        return next(fitting, Placement.STREAMED)

    def device_bytes(self, place: Placement, layout: Layout) -> int:
        """Returns the bytes of the split that a device keeps between two calls."""
        if place is Placement.REPLICATED:
            return self.num_examples * self.example_bytes
        if place is Placement.STREAMED:
            return 0
        # A column's part as it was read, and as it was dealt out for an epoch of whole calls.
        of_part, dealt = (
            -(-count // layout.data_axis)
            for count in (self.num_examples, self.num_examples + self.call_examples)
        )
        return of_part * self.example_bytes + dealt * (self.example_bytes + INDEX_BYTES)


def abstract_batches(
    layout: Layout,
    example: Any,
    steps: int,
    global_batch_size: int,
    place: Placement,
    *,
    order: Order | None = None,
    per_member: bool = False,
) -> Any:
    """Returns shapes, types and shardings of the batches of one call.

    Args:
        layout: Layout of the members and the data.
        example: Shapes and types of one example, a pytree.
        steps: Number of steps of the call.
        global_batch_size: Number of examples of each step.
        place: Where the split lies.
        order: Order of the examples, needed for a split on every device.
        per_member: Whether each member has batches of its own.
    """

    def stacked(leading: tuple[int, ...], where: Any, tree: Any) -> Any:
        sharding = layout.sharding(where)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (*leading, *leaf.shape), leaf.dtype, sharding=sharding
            ),
            tree,
        )

    if place is Placement.REPLICATED:
        if order is None:
            raise ValueError("A split on every device has an order: got order=None.")
        cursor = jax.ShapeDtypeStruct((steps, 3), "uint32", sharding=layout.sharding(REPLICATED))
        count = order.num_examples * order.num_groups
        return Drawn(stacked((count,), REPLICATED, example), cursor, order)
    of_call = steps, global_batch_size
    index = jax.ShapeDtypeStruct((), "int32")
    if per_member:
        leading = (layout.num_members, *of_call)
        return MemberBatches(*stacked(leading, MEMBER_BATCHES, (example, index)))
    return Batches(*stacked(of_call, BATCHES, (example, index)))
