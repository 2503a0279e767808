"""Compaction: members that have stopped leave the arrays of a run, and come back at its end."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.callbacks import StepInfo
from dist_ens.ensemble import Ensemble
from dist_ens.ground.state import State
from dist_ens.ground.types import Leaf
from dist_ens.layout import MEMBERS, Layout


class OfAllMembers(StepInfo):
    """Information for a callback, whose state is put together when the callback looks at it."""

    def joined_by(self, join: Callable[[State], State]) -> Self:
        """Returns this information with a function that puts the state of all members together."""
        self._join = join
        return self

    @cached_property
    def state(self) -> State:
        """State of all members, in the place of the field of the same name."""
        return self._join(self[1])

    def __iter__(self) -> Iterator[int | State | Mapping[str, np.ndarray]]:
        """Yields the fields, with the state of all members."""
        return iter((self[0], self.state, *self[2:]))

    def _replace(self, **changes: object) -> StepInfo:  # type: ignore[override]
        return StepInfo._make({**StepInfo(*self)._asdict(), **changes}.values())


class Compaction:
    """The members that a run updates, in arrays of their own once enough have stopped.

    The others wait in the host's memory. Where all members are looked at, such as in an evaluation,
    a save, a callback or the result, they are all there in their first order.

    Attributes:
        whole: Ensemble of all members.
        ensemble: Ensemble of the members that are updated.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self.whole = self.ensemble = ensemble
        self._resting: State | None = None
        self._last: dict[str, np.ndarray] = {}  # Last metrics of all members, float32[members].

    @property
    def num_resting(self) -> int:
        """Number of members that wait in the host's memory."""
        return self.whole.num_members - self.ensemble.num_members

    def without(self, stopped: Collection[int]) -> list[int]:
        """Returns the ids of the members to go on with, which may be all that are updated.

        Each row of the mesh holds as many members as any other, so some of those that have stopped
        may have to stay.
        """
        ids: list[int] = self.ensemble.ids.tolist()
        leaving = [each for each in ids if each in stopped]
        rows = self.ensemble.layout.ensemble_axis
        num_staying = (len(leaving) - len(ids)) % rows
        left = {*leaving[num_staying:]}
        return [each for each in ids if each not in left] if len(left) < len(ids) else ids

    def shrink(self, state: State, member_ids: Sequence[int]) -> State:
        """Returns the state of some members, with which the run goes on."""
        joined, layout = self.joined(state), self.whole.layout
        small = Layout.make(
            len(member_ids),
            ensemble_axis=layout.ensemble_axis,
            model_axis=layout.model_axis,
            model_rules=layout.model_rules,
            devices=layout.mesh.devices.flatten().tolist(),
        )
        self.ensemble = self.whole.with_members(member_ids).on(small)
        return self.split(joined)

    def joined(self, state: State) -> State:
        """Returns the state of all members."""
        if self._resting is None:
            return state
        with jax.transfer_guard("allow"):
            step = jnp.full(self.num_resting, np.asarray(state.step)[0], np.int32)
            both = State.concatenate([state, self._resting._replace(step=step)])
            return self.whole.layout.moved(both.select(self.whole.ids.tolist()), MEMBERS)

    def split(self, joined: State) -> State:
        """Returns the state of the members that are updated, and keeps the others."""
        if self.ensemble is self.whole:
            return joined
        updated = self.ensemble.ids.tolist()
        rest = [each for each in self.whole.ids.tolist() if each not in updated]
        with jax.transfer_guard("allow"):
            self._resting = jax.tree.map(_off_devices, joined.select(rest))
            return self.ensemble.layout.moved(joined.select(updated), MEMBERS)

    def expanded(self, metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns metrics of all members, float32[steps, members].

        Those of a member that is not updated any more stay what they were.
        """
        if self.ensemble.num_members == self.whole.num_members:
            self._last = {name: values[-1] for name, values in metrics.items()}
            return dict(metrics)
        columns = np.isin(self.whole.ids, self.ensemble.ids)
        found = {}
        for name, values in metrics.items():
            before = self._last.get(name, np.full(self.whole.num_members, np.nan, values.dtype))
            found[name] = np.tile(before, (len(values), 1))
            found[name][:, columns] = values
            self._last[name] = found[name][-1]
        return found


def _off_devices(leaf: jax.Array) -> Leaf:
    """Returns an array in the memory of the host; keys, which are small, stay where they are."""
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)
