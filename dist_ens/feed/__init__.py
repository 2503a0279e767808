"""What a run's calls are given: batches from the hosts, or of a split that stays on the devices.

A split goes where there is room for it, and the examples and their order are the same everywhere.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from dist_ens import cluster
from dist_ens.data import Source, Spec, Split, calls, training_batches
from dist_ens.ensemble import Drawn, Own
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCHES,
    REPLICATED,
    Layout,
    dealing_program,
)
from dist_ens.sampling import Order

# A split is kept on the devices if it takes at most this part of the memory that is free there.
PART_OF_THE_MEMORY = 0.25
INDEX_BYTES = 4


class Place(enum.IntEnum):
    """Where a split is while members are trained on it."""

    EVERYWHERE = enum.auto()  # whole on every device, where each step draws its batch
    DIVIDED = enum.auto()  # a part in each column, which is dealt its part of an epoch's batches
    HOSTS = enum.auto()  # the hosts send every batch

    def __str__(self) -> str:
        return {
            Place.EVERYWHERE: "the training set whole on every device",
            Place.DIVIDED: "the training set divided over the columns",
            Place.HOSTS: "batches sent by the hosts",
        }[self]


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """What decides where a split goes.

    Attributes:
        order: Of its examples.
        example_bytes: Of each, with its label.
        call_examples: Of all steps of a call.
    """

    order: Order
    example_bytes: int
    call_examples: int

    @property
    def num_examples(self) -> int:
        """Of all groups."""
        return self.order.num_examples * self.order.num_groups

    def is_worth_keeping(self, *, in_memory: bool, last_step: int, batch_size: int) -> bool:
        """Whether to read it for the devices: one that is read late, where a run needs as much.

        Args:
            in_memory: Whether it is read already.
            last_step: Of the whole run, so that one that goes on is given its batches as before.
            batch_size: Examples of each step, on all devices.
        """
        return in_memory or self.order.per_member or last_step * batch_size >= self.num_examples

    def place_on(self, layout: Layout, free_bytes: float) -> Place:
        """Where it goes.

        Args:
            layout: Of the mesh.
            free_bytes: On a device, once the ensemble's state lies there.
        """
        places = [Place.EVERYWHERE]
        if layout.data_axis > 1 and not self.order.per_member:  # else it is dealt as many times
            places.append(Place.DIVIDED)
        room = PART_OF_THE_MEMORY * free_bytes
        return next((p for p in places if self.device_bytes(p, layout) <= room), Place.HOSTS)

    def device_bytes(self, place: Place, layout: Layout) -> int:
        """What a device keeps of it between two calls."""
        if place is Place.EVERYWHERE:
            return self.num_examples * self.example_bytes
        if place is Place.HOSTS:
            return 0
        # A column's part as it was read, and as it was dealt out for an epoch of whole calls.
        of_part, dealt = (
            -(-count // layout.data_axis)
            for count in (self.num_examples, self.num_examples + self.call_examples)
        )
        return of_part * self.example_bytes + dealt * (self.example_bytes + INDEX_BYTES)


def feed(
    source: Source,
    order: Order,
    layout: Layout,
    *,
    seed: int,
    first_step: int,
    last_step: int,
    steps_per_call: int,
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Any]:
    """What `Ensemble.update` is given, call after call.

    A split that fits lies on the devices, see `Place`; any other is streamed. One that is not in
    memory yet is read for that only where the run needs as much of it.

    Args:
        source: Of the training examples.
        order: In which they come.
        layout: Where they go.
        seed: Of the order, in [0, 2**32).
        first_step: Steps already taken.
        last_step: Steps of the whole run.
        steps_per_call: Steps of one call.
        say: Takes a sentence for people, on what is sent where members have orders of their own.

    Returns:
        The batches of each call, on the mesh.
    """
    split, steps_of_calls = source.train, calls(first_step, last_step, steps_per_call)
    training_set = TrainingSet(
        order, source.spec.example_bytes, steps_per_call * order.global_batch_size
    )
    place = Place.HOSTS
    if training_set.is_worth_keeping(
        in_memory=split.in_memory, last_step=last_step, batch_size=order.global_batch_size
    ):
        place = training_set.place_on(layout, layout.free_bytes())
    place = Place(cluster.as_main_sees(place))
    if place is Place.EVERYWHERE:
        return map(Draws(put_whole(split, layout), order, layout, seed), steps_of_calls)
    if place is Place.DIVIDED:
        return map(Deals(split, order, layout, seed, steps_per_call), steps_of_calls)
    if order.per_member:
        step_bytes = order.global_batch_size * source.spec.example_bytes * layout.num_members
        say(
            "Each member has an order of its own, and the training set does not fit on a device: "
            f"{step_bytes / 2**20:.3g} MiB a step are sent from the hosts, "
            f"{layout.num_members} times what one order for all would be."
        )
    return _streamed(split, order, layout, seed, steps_of_calls)


class Draws:
    """What calls of the update are given, from a split that lies on every device.

    Args:
        split: From `put_whole`.
        order: Of the examples.
        layout: Of the mesh.
        seed: Of the order, in [0, 2**32).
    """

    def __init__(self, split: Any, order: Order, layout: Layout, seed: int) -> None:
        self._split = split
        self._order = order
        self._layout = layout
        self._seed = seed

    def __call__(self, steps: range) -> Drawn:
        """The batches of a call's steps."""
        cursor = self._layout.put_everywhere(self._order.cursor(self._seed, steps))
        return Drawn(self._split, cursor, self._order)


