"""Training data on its way to the devices: resident, sharded or streamed.

The free memory of the devices decides where a split is placed. The examples of a step and their
order do not depend on the placement.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from dist_ens.data import Split, calls, example_bytes_of, training_batches
from dist_ens.ensemble import Batches, Drawn, MemberBatches
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ground.types import PyTree, Shapes, Specs
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCHES,
    REPLICATED,
    Layout,
    put_everywhere,
    redistribution_program,
)
from dist_ens.processes import cluster
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

    def is_worth_keeping(self, *, in_memory: bool, last_step: int) -> bool:
        """Returns whether to keep the split on the devices if it fits there.

        A split in memory is always kept there, and any split if each member has its own order.
        Any other split is kept there if the whole run needs at least as many examples as it has.
        """
        seen = last_step * self.order.global_batch_size
        return in_memory or self.order.per_member or seen >= self.num_examples

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


def put_whole(split: Split, layout: Layout) -> PyTree:
    """Puts all examples of a split on every device of the mesh."""
    return put_everywhere(layout, split.take(np.arange(len(split))))


class ResidentFeed:
    """The batches of each call, drawn by the devices from a split of `put_whole`."""

    def __init__(self, split: PyTree, order: Order, layout: Layout, seed: int) -> None:
        self._split, self._order, self._layout, self._seed = split, order, layout, seed

    def __call__(self, steps: range) -> Drawn:
        """Returns the batches of the steps of one call."""
        cursor = put_everywhere(self._layout, self._order.cursor(self._seed, steps))
        return Drawn(self._split, cursor, self._order)


class ShardedFeed:
    """The batches of each call, from a split that is sharded along the data axis.

    The columns exchange the batches of one epoch of whole calls at a time. Each call takes its
    batches from these. All members have the same order, and calls must be requested in order.
    """

    def __init__(
        self, split: Split, order: Order, layout: Layout, seed: int, steps_per_call: int
    ) -> None:
        count = layout.data_axis * -(-len(split) // layout.data_axis)
        # Copies of the last example fill up the last part.
        rows = np.minimum(layout.host_rows(count), len(split) - 1)
        self._parts = layout.put(split.take(rows), BATCH)
        self._order, self._layout, self._seed = order, layout, seed
        # Each column computes the indices of its part of the batches only.
        self._indices = jax.jit(
            lambda cursor: order.indices(cursor, np.arange(order.global_batch_size)),
            out_shardings=layout.sharding(BATCHES),
        )
        self._deal = redistribution_program(layout)
        call_examples = order.global_batch_size * steps_per_call
        self._steps_of_deal = -(-order.epoch_length // call_examples) * steps_per_call
        self._dealt: Batches | None = None
        self._steps = range(0)

        @partial(jax.jit, static_argnames="count", out_shardings=layout.sharding(BATCHES))
        def of_call(dealt: PyTree, first: jax.Array, count: int) -> PyTree:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), dealt
            )

        self._of_call = of_call

    def __call__(self, steps: range) -> Batches:
        """Returns the batches of the steps of one call."""
        if steps.stop > self._steps.stop:
            self._dealt = None  # Its memory is free before the next batches are made.
            self._steps = range(steps.start, steps.start + self._steps_of_deal)
            cursor = put_everywhere(self._layout, self._order.cursor(self._seed, self._steps))
            indices = self._indices(cursor)
            self._dealt = Batches(self._deal(self._parts, indices), indices)
        first = put_everywhere(self._layout, np.int32(steps.start - self._steps.start))
        return self._of_call(self._dealt, first, len(steps))


def feed(
    split: Split,
    order: Order,
    layout: Layout,
    *,
    seed: int,
    first_step: int,
    last_step: int,
    steps_per_call: int,
    member_ids: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[CallBatches]:
    """Returns an iterator over the batches that `Ensemble.update_steps` takes.

    A split that fits is kept on the devices, see `Placement`. Any other split is streamed. So is a
    split that `TrainingSet.is_worth_keeping` finds too large for the run.

    The orders of members depend on their ids, by default their positions. `say` prints a sentence
    if a split is streamed whose members have their own orders: the hosts then send much data.
    """
    steps_of_calls = calls(first_step, last_step, steps_per_call)
    example_bytes = example_bytes_of(split)
    training_set = TrainingSet(order, example_bytes, steps_per_call * order.global_batch_size)
    place = Placement.STREAMED
    if training_set.is_worth_keeping(in_memory=split.in_memory, last_step=last_step):
        place = training_set.place_on(layout, layout.free_bytes())
    place = Placement(cluster.as_main_sees(place))
    if place is Placement.REPLICATED:
        return map(ResidentFeed(put_whole(split, layout), order, layout, seed), steps_of_calls)
    if place is Placement.SHARDED:
        return map(ShardedFeed(split, order, layout, seed, steps_per_call), steps_of_calls)
    if order.per_member:
        step_bytes = order.global_batch_size * example_bytes * layout.num_members
        say(
            "Each member has its own order, and the training set does not fit on a device. So the "
            f"hosts send {step_bytes / 2**20:.3g} MiB per step, {layout.num_members} times as much "
            "as with one order for all members."
        )
    ids = range(layout.num_members) if member_ids is None else member_ids
    return _streamed(split, order, layout, seed, steps_of_calls, ids)


def _streamed(
    split: Split,
    order: Order,
    layout: Layout,
    seed: int,
    steps_of_calls: list[range],
    member_ids: Sequence[int],
) -> Iterator[CallBatches]:
    """Yields the batches of each call, which the hosts read and send to the devices."""
    for batch in training_batches(
        split,
        order,
        seed=seed,
        host_rows=layout.host_rows(order.global_batch_size),
        calls=steps_of_calls,
        member_ids=[member_ids[position] for position in layout.host_members],
    ):
        if order.per_member:
            yield MemberBatches(*layout.put(batch, MEMBER_BATCHES))
        else:
            yield Batches(*layout.put(batch, BATCHES))
