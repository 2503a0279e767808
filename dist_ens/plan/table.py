"""The table of a plan."""

import math

from rich import box
from rich.table import Table

from dist_ens.plan.planned import Plan, PlannedMesh

_SIZES = ("parameters", "optimizer", "training_set", "activations", "total")


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
            _shape(mesh),
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
    return f"{_shape(mesh)}: {mesh.execution}{waves}; {mesh.place}; {needs}"


def _mib(size: float | None) -> str:
    return "?" if size is None else _short(size / 2**20)


def _shape(mesh: PlannedMesh) -> str:
    return f"{mesh.ensemble_axis} x {mesh.data_axis}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
