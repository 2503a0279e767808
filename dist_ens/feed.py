"""What the calls of a run are given: batches from the host, or a split that stays on the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from dist_ens import cluster
from dist_ens.data import Source, Split, calls, training_batches
from dist_ens.ensemble import Drawn, Own
from dist_ens.layout import BATCHES, MEMBER_BATCHES, MEMBERS, REPLICATED, Layout
from dist_ens.methods import Order

# A split is kept on the device if it takes at most this part of the memory that is free there.
PART_OF_THE_MEMORY = 0.25


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

    A split that fits lies whole on every device, where each step draws its batch; any other is
    streamed. One that is not in memory yet is read for that only where the run needs as much of it.
    Examples and their order are the same either way.

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
    # By the whole run, so that one that goes on is given its batches as before.
    needs_as_much = last_step * order.global_batch_size >= len(split)
    worth_reading = split.in_memory or order.per_member or needs_as_much
    split_bytes, free_bytes = len(split) * source.spec.example_bytes, layout.free_bytes()
    fits = split_bytes <= PART_OF_THE_MEMORY * free_bytes
    if cluster.as_main_sees(worth_reading and fits):
        return map(Draws(put_whole(split, layout), order, layout, seed), steps_of_calls)
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
        member_ids: The members' lasting names; default 0, 1, 2, …
    """

    def __init__(
        self,
        split: Any,
        order: Order,
        layout: Layout,
        seed: int,
        member_ids: Sequence[int] | None = None,
    ) -> None:
        self._split = split
        self._order = order
        self._layout = layout
        self._seed = seed
        names = range(layout.num_members) if member_ids is None else member_ids
        self._member_ids = layout.put_members(np.array(names, np.int32))
        rows = np.arange(order.global_batch_size)
        spec = MEMBERS if order.per_member else REPLICATED

        # A program of its own: inside the update XLA would compute an index anew for every number
        # of its example.
        @partial(jax.jit, out_shardings=layout.sharding(spec))
        def indices(cursor: jax.Array, member_ids: jax.Array) -> jax.Array:
            if not order.per_member:
                return order.indices(cursor, rows)
            return jax.vmap(lambda member_id: order.indices(cursor, rows, member_id))(member_ids)

        self._indices = indices

    def __call__(self, steps: range) -> Drawn:
        """The batches of a call's steps."""
        cursor = self._layout.put_everywhere(self._order.cursor(self._seed, steps))
        return Drawn(self._split, self._indices(cursor, self._member_ids))


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
