"""The execution `loop`: programs of one member, or of a few, dispatched one after another.

A program of one is what people write by hand, and the reference for every other execution: it knows
nothing of the others, so that a member keeps its bits for any number of members and of devices on
the ensemble axis. A CPU runs as many of the programs at once as it has cores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.ensemble.batches import by_member, placement, with_members
from dist_ens.layout import MEMBER_METRICS, MEMBERS, Layout

Update = Callable[[Any, Any], tuple[Any, Any]]


class Loop:
    """An update that runs parts of the members by themselves, on the devices of their row.

    Args:
        layout: Of the ensemble.
        part_size: Members of a program; the last part of a row may have fewer.
        update_of: Makes the update of a part's members on a layout of one row.
    """

    def __init__(
        self, layout: Layout, part_size: int, update_of: Callable[[Layout], Update]
    ) -> None:
        self._layout = layout
        self._rows = layout.host_mesh_rows
        whole, rest = divmod(layout.members_per_device, part_size)
        self._sizes = (part_size,) * whole + ((rest,) if rest else ())
        self._updates = {
            (row, size): update_of(layout.row(row, num_members=size))
            for row in self._rows
            for size in set(self._sizes)
        }

    def __call__(self, state: Any, batches: Any) -> tuple[Any, Any]:
        """See `Ensemble.update`; the given state is used up."""
        layout, rows = self._layout, self._rows
        specs = placement(batches)
        batches = {row: layout.of_row(batches, row, specs) for row in rows}
        own, shared = {}, {}
        for row in rows:
            own[row], shared[row] = by_member(batches[row])
        parts = {
            row: _apart((layout.of_row(state, row, MEMBERS), own[row]), self._sizes) for row in rows
        }
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        metrics: dict[int, Any] = {row: [] for row in rows}
        for number, size in enumerate(self._sizes):
            for row in rows:  # the rows' devices work side by side
                members, batches_of_members = parts[row][number]
                parts[row][number], of_part = self._updates[row, size](
                    members, with_members(batches_of_members, shared[row])
                )
                metrics[row].append(of_part)
        return (
            layout.from_rows({row: _together(parts[row]) for row in rows}, MEMBERS),
            layout.from_rows({row: _side_by_side(metrics[row]) for row in rows}, MEMBER_METRICS),
        )


@partial(jax.jit, static_argnums=1)
def _apart(members: Any, sizes: tuple[int, ...]) -> list[Any]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, start, start + size), members)  # noqa: B023
        for start, size in zip(starts, sizes, strict=True)
    ]


@jax.jit
def _together(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@jax.jit
def _side_by_side(metrics: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *metrics)
