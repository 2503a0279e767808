"""A training set that lies whole on every device."""

from typing import Any

import numpy as np

from dist_ens.data import Split
from dist_ens.ensemble import Drawn
from dist_ens.layout import Layout, put_everywhere
from dist_ens.sampling import Order


class ResidentFeed:
    """The batches of calls of the update, drawn on the devices from a whole split.

    Args:
        split: Split on every device, from `put_whole`.
        order: Order of the examples.
        layout: Layout of the mesh.
        seed: Seed of the order, in [0, 2**32).
    """

    def __init__(self, split: Any, order: Order, layout: Layout, seed: int) -> None:
        self._split = split
        self._order = order
        self._layout = layout
        self._seed = seed

    def __call__(self, steps: range) -> Drawn:
        """Returns the batches of a call's steps."""
        cursor = put_everywhere(self._layout, self._order.cursor(self._seed, steps))
        return Drawn(self._split, cursor, self._order)


def put_whole(split: Split, layout: Layout) -> Any:
    """Puts all examples of a split on every device of the mesh."""
    return put_everywhere(layout, split.take(np.arange(len(split))))
