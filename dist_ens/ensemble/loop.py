"""The execution `loop`: one member's own program, dispatched member after member.

What people write by hand, and the reference for every other execution: the program knows nothing of
the others, so that a member keeps its bits for any number of members and of devices on the ensemble
axis.
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
    """An update that runs each member by itself, on the devices of its row of the mesh.

    Args:
        layout: Of the ensemble.
        update_of: Makes the update of one member on a layout of one row.
    """

    def __init__(self, layout: Layout, update_of: Callable[[Layout], Update]) -> None:
        self._layout = layout
        self._rows = layout.host_mesh_rows
        alone = {row: layout.row(row, num_members=1) for row in self._rows}
        self._updates = {row: update_of(alone[row]) for row in self._rows}
        self._positions = {
            row: alone[row].put_numbers(layout.members_per_device) for row in self._rows
        }

    def __call__(self, state: Any, batches: Any) -> tuple[Any, Any]:
        """See `Ensemble.update`; the given state is used up."""
        layout, rows, specs = self._layout, self._rows, placement(batches)
        states = {row: layout.of_row(state, row, MEMBERS) for row in rows}
        batches = {row: by_member(layout.of_row(batches, row, specs)) for row in rows}
        metrics: dict[int, Any] = {row: [] for row in rows}
        for position in range(layout.members_per_device):
            for row in rows:  # the rows' devices work side by side
                place, (own, shared) = self._positions[row][position], batches[row]
                member, of_member = self._updates[row](
                    _take(states[row], place), with_members(_take(own, place), shared)
                )
                states[row] = _put_back(states[row], member, place)
                metrics[row].append(of_member)
        return (
            layout.from_rows(states, MEMBERS),
            layout.from_rows({row: _side_by_side(m) for row, m in metrics.items()}, MEMBER_METRICS),
        )


@jax.jit
def _take(members: Any, position: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, position, 1), members)


@partial(jax.jit, donate_argnums=0)
def _put_back(members: Any, member: Any, position: jax.Array) -> Any:
    return jax.tree.map(
        lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one, position, 0),
        members,
        member,
    )


@jax.jit
def _side_by_side(metrics: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *metrics)
