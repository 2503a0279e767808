"""What a run needs on the meshes that it could have, and what to do where none has room for it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dist_ens.errors import UserError
from dist_ens.feed import Placement
from dist_ens.layout import DATA, ENSEMBLE
from dist_ens.plan.collectives import Collective
from dist_ens.plan.topology import CHIPS


@dataclasses.dataclass(frozen=True)
class PlannedMesh:
    """What a run needs on one mesh.

    Attributes:
        ensemble_axis: Rows of the mesh.
        data_axis: Columns.
        num_members: Members of the ensemble.
        waves: In which a device's members come, one at a time.
        platform: `cpu`, `gpu` or `tpu`.
        execution: How a device runs its members.
        place: Of the training set.
        bytes_per_device: `parameters`, `model_state`, `optimizer`, `training_set` (what is kept of
            it), `batches` (of one call; their indices where a step draws them), `waiting` (on a
            CPU, whose devices share it, the members of other waves), `activations` (all that a
            step makes and leaves, gradients too; none of what stays on a TPU's chip), `other`
            (keys and counters, padding, metrics, copies for a turn, the program) and `total`.
            Without the last three where the compiler refuses.
        flops_per_device: Of one step, as XLA counts them: the body of a loop that a network has in
            itself once. None where the compiler refuses.
        collectives: Of one step, on each device.
        fits: Whether a device has the memory.
        max_steps_per_second: The chip's peak over the FLOPs; None where the peak is not known.
        refusal: What the compiler says where it refuses, as XLA:TPU does a program that does not
            fit; empty where it does not.
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

    @property
    def members_per_device(self) -> int:
        """Members of one device, of all its waves."""
        return self.num_members // self.ensemble_axis

    @property
    def members_at_once(self) -> int:
        """Members that one device holds at a time."""
        return self.members_per_device // self.waves

    @property
    def exchanged_bytes(self) -> int:
        """Of all collectives that join devices."""
        return sum(each.bytes for each in self.collectives if each.axis != "none")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "mesh": {ENSEMBLE: self.ensemble_axis, DATA: self.data_axis},
            "num_members": self.num_members,
            "waves": self.waves,
            "execution": self.execution,
            "place": self.place.name.lower(),
            "flops_per_device": self.flops_per_device,
            "bytes_per_device": dict(self.bytes_per_device),
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "fits": self.fits,
            "refusal": self.refusal,
            "max_steps_per_second": self.max_steps_per_second,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on every mesh that it could have.

    Attributes:
        meshes: The best first: what fits, then by the fewest FLOPs per device (two percent are
            none), the fewest bytes in collectives, the fewest bytes per device.
        max_num_members: The most that fit on a mesh of the best one's shape, of many but for half
            a percent, a multiple of its ensemble axis and of the groups; 0 where not one member
            per device fits, None where the memory of the devices is not known.
        max_is_compiled: Whether programs of so many, and of more, were compiled; else a line
            through the bytes of two others says it.
        waves: That were asked for.
        memory_bytes: Of a device of the best mesh; infinity where it is not known.
    """

    meshes: tuple[PlannedMesh, ...]
    max_num_members: int | None
    max_is_compiled: bool
    waves: int
    memory_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "shapes": [mesh.to_dict() for mesh in self.meshes],
            "max_num_members": self.max_num_members,
            "max_is_compiled": self.max_is_compiled,
            "memory_bytes_per_device": self.memory_bytes,
        }

    def check_fits(self) -> None:
        """Raises a `UserError` that says what would fit, unless a mesh does."""
        best = self.meshes[0]
        if best.fits:
            return
        devices = best.ensemble_axis * best.data_axis
        needs = best.refusal or f"it needs {_gib(best.bytes_per_device['total'])} GiB a device."
        if self.max_num_members:
            way_out = f"Try --config.num_members={self.max_num_members}, or more devices"
            if best.platform == "cpu":  # whose devices share what waits
                way_out += "."
            else:
                least = math.ceil(self.waves * best.num_members / self.max_num_members)
                members = best.members_per_device
                waves = next((k for k in range(least, members) if members % k == 0), members)
                way_out += f", or --config.layout.waves={waves}, a part of them after another."
        else:
            state = sum(best.bytes_per_device[k] for k in ("parameters", "model_state"))
            state += best.bytes_per_device["optimizer"]
            larger = [name for name, chip in CHIPS.items() if chip.hbm_bytes > self.memory_bytes]
            way_out = (
                "Not one member a device does, whose parameters and optimizer are "
                f"{_gib(state / best.members_at_once)} GiB: try a smaller "
                "--config.data.global_batch_size or network"
                + (f", or chips with more memory ({', '.join(larger)})." if larger else ".")
            )
        raise UserError(
            f"{best.num_members} members do not fit on {devices} devices of "
            f"{_gib(self.memory_bytes)} GiB. On the mesh that comes nearest, "
            f"{best.ensemble_axis} x {best.data_axis}: {needs} {way_out}"
        )


def _gib(size: float) -> str:
    """Bytes as GiB, four digits of them."""
    return f"{size / 2**30:.4g}"
