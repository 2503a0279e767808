"""Compiles the update for every mesh that a run could have, and reads what it needs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from dist_ens import cluster
from dist_ens.config import Experiment
from dist_ens.config.execution_spec import AUTO, Execution
from dist_ens.data import Spec
from dist_ens.ensemble import Batches, Drawn, Ensemble, MemberBatches
from dist_ens.errors import UserError, first_line
from dist_ens.execution.heuristics import candidates
from dist_ens.feed import INDEX_BYTES, Placement, TrainingSet, abstract_batches
from dist_ens.layout import Layout, device_bytes
from dist_ens.plan.collectives import collectives
from dist_ens.plan.planned import Plan, PlannedMesh
from dist_ens.plan.topology import chip_of, memory_bytes
from dist_ens.state import State


@dataclasses.dataclass(frozen=True)
class Planner:
    """An experiment, to be compiled for meshes of some devices, and for other numbers of members.

    Attributes:
        experiment: Whose number of members is only the one to begin with.
        spec: Of the data.
        training_set: None where nobody knows its length, or where a run is too short for it to be
            kept on the devices: the hosts send its batches.
        per_member: Whether each member has batches of its own.
        make_ensemble: The experiment's member, lifted over a layout.
        devices: Of one kind; they need not be here.
        are_cores: Whether they are the cores of this CPU, of which a mesh has as many as rows: none
            takes a part of a batch, and those left out leave their share of the memory.
        say: Is given a line before each compilation, which takes seconds to minutes.
    """

    experiment: Experiment
    spec: Spec
    training_set: TrainingSet | None
    per_member: bool
    make_ensemble: Callable[[Layout], Ensemble]
    devices: list[jax.Device]
    are_cores: bool = False
    say: Callable[[str], None] = lambda line: None

    def plan(self) -> Plan:
        """Compiles for every mesh, and for other numbers of members on the best.

        Raises:
            UserError: If the members and the batch divide over no mesh.
        """
        num_members = self.experiment.total_members(self.spec.num_groups)
        meshes = _best_first([self.plan_mesh(num_members, rows) for rows in self._ensemble_axes()])
        memory = self._memory_bytes(meshes[0].ensemble_axis)
        most, is_compiled = None, False
        if math.isfinite(memory):
            # To compile ever more copies of a member takes minutes, then hours.
            asked = self.experiment.execution
            is_compiled = asked == AUTO or Execution.parse(asked).members != "unroll"
            search = self._max_num_members if is_compiled else self._max_unrolled
            most = search(meshes[0])
            most -= most % math.lcm(meshes[0].ensemble_axis, self.spec.num_groups)
            if meshes[0].fits:  # in more waves than were asked for, maybe, that divide its members
                most = max(most, num_members)
        waves = self.experiment.layout.waves
        return Plan(tuple(meshes), most, is_compiled, waves, memory)

    def plan_mesh(self, num_members: int, ensemble_axis: int) -> PlannedMesh:
        """What one step needs on one mesh.

        Args:
            num_members: A multiple of `ensemble_axis`.
            ensemble_axis: Rows; the other devices of a row share its batch.

        Raises:
            UserError: If members, devices or the batch do not divide.
        """
        layout = self._layout(num_members, ensemble_axis)
        batch_size = self.experiment.data.global_batch_size
        layout.check_batch_size("data.global_batch_size", batch_size)
        whole = self.make_ensemble(layout)
        ensemble, waves = whole.of_wave, whole.waves
        layout = ensemble.layout
        state = self._abstract_state(ensemble)
        counted = {
            "parameters": device_bytes(state.params),
            "model_state": device_bytes(state.model_state),
            "optimizer": device_bytes(state.opt_state),
        }
        state_bytes = sum(counted.values())
        place, kept_bytes = Placement.STREAMED, 0
        if self.training_set is not None:
            free_bytes = self._memory_bytes(ensemble_axis) - (state_bytes if waves == 1 else 0)
            place = self.training_set.place_on(layout, free_bytes)
            kept_bytes = self.training_set.device_bytes(place, layout)
        steps = self.experiment.steps_per_call
        batches = self._batches(ensemble, place, steps)
        counted |= {
            "training_set": kept_bytes,
            # Those of a wave are drawn when it comes, others are there of all members.
            "batches": _call_bytes(ensemble, batches)
            if place is Placement.REPLICATED
            else _call_bytes(whole, self._batches(whole, place, steps)),
            # What waits for its wave is in the memory of a CPU's devices too, before and after.
            "waiting": 2 * waves * state_bytes if waves > 1 and layout.platform == "cpu" else 0,
        }
        execution = self.experiment.execution
        if execution == AUTO:
            execution = candidates(layout, ensemble.traced_update(state, batches), steps)[0]
        self.say(
            f"Compiling for mesh {layout}, {layout.members_per_device} members a device"
            f"{' at a time' if waves > 1 else ''}, execution {execution} …"
        )
        planned = PlannedMesh(
            ensemble_axis,
            layout.data_axis,
            num_members,
            waves,
            layout.platform,
            execution,
            place,
            counted,
        )
        try:
            return self._measured(planned, ensemble, state)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.replace(planned, refusal=first_line(error))

    def _measured(self, planned: PlannedMesh, ensemble: Ensemble, state: State) -> PlannedMesh:
        """The same mesh with what its compiled program says."""
        members = planned.members_at_once
        # XLA counts the body of a loop once, whatever its length: so no loop over steps.
        way = dataclasses.replace(Execution.parse(planned.execution), steps=None)
        dispatched, canonical = way.members == "loop", way.convolutions == "canonical"
        given_to = self._one_member(ensemble, ensemble.microbatches) if dispatched else ensemble
        program = self._compiled(planned, given_to, _unrolled(way) if dispatched else way)
        over_members = way.members in ("map", "chunk") and members > 1
        step = program
        # Nor one over members, over parts of the batch, or over examples in a kernel's gradient.
        if over_members or ensemble.microbatches > 1 or canonical:
            plain = dataclasses.replace(way, convolutions=None) if canonical else way
            # To locate one order's examples is an operation of a device, not of each member.
            shared = over_members and not self.per_member
            given = dataclasses.replace(planned, place=Placement.STREAMED) if shared else planned
            step = self._compiled(given, self._one_member(ensemble, 1), _unrolled(plain))
        times = 1 if step is program and not dispatched else members
        memory = program.memory_analysis()
        total = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )
        # The program is given a step's batch, of as many members as it has, or where to begin to
        # draw; a call's are there, of all, and beside batches of their own that were sent a copy
        # for those whose turn it is.
        total += planned.bytes_per_device["batches"]
        total -= _given_bytes(given_to, self._batches(given_to, planned.place, 1))
        drawn = planned.place is Placement.REPLICATED
        if self.per_member and not drawn and (dispatched or planned.waves > 1):
            steps = self.experiment.steps_per_call
            total += _call_bytes(given_to, self._batches(given_to, planned.place, steps))
        total += planned.bytes_per_device["waiting"]
        if planned.place is Placement.SHARDED:  # which the program is only given its batches of
            total += planned.bytes_per_device["training_set"]
        if dispatched:  # the program's member is a copy, beside all of them
            total += device_bytes((state.params, state.model_state, state.opt_state))
        parts = dict(planned.bytes_per_device) | {"activations": memory.temp_size_in_bytes}
        times *= planned.waves
        flops = step.cost_analysis()["flops"] * times
        chip = chip_of(self.devices[0])
        each = collectives(step.as_text(), ensemble.layout.mesh.device_ids)
        return dataclasses.replace(
            planned,
            bytes_per_device=parts | {"other": total - sum(parts.values()), "total": total},
            flops_per_device=flops,
            collectives=tuple(each * times),
            fits=total <= self._memory_bytes(planned.ensemble_axis),
            max_steps_per_second=chip.peak_flops / flops if chip and flops else None,
        )

    def _one_member(self, ensemble: Ensemble, microbatches: int) -> Ensemble:
        """One member per device of the same mesh."""
        rows = ensemble.layout.ensemble_axis
        alone = self.make_ensemble(self._layout(rows, rows))
        return dataclasses.replace(alone, microbatches=microbatches)

    def _compiled(self, planned: PlannedMesh, ensemble: Ensemble, way: Execution) -> Any:
        ensemble = dataclasses.replace(ensemble, execution=str(way))
        state, batches = self._abstract_state(ensemble), self._batches(ensemble, planned.place, 1)
        return ensemble.update_steps.lower(state, batches).compile()

    def _abstract_state(self, ensemble: Ensemble) -> State:
        """Shapes of the state."""
        size = self.experiment.data.global_batch_size // ensemble.layout.data_axis
        batch = {
            name: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype)
            for name, leaf in self.spec.example.items()
        }
        return ensemble.abstract_state(batch)

    def _batches(self, ensemble: Ensemble, place: Placement, steps: int) -> Any:
        """Shapes of what a call is given."""
        return abstract_batches(
            ensemble.layout,
            self.spec.example,
            steps,
            self.experiment.data.global_batch_size,
            place,
            order=None if self.training_set is None else self.training_set.order,
            per_member=self.per_member,
        )

    def _layout(self, num_members: int, ensemble_axis: int) -> Layout:
        devices = self.devices
        if self.are_cores:
            devices = cluster.devices_for(num_members, ensemble_axis)
        return Layout.make(num_members, ensemble_axis=ensemble_axis, devices=devices)

    def _memory_bytes(self, ensemble_axis: int) -> float:
        """Of a device of a mesh with so many rows."""
        memory = memory_bytes(self.devices[0])
        return memory * len(self.devices) // ensemble_axis if self.are_cores else memory

    def _ensemble_axes(self) -> list[int]:
        """Rows of every mesh over which members and batch divide, the most first."""
        asked = self.experiment.layout.ensemble_axis
        if asked is not None:
            return [asked]
        members = self.experiment.total_members(self.spec.num_groups)
        devices = len(self.devices)
        if self.are_cores:
            return [k for k in range(devices, 0, -1) if members % k == 0]
        batch_size = self.experiment.data.global_batch_size
        common = math.gcd(members, devices)
        parts = self.experiment.compute.microbatches
        rows = [
            k
            for k in range(common, 0, -1)
            if common % k == 0 and batch_size % (devices // k * parts) == 0
        ]
        if not rows:
            fewest = math.lcm(devices // math.gcd(devices, batch_size), self.spec.num_groups)
            columns = devices // common
            raise UserError(
                f"{devices} devices cannot all be used with num_members={members} and "
                f"data.global_batch_size={batch_size}: the ensemble axis must divide the members, "
                "and the data axis the batch. Try "
                f"--config.num_members={math.ceil(members / fewest) * fewest}, "
                "--config.data.global_batch_size="
                f"{math.ceil(batch_size / columns) * columns}, or fewer devices."
            )
        return rows

    def _max_unrolled(self, first: PlannedMesh) -> int:
        """About the most members that fit on a mesh of this shape, each a copy in the program.

        It is read off the line through the bytes of as many as are asked for, two at least, and of
        half of them; what the compiler refuses is halved on.
        """
        fits, known = 0, list[tuple[int, int]]()
        members = max(2, first.members_at_once)
        while members and len(known) < 2:
            is_first = members == first.members_at_once
            planned = first if is_first else self._plan_members(first, members)
            if planned.fits:
                fits = max(fits, members)
            if not planned.refusal:
                known.append((members, planned.bytes_per_device["total"]))
            members //= 2
        most = max(fits, _where(known, self._memory_bytes(first.ensemble_axis)) or 0)
        return most * first.ensemble_axis * self.experiment.layout.waves

    def _max_num_members(self, first: PlannedMesh) -> int:
        """The most members that fit on a mesh of this shape; one more in a wave does not.

        Of more than 200 in a wave it is half a percent short at most: each program takes as long.
        Bytes are close to affine in the members, so a line through the last two programs says
        which to compile next; only what was compiled is believed.
        """
        memory = self._memory_bytes(first.ensemble_axis)
        fits, too_many = 0, math.inf
        planned, known = first, []
        for tries in range(1, 100):
            members = planned.members_at_once
            if planned.fits:
                fits = members
            else:
                too_many = members
            if too_many - fits <= max(1, fits // 200):
                return fits * first.ensemble_axis * self.experiment.layout.waves
            if not planned.refusal:
                known.append((members, planned.bytes_per_device["total"]))
            guess = _where(known[-2:], memory) or (2 * members if planned.fits else members // 2)
            # A refusal says nothing of bytes, and a line that leads nowhere must not be followed.
            if math.isfinite(too_many) and (planned.refusal or tries % 8 == 0):
                guess = (fits + int(too_many)) // 2
            guess = int(min(max(guess, fits + 1), too_many - 1))
            planned = self._plan_members(first, guess)
        raise RuntimeError(f"Between {fits} and {too_many} members per device no limit was found.")

    def _plan_members(self, first: PlannedMesh, members_at_once: int) -> PlannedMesh:
        """A mesh of the same shape, of so many members on a device at a time."""
        rows = first.ensemble_axis
        return self.plan_mesh(members_at_once * self.experiment.layout.waves * rows, rows)


def _where(points: list[tuple[int, int]], height: float) -> int | None:
    """The largest whole x at which the line through two points is no higher; None for no line."""
    if len(points) < 2:
        return None
    (x, y), (x2, y2) = sorted(points)
    if y2 <= y:
        return None
    return math.floor(x + (height - y) * (x2 - x) / (y2 - y))


def _call_bytes(ensemble: Ensemble, batches: Any) -> int:
    """What a call has of its batches on a device: of a whole split where its examples lie."""
    if not isinstance(batches, Drawn):
        return device_bytes(batches)
    order, layout = batches.order, ensemble.layout
    examples = len(batches.cursor) * order.global_batch_size // layout.data_axis
    return INDEX_BYTES * examples * (layout.members_per_device if order.per_member else 1)


def _given_bytes(ensemble: Ensemble, batches: Any) -> int:
    """What of it a compiled program takes: positions only where examples are weighed by them."""
    if isinstance(batches, Drawn):
        return device_bytes(batches.cursor)
    if ensemble.uses_positions:
        return device_bytes(batches)
    if isinstance(batches, Batches | MemberBatches):
        return device_bytes(batches.examples)
    return device_bytes(batches)


def _unrolled(way: Execution) -> Execution:
    return dataclasses.replace(way, members="unroll", chunk_size=None)


def _best_first(meshes: list[PlannedMesh]) -> list[PlannedMesh]:
    """What fits before what does not, and that the smallest first.

    Of what fits those with the fewest FLOPs, but for two percent, which lie in how an execution
    writes the same; of these the one with the fewest bytes in collectives, then in memory.
    """

    def size(mesh: PlannedMesh) -> int:
        return mesh.bytes_per_device.get("total", sum(mesh.bytes_per_device.values()))

    ordered, left = [], [(mesh.flops_per_device or 0, mesh) for mesh in meshes if mesh.fits]
    while left:
        fewest = min(flops for flops, _ in left)
        close = [(mesh.exchanged_bytes, size(mesh), mesh) for f, mesh in left if f <= 1.02 * fewest]
        best = min(close, key=lambda entry: entry[:2])[2]
        ordered.append(best)
        left = [(flops, mesh) for flops, mesh in left if mesh is not best]
    return ordered + sorted((mesh for mesh in meshes if not mesh.fits), key=size)
