"""The planner: it compiles the update for every possible mesh, and reads the program's needs."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax

from dist_ens.data import Spec
from dist_ens.data.feed import INDEX_BYTES, Placement, TrainingSet, abstract_batches
from dist_ens.ensemble import Drawn, Ensemble
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ensemble.update_steps import dispatched
from dist_ens.execution.heuristics import by_rule
from dist_ens.execution.loop import takes_states
from dist_ens.execution.spec import Execution
from dist_ens.experiment import Experiment
from dist_ens.ground.errors import ExitCode, UserError, first_line
from dist_ens.ground.state import State
from dist_ens.layout import Layout, device_bytes
from dist_ens.layout.rows import layout_of_row
from dist_ens.plan.collectives import collectives
from dist_ens.plan.planned import Plan, PlannedMesh, best_first
from dist_ens.plan.topology import chip_of, memory_bytes
from dist_ens.processes import cluster

# Programs of more members are not compiled: those of 200 million took minutes and 7 GB of memory.
_MOST_COMPILED = 2**20


@dataclasses.dataclass(frozen=True)
class Planner:
    """A planner of an experiment for the meshes of some devices and for numbers of members.

    Attributes:
        training_set: Training set that the devices may keep; None if the hosts send the batches.
        per_member: Whether each member has different batches from the others.
        devices: Devices of one kind, which need not be attached to this machine.
        are_cores: Whether the devices are the cores of this CPU. A mesh then has a single column
            and as many cores as rows, which share the memory of all cores.
        say: Function that prints a line before each compilation, which takes seconds to minutes.
    """

    experiment: Experiment
    spec: Spec
    training_set: TrainingSet | None
    per_member: bool
    make_ensemble: Callable[[Layout], Ensemble]
    devices: list[jax.Device]
    are_cores: bool = False
    say: Callable[[str], None] = lambda line: None
    _programs: dict[Hashable, jax.stages.Compiled] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def plan(self) -> Plan:
        """Returns the plan: it compiles for every mesh, and finds how many members fit."""
        num_members = self.experiment.total_members(self.spec.num_groups)
        meshes = best_first(self.meshes())
        memory = self._memory_bytes(meshes[0].ensemble_axis)
        most, is_compiled, waves = None, False, self.experiment.layout.waves
        if math.isfinite(memory):
            # An unrolled program has a copy of the step for each member, and takes hours to compile
            # if there are many.
            unrolls = Execution.parse(self.experiment.execution).members == "unroll"
            search = self._max_unrolled if unrolls else self._max_compiled
            at_once, is_compiled = search(meshes[0], memory)
            most = at_once * meshes[0].ensemble_axis * waves
            most -= most % math.lcm(meshes[0].ensemble_axis, self.spec.num_groups)
            # The best mesh may have more waves than asked for, since they must divide its members.
            if meshes[0].fits:
                most = max(most, num_members)
        return Plan(tuple(meshes), most, is_compiled, waves, memory)

    def plan_mesh(self, num_members: int, ensemble_axis: int) -> PlannedMesh:
        """Returns the needs of one step on a mesh, whose axes must divide members and batch."""
        layout = self._layout(num_members, ensemble_axis)
        batch_size = self.experiment.data.global_batch_size
        layout.check_batch_size("data.global_batch_size", batch_size)
        whole = self.make_ensemble(layout)
        ensemble, waves, steps = whole.of_wave, whole.waves, self.experiment.steps_per_call
        state = self._abstract_state(ensemble)
        counted = {
            "parameters": device_bytes(state.params),
            "model_state": device_bytes(state.model_state),
            "optimizer": device_bytes(state.opt_state),
        }
        state_bytes = sum(counted.values())
        shared_bytes = device_bytes(ensemble.shared)
        counted |= {} if ensemble.shared.is_empty else {"shared": shared_bytes}
        place, kept_bytes = Placement.STREAMED, 0
        if self.training_set is not None:
            kept = shared_bytes + (state_bytes if waves == 1 else 0)
            free_bytes = self._memory_bytes(ensemble_axis) - kept
            place = self.training_set.place_on(ensemble.layout, free_bytes)
            kept_bytes = self.training_set.device_bytes(place, ensemble.layout)
        # Batches from a replicated training set are drawn for one wave at a time. Others are on the
        # device for all members.
        having = ensemble if place is Placement.REPLICATED else whole
        counted |= {
            "training_set": kept_bytes,
            "batches": _call_bytes(having, self._batches(having, place, steps)),
            # On a CPU, the devices' memory also holds the states of all waves, before and after.
            "waiting": 2 * waves * state_bytes if waves > 1 and layout.platform == "cpu" else 0,
        }
        batches = self._batches(ensemble, place, steps)
        execution = str(
            by_rule(
                Execution.parse(self.experiment.execution),
                ensemble.layout,
                lambda: ensemble.traced_update(state, batches),
            )
        )
        self.say(
            f"Compiling for mesh {layout}, {ensemble.layout.members_per_device} members a device"
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
            model_axis=layout.model_axis,
        )
        try:
            return self._measured(planned, ensemble, state)
        except jax.errors.JaxRuntimeError as error:
            if "UNIMPLEMENTED" in str(error):
                raise UserError(
                    f"XLA does not compile the update for the mesh {layout} on these devices: "
                    f"{first_line(error)} Try another --topology, or a "
                    "--config.layout.ensemble_axis that is a multiple of the slices.",
                    exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
                ) from error
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.replace(planned, refusal=first_line(error))

    def meshes(self) -> list[PlannedMesh]:
        """Returns the needs on each mesh for which XLA compiles the update, at least one."""
        num_members = self.experiment.total_members(self.spec.num_groups)
        meshes, unsupported = list[PlannedMesh](), list[UserError]()
        for rows in self._ensemble_axes():
            try:
                meshes.append(self.plan_mesh(num_members, rows))
            except UserError as error:
                if error.exit_code != ExitCode.IMPOSSIBLE_LAYOUT:
                    raise
                self.say(f"This mesh is left out: {error}")
                unsupported.append(error)
        if not meshes:
            raise unsupported[0]
        return meshes

    def _measured(self, planned: PlannedMesh, ensemble: Ensemble, state: State) -> PlannedMesh:
        """Returns a planned mesh with the numbers of its compiled program, for one wave."""
        # XLA counts the body of a loop once, whatever its length, so there is no loop over steps.
        execution = dataclasses.replace(Execution.parse(planned.execution), steps=None)
        if execution.members == "loop":  # Its program is that of one member of each row.
            given_to = self._one_member(ensemble, ensemble.microbatches)
            program = self._compiled(planned, given_to, _unrolled(execution))
        else:
            given_to, program = ensemble, self._compiled(planned, ensemble, execution)
        step = self._without_loops(planned, ensemble, execution) or program
        is_whole = step is program and execution.members != "loop"
        times = planned.waves * (1 if is_whole else planned.members_at_once)
        parts = dict(planned.bytes_per_device)
        parts["activations"] = program.memory_analysis().temp_size_in_bytes
        total = self._total_bytes(planned, given_to, program)
        if execution.members == "loop" and takes_states(ensemble.layout):
            # Its member is a copy, beside the states of all members.
            total += device_bytes((state.params, state.model_state, state.opt_state))
        flops, chip = step.cost_analysis()["flops"] * times, chip_of(self.devices[0])
        each = collectives(step.as_text(), given_to.layout.mesh.device_ids)
        return dataclasses.replace(
            planned,
            bytes_per_device=parts | {"other": total - sum(parts.values()), "total": total},
            flops_per_device=flops,
            collectives=tuple(each * times),
            fits=total <= self._memory_bytes(planned.ensemble_axis),
            max_steps_per_second=chip.peak_flops / flops if chip and flops else None,
        )

    def _without_loops(
        self, planned: PlannedMesh, ensemble: Ensemble, execution: Execution
    ) -> Any | None:
        """Returns the compiled step of one member if that of all has a loop, counted once."""
        over_members = execution.members in ("map", "chunk") and planned.members_at_once > 1
        is_canonical = "canonical" in execution.lowerings
        if not (over_members or is_canonical or ensemble.microbatches > 1):
            return None
        others = tuple(name for name in execution.lowerings if name != "canonical")
        execution = dataclasses.replace(execution, lowerings=others)
        if over_members and not self.per_member:
            # A device computes the indices of a shared order once, and not for each member.
            planned = dataclasses.replace(planned, place=Placement.STREAMED)
        return self._compiled(planned, self._one_member(ensemble, 1), _unrolled(execution))

    def _total_bytes(self, planned: PlannedMesh, given_to: Ensemble, program: Any) -> int:
        """Returns all bytes on a device, given the compiled program and its ensemble.

        The program's arguments include the batch of one step, or a position in the order. It is
        replaced by the batches of a whole call for all members.
        """
        memory, place, counted = program.memory_analysis(), planned.place, planned.bytes_per_device
        total = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )
        total += counted["batches"] + counted["waiting"]
        batches = self._batches(given_to, place, 1)
        if isinstance(batches, Drawn):
            total -= device_bytes(batches.cursor)
        else:  # Positions are in the program only if a method uses them.
            total -= device_bytes(batches if given_to.uses_positions else batches.examples)
        if place is Placement.SHARDED:  # The program's arguments include only its batches.
            total += counted["training_set"]
        # If members have separate batches that the hosts sent, those that run now have a copy.
        is_part = planned.waves > 1 or Execution.parse(planned.execution).members == "loop"
        if self.per_member and place is not Placement.REPLICATED and is_part:
            batches = self._batches(given_to, place, self.experiment.steps_per_call)
            total += _call_bytes(given_to, batches)
        return total

    def _one_member(self, ensemble: Ensemble, microbatches: int) -> Ensemble:
        rows = ensemble.layout.ensemble_axis
        layout = self._layout(rows, rows)
        if layout.model_axis > 1:  # Each row has a program of its own.
            layout = layout_of_row(layout, 0, num_members=1)
        alone = self.make_ensemble(layout)
        return alone.replace(microbatches=microbatches)

    def _compiled(self, planned: PlannedMesh, ensemble: Ensemble, execution: Execution) -> Any:
        # The program of one member is that of any number of them under `loop`.
        key = ensemble.layout, ensemble.microbatches, execution, planned.place
        if key in self._programs:
            return self._programs[key]
        state, batches = self._abstract_state(ensemble), self._batches(ensemble, planned.place, 1)
        # Of one wave it is a jitted program.
        update: Any = dispatched(ensemble.programs.step, ensemble.layout, execution)
        batches = ensemble.programs.with_shared(batches)
        self._programs[key] = update.lower(state, batches).compile()
        return self._programs[key]

    def _abstract_state(self, ensemble: Ensemble) -> State:
        size = self.experiment.data.global_batch_size
        batch = {
            name: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype)
            for name, leaf in self.spec.example.items()
        }
        return ensemble.abstract_state(batch)

    def _batches(self, ensemble: Ensemble, place: Placement, steps: int) -> CallBatches:
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
        asked = self.experiment.layout
        if self.are_cores and asked.member_devices == 1:
            devices = cluster.devices_for(num_members, ensemble_axis)
        return Layout.make(
            num_members,
            ensemble_axis=ensemble_axis,
            model_axis=asked.member_devices,
            model_rules=asked.model_rules,
            devices=devices,
        )

    def _memory_bytes(self, ensemble_axis: int) -> float:
        memory = memory_bytes(self.devices[0])
        return memory * len(self.devices) // ensemble_axis if self.are_cores else memory

    def _ensemble_axes(self) -> list[int]:
        """Returns the numbers of rows of the possible meshes, in descending order."""
        asked = self.experiment.layout.ensemble_axis
        if asked is not None:
            return [asked]
        members = self.experiment.total_members(self.spec.num_groups)
        model_axis = self.experiment.layout.member_devices
        devices = len(self.devices) // model_axis
        if model_axis > 1:
            self._layout(members, 1)  # Raises if the model axis does not divide the devices.
        elif self.are_cores:
            return [k for k in range(devices, 0, -1) if members % k == 0]
        batch_size = self.experiment.data.global_batch_size
        common = math.gcd(members, devices)
        parts = self.experiment.compute.microbatches  # Each column has examples of every part.
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

    def _max_unrolled(self, first: PlannedMesh, memory: float) -> tuple[int, bool]:
        """Returns how many members fit on a device at once, from the bytes of two programs."""
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
        return max(fits, _line_at(known, memory) or 0), False

    def _max_compiled(self, first: PlannedMesh, memory: float) -> tuple[int, bool]:
        """Returns how many members fit on a device of `first` at once, and whether they compiled.

        With more than 200 members, it may be half a percent too low, which saves compilations. A
        line through the bytes of the last two programs gives the number to compile next, or the
        result if that is more than `_MOST_COMPILED`.
        """
        fits, too_many, tries = 0, math.inf, 0
        planned, known = first, list[tuple[int, int]]()
        most = _MOST_COMPILED // (first.ensemble_axis * self.experiment.layout.waves)
        most = max(most, 2 * first.members_at_once)
        while True:
            members = planned.members_at_once
            if planned.fits:
                fits = members
            else:
                too_many = members
            if too_many - fits <= max(1, fits // 200):
                return fits, True
            if not planned.refusal:
                known.append((members, planned.bytes_per_device["total"]))
            if fits == most:
                return max(fits, _line_at(known[-2:], memory) or 0), False
            guess = _line_at(known[-2:], memory) or (2 * members if planned.fits else members // 2)
            tries += 1
            # A refusal has no bytes, and a line that does not converge must be given up.
            if math.isfinite(too_many) and (planned.refusal or tries % 8 == 0):
                guess = (fits + int(too_many)) // 2
            following = min(max(guess, fits + 1), too_many - 1, most)
            planned = self._plan_members(first, int(following))

    def _plan_members(self, first: PlannedMesh, members_at_once: int) -> PlannedMesh:
        rows = first.ensemble_axis
        return self.plan_mesh(members_at_once * self.experiment.layout.waves * rows, rows)


def _line_at(points: list[tuple[int, int]], height: float) -> int | None:
    """Returns the largest integer x at which the line through points (x, y) is at most a height."""
    if len(points) < 2:
        return None
    (x, y), (x2, y2) = sorted(points)
    return math.floor(x + (height - y) * (x2 - x) / (y2 - y)) if y2 > y else None


def _call_bytes(ensemble: Ensemble, batches: CallBatches) -> int:
    """Returns the bytes of the batches of a call on a device, or of the indices that it draws."""
    if not isinstance(batches, Drawn):
        return device_bytes(batches)
    order, layout = batches.order, ensemble.layout
    examples = len(batches.cursor) * order.global_batch_size // layout.data_axis
    return INDEX_BYTES * examples * (layout.members_per_device if order.per_member else 1)


def _unrolled(execution: Execution) -> Execution:
    return dataclasses.replace(execution, members="unroll", chunk_size=None)
