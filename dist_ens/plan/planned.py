"""The needs of a run on each possible mesh, their table, and the advice if it fits on none."""

import dataclasses
import math
from collections.abc import Mapping

from rich import box
from rich.table import Table

from dist_ens.data.feed import Placement
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.json_text import JsonDict
from dist_ens.layout import DATA, ENSEMBLE, MODEL
from dist_ens.plan.collectives import Collective
from dist_ens.plan.topology import CHIPS

_SIZES = ("parameters", "optimizer", "training_set", "activations", "total")


@dataclasses.dataclass(frozen=True)
class PlannedMesh:
    """The needs of a run on one mesh.

    Attributes:
        bytes_per_device: Bytes on a device by their use. The last three are absent if the compiler
            refuses the program.

            - `parameters`, `model_state`, `optimizer`: the state of the members on the device.
            - `shared`: arrays that all members share, if there are any.
            - `training_set`: the training examples that stay on the device.
            - `batches`: the batches of one call, or their indices if the step draws them.
            - `waiting`: the members of other waves on a CPU, whose devices share the host's memory.
            - `activations`: temporary arrays of a step, with the gradients, outside the on-chip
              memory of a TPU.
            - `other`: keys, counters, padding, metrics, copies for one member or wave, and the
              program.
            - `total`: the sum of the above.
        flops_per_device: FLOPs of one step, as XLA counts them, or None. The body of a loop inside
            a network counts once.
        collectives: Collectives of one step, on each device.
        max_steps_per_second: Peak FLOPs per second of the chip, if known, by `flops_per_device`.
        refusal: Message of the compiler if it refuses the program, as XLA:TPU does if it does not
            fit.
    """

    ensemble_axis: int
    data_axis: int
    num_members: int
    waves: int
    platform: str
    execution: str
    place: Placement
    bytes_per_device: Mapping[str, int]
    flops_per_device: float | None = None
    collectives: tuple[Collective, ...] = ()
    fits: bool = False
    max_steps_per_second: float | None = None
    refusal: str = ""
    model_axis: int = 1

    @property
    def members_per_device(self) -> int:
        """Number of members of one device, in all its waves."""
        return self.num_members // self.ensemble_axis

    @property
    def members_at_once(self) -> int:
        """Number of members that one device holds at a time."""
        return self.members_per_device // self.waves

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.ensemble_axis * self.data_axis * self.model_axis

    @property
    def shape(self) -> str:
        """Lengths of the axes, such as `2 x 4`, and the model axis if it is above 1."""
        of_member = f" x {self.model_axis}" if self.model_axis > 1 else ""
        return f"{self.ensemble_axis} x {self.data_axis}{of_member}"

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of all collectives that join devices."""
        return sum(each.bytes for each in self.collectives if each.axis != "none")

    def to_dict(self) -> JsonDict:
        """Returns plain data that JSON can hold."""
        plain = dataclasses.asdict(self)
        axes = {ENSEMBLE: plain.pop("ensemble_axis"), DATA: plain.pop("data_axis")}
        if (model_axis := plain.pop("model_axis")) > 1:
            axes[MODEL] = model_axis
        return {"mesh": axes, **plain, "place": self.place.name.lower()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The needs of a run on every possible mesh.

    Attributes:
        meshes: Meshes from the best to the worst; see `best_first`.
        max_num_members: Largest number of members that fits on a mesh with the shape of the best
            one, which may be half a percent too low. 0 if not even one member per device fits; None
            if the memory of the devices is not known.
        max_is_compiled: Whether this comes from compiled programs, and not from the bytes of two.
        waves: Number of waves that the experiment asks for.
        memory_bytes: Bytes of memory of a device of the best mesh; infinity if not known.
    """

    meshes: tuple[PlannedMesh, ...]
    max_num_members: int | None
    max_is_compiled: bool
    waves: int
    memory_bytes: float

    def to_dict(self) -> JsonDict:
        """Returns plain data that JSON can hold."""
        return {
            "shapes": [mesh.to_dict() for mesh in self.meshes],
            "max_num_members": self.max_num_members,
            "max_is_compiled": self.max_is_compiled,
            "memory_bytes_per_device": self.memory_bytes,
        }

    def check_fits(self) -> None:
        """Raises a `UserError` that says what would fit, if the run fits on no mesh."""
        best = self.meshes[0]
        if best.fits:
            return
        size, devices = best.bytes_per_device, best.num_devices
        if self.max_num_members:
            remedy = f"Try --config.num_members={self.max_num_members}, or more devices"
            # CPU devices share the host's memory, and members that share devices take no waves.
            if best.platform != "cpu" and best.model_axis == 1:
                least = math.ceil(self.waves * best.num_members / self.max_num_members)
                members = best.members_per_device
                waves = next((k for k in range(least, members) if members % k == 0), members)
                remedy += (
                    f", or --config.layout.waves={waves} to keep only a part of the members on the "
                    "devices at a time"
                )
        else:
            state = size["parameters"] + size["model_state"] + size["optimizer"]
            remedy = (
                "Not even one member per device fits, whose parameters and optimizer state take "
                f"{_gib(state / best.members_at_once)} GiB. Try a smaller "
                "--config.data.global_batch_size or network"
            )
            remedy += ", or a larger --config.layout.model_axis"
            larger = [name for name, chip in CHIPS.items() if chip.hbm_bytes > self.memory_bytes]
            remedy += f", or chips with more memory ({', '.join(larger)})" if larger else ""
        needs = best.refusal or f"a device needs {_gib(size['total'])} GiB."
        raise UserError(
            f"An ensemble of {counted(best.num_members, 'member')} does not fit on "
            f"{counted(devices, 'device')} of {_gib(self.memory_bytes)} GiB. The mesh that comes "
            f"nearest is {best.shape}: {needs} {remedy}."
        )


