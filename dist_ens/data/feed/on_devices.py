"""A training set that the devices hold: every device all examples, or every column a part."""

from functools import partial

import jax
import numpy as np

from dist_ens.data import Split
from dist_ens.ensemble import Batches, Drawn
from dist_ens.ground.types import PyTree
from dist_ens.layout import BATCH, BATCHES, Layout, put_everywhere, redistribution_program
from dist_ens.sampling import Order


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
