"""The same ensemble with other arguments, and the ensemble that has the members of a state."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.failures import FailureRecord, no_failures
from dist_ens.ensemble.programs import Programs
from dist_ens.ground.state import State, check_alive, require_state
from dist_ens.layout import ENSEMBLE, MEMBERS, Layout, Waves, copied_like, to_host
from dist_ens.processes import cluster
from dist_ens.sampling.hyper import Hyper

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble


class Variants:
    """The variants of an `Ensemble`, which is the only class of this kind."""

    layout: Layout
    num_members: int
    seed: int
    hyper: Hyper
    execution: str
    ids: np.ndarray
    waves: int
    failure_policy: FailurePolicy
    programs: Programs

    def replace(self, **changes: Any) -> "Ensemble":
        """Returns the same ensemble with new values of some arguments of `Ensemble`."""
        kind = cast("type[Ensemble]", type(self))
        arguments = {name: getattr(self, name) for name in inspect.signature(kind).parameters}
        return kind(**arguments | changes)

    def with_values(self, seed: int, hyper: Mapping[str, Any] | None) -> "Ensemble":
        """Returns the ensemble with another seed and other values of its settings.

        It shares its compiled programs, to which seeds and settings are arguments.
        """
        other = cast("Ensemble", copy.copy(self))
        other.seed, other.hyper = seed, Hyper.of(hyper, self.ids.tolist(), seed)
        return other

    def _with_own_values(self, other: "Ensemble") -> "Ensemble":
        """Returns a variant, which another seed may have made first, with these values."""
        own = Hyper.of(self.hyper, other.ids.tolist(), self.seed)
        is_same = all(np.array_equal(own[name], other.hyper[name]) for name in own)
        if other.seed == self.seed and is_same:
            return other
        return other.with_values(self.seed, self.hyper)

    def _variant(self, **changes: Any) -> "Ensemble":
        """Returns an ensemble of other members or another layout, with the traced step."""
        other = self.replace(**changes)
        if other.layout.is_fsdp == self.layout.is_fsdp:
            other.programs.step = self.programs.step
        return other

    @cached_property
    def of_wave(self) -> "Ensemble":
        """The ensemble of the members of one wave, on the devices."""
        of_one = Waves(self.layout, self.waves).layout_of_one
        return self._variant(
            layout=of_one,
            num_members=of_one.num_members,
            member_ids=self.ids[: of_one.num_members].tolist(),
            waves=1,
        )

    def on(self, layout: Layout, execution: str | None = None) -> "Ensemble":
        """Returns the same ensemble on another layout, the same object for the same arguments."""
        execution = execution or self.execution
        key, variants = (layout, layout.is_fixed, execution), self.programs.variants
        if key not in variants:
            variants[key] = self._variant(layout=layout, execution=execution)
            variants[key].programs.variants = variants
        return self._with_own_values(variants[key])

    def with_members(self, member_ids: Sequence[int]) -> "Ensemble":
        """Returns the same ensemble with the members of some ids, on a new layout."""
        count = len(member_ids)
        own = self.layout
        layout = Layout.make(
            count,
            model_axis=own.model_axis,
            model_rules=own.model_rules,
            devices=cluster.devices_for(count) if own.model_axis == 1 else None,
        )
        return self._variant(
            layout=layout, num_members=count, member_ids=tuple(member_ids), waves=1
        )

    def with_record(self, state: State) -> State:
        """Returns a state with a record of failed updates only if this ensemble checks them."""
        require_state(state)
        if not self.failure_policy.is_checked:
            return state if state.failures == () else state._replace(failures=())
        if isinstance(state.failures, FailureRecord):
            return state
        record = no_failures(state.step.shape)
        like = jax.tree.map(lambda _: state.step, record)
        return state._replace(failures=copied_like(record, like))

    def at(self, state: State) -> tuple["Ensemble", State]:
        """Returns the ensemble of the members of a state, and the state, on one layout."""
        check_alive(state.step)
        if state.step.shape[0] != self.num_members:
            ids, elsewhere = tuple(to_host(state.member_id).tolist()), self.programs.elsewhere
            if ids not in elsewhere:
                elsewhere[ids] = self.with_members(ids)
            other = self._with_own_values(elsewhere[ids])
            return other, other.layout.moved(state, MEMBERS)
        mesh = getattr(getattr(state.step, "sharding", None), "mesh", None)
        is_of_numpy = not isinstance(state.step, jax.Array)  # Such as `to_host` returns.
        if is_of_numpy or (mesh is not None and self.num_members % mesh.shape.get(ENSEMBLE, 1)):
            return cast("Ensemble", self), self.layout.moved(state, MEMBERS)
        if mesh in (None, self.layout.mesh):
            return cast("Ensemble", self), state
        return self.on(dataclasses.replace(self.layout, mesh=mesh, is_fixed=True)), state