def best_first(meshes: list[PlannedMesh]) -> list[PlannedMesh]:
    """Returns the meshes from the best to the worst.

    Meshes that fit come first, by their FLOPs. If FLOPs differ by at most two percent, the bytes in
    collectives decide, and then those in memory. Meshes that do not fit follow, the smallest first.
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


def _gib(size: float) -> str:
    return f"{size / 2**30:.4g}"


def plan_table(plan: Plan) -> Table:
    """Returns the meshes of a plan as a table, from the best to the worst."""
    memory = f" of {_mib(plan.memory_bytes)} MiB" if math.isfinite(plan.memory_bytes) else ""
    table = Table(
        title=f"per device{memory}: members, MiB, and GFLOPs of a step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    names = ("members", "params", "optim", "set", "activ", "total", "fits", "GFLOPs", "steps/s <")
    table.add_column("mesh", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for position, mesh in enumerate(plan.meshes):
        flops, pace = mesh.flops_per_device, mesh.max_steps_per_second
        table.add_row(
            mesh.shape,
            f"{mesh.members_per_device:,}",
            *(_mib(mesh.bytes_per_device.get(name)) for name in _SIZES),
            "yes" if mesh.fits else "no",
            "?" if flops is None else _short(flops / 1e9),
            "" if pace is None else _short(pace),
            style="bold" if position == 0 else None,
        )
    return table


def mesh_line(mesh: PlannedMesh) -> str:
    """Returns a line on a mesh with its execution, training set and collectives, or the refusal."""
    crossing = [(each.kind, each.axis) for each in mesh.collectives if each.axis != "none"]
    collectives = [
        f"{crossing.count((kind, axis))} {kind} over {axis}, "
        f"{sum(c.bytes for c in mesh.collectives if (c.kind, c.axis) == (kind, axis)):,} bytes"
        for kind, axis in dict.fromkeys(crossing)
    ]
    needs = mesh.refusal or "; ".join(collectives) or "nothing crosses an axis"
    waves = f" in {mesh.waves} waves" if mesh.waves > 1 else ""
    return f"{mesh.shape}: {mesh.execution}{waves}; {mesh.place}; {needs}"


def _mib(size: float | None) -> str:
    return "?" if size is None else _short(size / 2**20)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
