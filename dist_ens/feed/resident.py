"""A training set of which every device holds all examples."""

import numpy as np

from dist_ens.data import Split
from dist_ens.ensemble import Drawn
from dist_ens.layout import Layout, put_everywhere
from dist_ens.sampling import Order
from dist_ens.types import PyTree


class ResidentFeed:
    """The batches of each call, drawn by the devices from all examples of a split.

    Args:
        split: Pytree of the examples, from `put_whole`.
        order: Order of the examples.
        layout: Layout of the mesh.
        seed: Seed of the order, in [0, 2**32).
    """

    def __init__(self, split: PyTree, order: Order, layout: Layout, seed: int) -> None:
        self._split, self._order, self._layout, self._seed = split, order, layout, seed

    def __call__(self, steps: range) -> Drawn:
        """Returns the batches of the steps of one call."""
        cursor = put_everywhere(self._layout, self._order.cursor(self._seed, steps))
        return Drawn(self._split, cursor, self._order)


def put_whole(split: Split, layout: Layout) -> PyTree:
    """Puts all examples of a split on every device of the mesh."""
    return put_everywhere(layout, split.take(np.arange(len(split))))
