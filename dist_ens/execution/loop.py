"""The execution `loop`: one member's own program, dispatched once for each member.

This is the loop that people write by hand, and the reference for every other execution. The program
does not depend on the other members. So a member has the same bits for any number of members, and
for any number of devices on the ensemble axis.

A state that is updated in place is taken from its row, updated without a members axis, and put
back. On a CPU, XLA would copy the donated arrays of a state with an axis of length 1. On
accelerators it does not, and the only member of a row is updated where it is.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.types import PyTree, Specs, Structure, Tree
from dist_ens.layout import ENSEMBLE, Layout, axis_of, broadcast, put_numbers
from dist_ens.layout.rows import join_rows, layout_of_row, part_of_row, sharding_of_member


def takes_states(layout: Layout) -> bool:
    """Returns whether a member's state is taken from its row to be updated, which copies it."""
    return layout.members_per_device > 1 or layout.platform == "cpu"


def of_one_state(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function whose first argument and result have no members axis.

    `fn` has them with a members axis of length 1.
    """

    @wraps(fn)  # A program has the name of its function, also in profiles.
    def alone(state: PyTree, *args: PyTree) -> PyTree:
        results = fn(jax.tree.map(lambda leaf: leaf[None], state), *args)
        if type(results) is not tuple:
            return jax.tree.map(lambda leaf: leaf[0], results)
        return jax.tree.map(lambda leaf: leaf[0], results[0]), *results[1:]

    return alone


class Loop:
    """A lifted function that runs each member separately, on the devices of its row of the mesh.

    `program_of` makes the program of one member from the layout of one row, and from whether the
    program is one of `of_one_state`. `in_place` says that the first argument is donated. If the
    first result has its structure, shapes and types, it is taken as the members' state and updated
    in place.
    """

    def __init__(
        self,
        layout: Layout,
        in_specs: tuple[Specs, ...],
        out_specs: Specs,
        program_of: Callable[[Layout, bool], Callable[..., PyTree]],
        *,
        in_place: bool,
    ) -> None:
        self._layout, self._in_specs, self._out_specs = layout, in_specs, out_specs
        self._in_place = in_place
        self._rows = layout.host_mesh_rows
        self._takes: dict[Hashable, Callable[..., PyTree]] = {}
        self._puts: dict[Hashable, Callable[..., PyTree]] = {}
        alone = {row: layout_of_row(layout, row, num_members=1) for row in self._rows}
        self._takes_state = in_place and takes_states(layout)
        self._programs = {row: program_of(alone[row], self._takes_state) for row in self._rows}
        self._positions = {
            row: put_numbers(alone[row], layout.members_per_device) for row in self._rows
        }

    def __call__(self, *args: PyTree) -> PyTree:
        """Returns the results of all members; a donated state must not be used again."""
        layout, out_specs = self._layout, self._out_specs
        parts = {
            row: [
                part_of_row(layout, arg, row, spec)
                for arg, spec in zip(args, self._in_specs, strict=True)
            ]
            for row in self._rows
        }
        of_members, in_place, is_tuple = self._results(parts)
        if type(out_specs) is not tuple:
            out_specs = (out_specs,) * len(of_members[self._rows[0]][0])
        of_rows = []
        for row, members in of_members.items():
            numbers = zip(zip(*members, strict=True), out_specs, strict=True)
            of_row = [_side_by_side(results, spec) for results, spec in numbers]
            of_rows.append([parts[row][0], *of_row[1:]] if in_place else of_row)
        numbers = zip(zip(*of_rows, strict=True), out_specs, strict=True)
        whole = tuple(join_rows(layout, rows, spec) for rows, spec in numbers)
        return whole if is_tuple else whole[0]

    def _results(
        self, parts: dict[int, list[PyTree]]
    ) -> tuple[dict[int, list[list[PyTree]]], bool, bool]:
        """Returns each row's results, whether `parts` hold states, and if they are tuples."""
        in_place = self._in_place
        results: dict[int, list[list[PyTree]]] = {row: [] for row in self._rows}
        for position in range(self._layout.members_per_device):
            for row in self._rows:  # The devices of different rows compute at the same time.
                place, of_row = self._positions[row][position], parts[row]
                own = [self._own_state(row, of_row[0], place)] if self._in_place else []
                rest = [*zip(of_row, self._in_specs, strict=True)][len(own) :]
                own += [_own(arg, spec, place) for arg, spec in rest]
                result = self._programs[row](*own)
                is_tuple = type(result) is tuple
                found = [*result] if is_tuple else [result]
                if position == 0:  # The results of all members have the same types.
                    in_place = in_place and _types(found[0]) == _types(own[0])
                if in_place:
                    of_row[0] = self._put_back(row, of_row[0], found[0], place)
                    found[0] = None
                elif self._takes_state:
                    found[0] = jax.tree.map(lambda leaf: leaf[None], found[0])
                results[row].append(found)
        return results, in_place, is_tuple

    def _own_state(self, row: int, state: PyTree, position: jax.Array) -> PyTree:
        """Returns the state of a member of a row, divided over the devices as that of the row."""
        if not self._takes_state:
            return state
        key = self._key(row, state)
        if key not in self._takes:
            shardings = jax.tree.map(lambda leaf: sharding_of_member(leaf.sharding), state)
            self._takes[key] = jax.jit(_taken, out_shardings=shardings)
        return self._takes[key](state, position)

    def _key(self, row: int, state: PyTree) -> Hashable:
        """Returns what the division of a row's state over its devices depends on."""
        leaves, structure = jax.tree.flatten(state)
        shapes = (leaf.shape for leaf in leaves) if self._layout.model_axis > 1 else ()
        return row, structure, tuple(shapes)

    def _put_back(self, row: int, state: PyTree, member: PyTree, position: jax.Array) -> PyTree:
        """Returns the state of a row with a new state of one of its members."""
        if not self._takes_state:
            return member
        key = self._key(row, state)
        if key not in self._puts:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            self._puts[key] = jax.jit(_replaced, donate_argnums=0, out_shardings=shardings)
        return self._puts[key](state, member, position)


def _types(tree: PyTree) -> tuple[Structure, list[tuple[tuple[int, ...], np.dtype]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _own(arg: Tree, specs: Specs, position: jax.Array) -> Tree:
    """Returns one member's part of an argument. Arrays without a members axis are unchanged."""
    axes = [axis_of(spec, ENSEMBLE) for spec in broadcast(specs, arg)]
    leaves, structure = jax.tree.flatten(arg)
    own = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    taken = iter(_take(own, position) if own else ())
    merged = [
        leaf if axis is None else next(taken) for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, merged)


def _side_by_side(members: Sequence[Tree], specs: Specs) -> Tree:
    if not jax.tree.leaves(members[0]):
        return members[0]
    axes = tuple(axis_of(spec, ENSEMBLE) or 0 for spec in broadcast(specs, members[0]))
    return _concatenated(members, axes)


@jax.jit
def _take(members: PyTree, position: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, position, 1), members)


def _taken(state: PyTree, position: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, position, keepdims=False), state
    )


def _replaced(members: PyTree, member: PyTree, position: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, position, 0),
        members,
        member,
    )


@partial(jax.jit, static_argnums=1)
def _concatenated(members: Sequence[PyTree], axes: tuple[int, ...]) -> PyTree:
    flat = [jax.tree.leaves(member) for member in members]
    joined = [
        jnp.concatenate(parts, axis=axis)
        for axis, parts in zip(axes, zip(*flat, strict=True), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(members[0]), joined)
