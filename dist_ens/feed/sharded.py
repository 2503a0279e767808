"""A training set of which each column of the mesh holds a part."""

from functools import partial
from typing import Any

import jax
import numpy as np

from dist_ens.data import Split
from dist_ens.ensemble import Batches
from dist_ens.layout import BATCH, BATCHES, Layout, dealing_program, put_everywhere
from dist_ens.sampling import Order


class ShardedFeed:
    """The batches of calls of the update, from a split that is divided along the data axis.

    The batches of an epoch of whole calls are dealt out at a time, and calls take theirs from them.

    Args:
        split: Training examples.
        order: Order of the examples, one for all members.
        layout: Layout of the mesh.
        seed: Seed of the order, in [0, 2**32).
        steps_per_call: Number of steps of a call; calls come in their order.
    """

    def __init__(
        self, split: Split, order: Order, layout: Layout, seed: int, steps_per_call: int
    ) -> None:
        count = layout.data_axis * -(-len(split) // layout.data_axis)
        rows = np.minimum(layout.host_rows(count), len(split) - 1)  # the last part is filled up
        self._parts = layout.put(split.take(rows), BATCH)
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
        self._dealt: Batches | None = None
        self._steps = range(0)

        @partial(jax.jit, static_argnames="count", out_shardings=layout.sharding(BATCHES))
        def of_call(dealt: Any, first: jax.Array, count: int) -> Any:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), dealt
            )

        self._of_call = of_call

    def __call__(self, steps: range) -> Batches:
        """Returns the batches of a call's steps."""
        if steps.stop > self._steps.stop:
            self._dealt = None  # makes room for the next
            self._steps = range(steps.start, steps.start + self._steps_of_deal)
            cursor = put_everywhere(self._layout, self._order.cursor(self._seed, self._steps))
            indices = self._indices(cursor)
            self._dealt = Batches(self._deal(self._parts, indices), indices)
        first = put_everywhere(self._layout, np.int32(steps.start - self._steps.start))
        return self._of_call(self._dealt, first, len(steps))
