"""What the calls of a run are given: batches from the host, or a split that stays on the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from dist_ens import cluster
from dist_ens.data import Source, Split, calls, training_batches
from dist_ens.ensemble import Drawn
from dist_ens.errors import UserError
from dist_ens.layout import BATCHES, MEMBERS, REPLICATED, Layout
from dist_ens.methods import Cursor, Order

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

    Returns:
        The batches of each call, on the mesh.

    Raises:
        UserError: If members have orders of their own over a split that is streamed.
    """
    split, steps_of_calls = source.train, calls(first_step, last_step, steps_per_call)
    # By the whole run, so that one that goes on is given its batches as before.
    needs_as_much = last_step * order.global_batch_size >= len(split)
    worth_reading = split.in_memory or order.per_member or needs_as_much
    split_bytes, free_bytes = len(split) * source.spec.example_bytes, layout.free_bytes()
    fits = split_bytes <= PART_OF_THE_MEMORY * free_bytes
    if cluster.as_main_sees(worth_reading and fits):
        return _drawn(split, order, layout, seed, steps_of_calls)
    if order.per_member:
        raise UserError(
            "Members draw batches of their own from a split that fits on a device, in a quarter of "
            f"what is free there. Received: {split_bytes / 2**30:.3g} GiB for "
            f"{free_bytes / 2**30:.3g} GiB that are free. Set --config.data.examples=shared."
        )
    return _streamed(split, order, layout, seed, steps_of_calls)


def index_program(
    order: Order, layout: Layout, member_ids: Sequence[int] | None = None
) -> Callable[[Cursor], jax.Array]:
    """The program that computes which examples the batches of a call are.

    One of its own: inside the update XLA would compute an index anew for every number of its
    example.

    Args:
        order: Of the examples.
        layout: Of the mesh.
        member_ids: The members' lasting names; default 0, 1, 2, …

    Returns:
        A jitted function of a cursor on the host, leaves [steps, ...]; it returns `Drawn.indices`.
    """
    rows = np.arange(order.global_batch_size)
    names = range(layout.num_members) if member_ids is None else member_ids
    ids = layout.put_members(np.array(names, np.int32))
    spec = MEMBERS if order.per_member else REPLICATED

    @partial(jax.jit, out_shardings=layout.sharding(spec))
    def indices(cursor: Cursor, member_ids: jax.Array) -> jax.Array:
        if not order.per_member:
            return order.indices(cursor, rows)
        return jax.vmap(lambda member_id: order.indices(cursor, rows, member_id))(member_ids)

    return lambda cursor: indices(layout.put_everywhere(cursor), ids)


def _drawn(
    split: Split, order: Order, layout: Layout, seed: int, steps_of_calls: list[range]
) -> Iterator[Any]:
    on_devices = layout.put_everywhere(split.take(np.arange(len(split))))
    indices = index_program(order, layout)
    return (Drawn(on_devices, indices(order.cursor(seed, steps))) for steps in steps_of_calls)


def _streamed(
    split: Split, order: Order, layout: Layout, seed: int, steps_of_calls: list[range]
) -> Iterator[Any]:
    size = order.global_batch_size
    host_rows = layout.host_rows(size)
    for batches in training_batches(
        split, order, seed=seed, host_rows=host_rows, calls=steps_of_calls
    ):
        yield layout.put(batches, size, BATCHES)