class Deals:
    """What calls of the update are given, of a split that is divided along the data axis.

    The batches of an epoch of whole calls are dealt out at a time, from which calls have theirs.

    Args:
        split: The training examples.
        order: Of the examples, one for all members.
        layout: Of the mesh.
        seed: Of the order, in [0, 2**32).
        steps_per_call: Of the calls, which come in their order.
    """

    def __init__(
        self, split: Split, order: Order, layout: Layout, seed: int, steps_per_call: int
    ) -> None:
        count = layout.data_axis * -(-len(split) // layout.data_axis)
        rows = np.minimum(layout.host_rows(count), len(split) - 1)  # the last part is filled up
        self._parts = layout.put(split.take(rows), count, BATCH)
        self._order = order
        self._seed = seed
        # Each column has the indices of its part of the batches.
        self._indices = jax.jit(
            lambda cursor: order.indices(cursor, np.arange(order.global_batch_size)),
            out_shardings=layout.sharding(BATCHES),
        )
        self._deal = dealing_program(layout)
        self._layout = layout
        call_examples = order.global_batch_size * steps_per_call
        self._steps_of_deal = -(-order.epoch_length // call_examples) * steps_per_call
        self._dealt, self._steps = None, range(0)

        @partial(jax.jit, static_argnames="count", out_shardings=layout.sharding(BATCHES))
        def of_call(dealt: Any, first: jax.Array, count: int) -> Any:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), dealt
            )

        self._of_call = of_call

    def __call__(self, steps: range) -> Any:
        """The batches of a call's steps."""
        if steps.stop > self._steps.stop:
            self._dealt = None  # makes room for the next
            self._steps = range(steps.start, steps.start + self._steps_of_deal)
            cursor = self._layout.put_everywhere(self._order.cursor(self._seed, self._steps))
            self._dealt = self._deal(self._parts, self._indices(cursor))
        first = self._layout.put_everywhere(np.int32(steps.start - self._steps.start))
        return self._of_call(self._dealt, first, len(steps))


def abstract_batches(
    layout: Layout,
    spec: Spec,
    steps: int,
    global_batch_size: int,
    place: Place,
    *,
    order: Order | None = None,
    per_member: bool = False,
) -> Any:
    """Shapes, types and shardings of what one call is given.

    Args:
        layout: Of the mesh.
        spec: Of one example.
        steps: Of the call.
        global_batch_size: Examples of each step.
        place: Of the split.
        order: Of a split that is on every device.
        per_member: Whether each member has batches of its own.
    """

    def examples(leading: tuple[int, ...], where: Any) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = layout.sharding(where)
        shapes = {
            "inputs": (spec.input_shape, spec.input_dtype),
            "labels": (spec.label_shape, spec.label_dtype),
        }
        if place is not Place.EVERYWHERE:
            shapes["index"] = ((), "int32")
        return {
            name: jax.ShapeDtypeStruct((*leading, *shape), dtype, sharding=sharding)
            for name, (shape, dtype) in shapes.items()
        }

    if place is Place.EVERYWHERE:
        if order is None:
            raise ValueError("A split on every device has an order. Received: None. Give it.")
        cursor = jax.ShapeDtypeStruct((steps, 3), "uint32", sharding=layout.sharding(REPLICATED))
        count = order.num_examples * order.num_groups
        return Drawn(examples((count,), REPLICATED), cursor, order)
    of_call = steps, global_batch_size
    if per_member:
        return Own(examples((layout.num_members, *of_call), MEMBER_BATCHES))
    return examples(of_call, BATCHES)


def put_whole(split: Split, layout: Layout) -> Any:
    """All examples of a split, everywhere on the mesh."""
    return layout.put_everywhere(split.take(np.arange(len(split))))


def _streamed(
    split: Split, order: Order, layout: Layout, seed: int, steps_of_calls: list[range]
) -> Iterator[Any]:
    size = order.global_batch_size
    host_rows = layout.host_rows(size)
    for batches in training_batches(
        split,
        order,
        seed=seed,
        host_rows=host_rows,
        calls=steps_of_calls,
        member_ids=layout.host_members.tolist(),
    ):
        yield (
            Own(layout.put(batches, size, MEMBER_BATCHES))
            if order.per_member
            else layout.put(batches, size, BATCHES)
        )
