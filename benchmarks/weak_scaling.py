"""Weak scaling without TPUs: FLOPs and bytes per chip of programs compiled for more and more chips.

    python -m benchmarks.weak_scaling --config=configs/charlm.py

The number of members grows with the number of chips. XLA compiles the real program for TPUs (extra
`[tpu-plan]`). Nothing is run, so no TPU and no data set are needed.
"""

import sys

from absl import flags

from dist_ens.ground.errors import UserError
from dist_ens.layout import ENSEMBLE
from dist_ens.plan import Planner, Topology
from launch import cli
from launch.config_flags import ConfigFlags
from launch.plan import make_planner

_TOPOLOGIES = flags.DEFINE_list(
    "topologies",
    ["v5p:2x2x2", "v5p:4x4x4", "v5p:4x8x8", "v5p:8x8x16"],
    "TPU topologies to compare, all of one kind of chip.",
)
_MEMBERS = flags.DEFINE_integer(
    "members", 1, "Number of members in each row of the mesh.", lower_bound=1
)
_COLUMNS = flags.DEFINE_integer(
    "columns", 1, "Number of chips in each row of the mesh, which share a batch.", lower_bound=1
)
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a line for each topology, then the largest differences per chip between them."""
    rows = []
    print("| chips | mesh | members | FLOPs/chip | bytes/chip | over data | over ensemble |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for text in _TOPOLOGIES.value:
        planner = make_planner(_CONFIG, Topology.parse(text))
        rows.append(row(planner))
    for name, values in zip(("FLOPs", "bytes"), zip(*rows, strict=True), strict=True):
        spread = max(values) / min(values) - 1
        print(f"{name} per chip differ by at most {100 * spread:.3g} %.")


def row(planner: Planner) -> tuple[float, int]:
    """Prints the line of one topology, and returns its FLOPs and bytes per chip."""
    chips = len(planner.devices)
    rows = chips // _COLUMNS.value
    mesh = planner.plan_mesh(_MEMBERS.value * rows, rows)
    if mesh.flops_per_device is None:
        raise UserError(
            f"{mesh.num_members} members on {chips} chips could not be compiled: {mesh.refusal} "
            "Use fewer --members."
        )
    of_ensemble = sum(c.bytes for c in mesh.collectives if c.axis in (ENSEMBLE, "both"))
    total = mesh.bytes_per_device["total"]
    over_data = mesh.exchanged_bytes - of_ensemble
    print(
        f"| {chips} | {mesh.ensemble_axis} x {mesh.data_axis} | {mesh.num_members} "
        f"| {mesh.flops_per_device:,.0f} | {total:,} | {over_data:,} | {of_ensemble:,} |",
        flush=True,
    )
    return mesh.flops_per_device, total


def _prepare(argv: list[str]) -> list[str]:
    if not _TOPOLOGIES.value:
        raise UserError(
            "--topologies is empty. Give at least one topology, such as v5p:2x2x2, or leave the "
            "flag out to compare 8 to 1024 chips."
        )
    topology = Topology.parse(_TOPOLOGIES.value[-1])
    if not topology.is_at_hand():
        sys.exit(topology.run_module("benchmarks.weak_scaling", argv[1:]))
    return _CONFIG.prepare(argv)


if __name__ == "__main__":
    cli.run(main, _prepare, joins_cluster=lambda: False)
