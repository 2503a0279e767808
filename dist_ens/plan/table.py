"""A plan as a table."""

from rich import box
from rich.table import Table

from dist_ens.layout import DATA, ENSEMBLE
from dist_ens.plan.planner import Plan, PlannedMesh

_SIZES = ("parameters", "optimizer", "activations", "total")


def plan_table(plan: Plan) -> Table:
    """The meshes of a plan, the best first."""
    table = Table(
        title="per device and step; sizes in MiB, the last two of what crosses an axis",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column(f"mesh\n({ENSEMBLE}\nx {DATA})", no_wrap=True)
    for name in ("members", "para-\nmeters", "opti-\nmizer", "acti-\nvations", "total", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("GFLOPs", "steps/s\nat most", DATA, ENSEMBLE):
        table.add_column(name, justify="right", no_wrap=True)
    for position, mesh in enumerate(plan.meshes):
        table.add_row(*_row(mesh), style="bold" if position == 0 else None)
    return table


def collective_lines(mesh: PlannedMesh) -> list[str]:
    """What crosses the axes of a mesh: a line for each kind and axis."""
    crossing = [(each.kind, each.axis) for each in mesh.collectives if each.axis != "none"]
    return [
        f"{crossing.count((kind, axis))} {kind} over {axis}, "
        f"{sum(c.bytes for c in mesh.collectives if (c.kind, c.axis) == (kind, axis)):,} bytes"
        for kind, axis in dict.fromkeys(crossing)
    ]


def _row(mesh: PlannedMesh) -> list[str]:
    def mib(size: int | None) -> str:
        return "?" if size is None else f"{size / 2**20:,.4g}"

    def crossing(axis: str) -> str:
        if mesh.flops_per_device is None:
            return "?"
        return mib(sum(c.bytes for c in mesh.collectives if c.axis in (axis, "both")))

    flops, pace = mesh.flops_per_device, mesh.max_steps_per_second
    return [
        f"{mesh.ensemble_axis} x {mesh.data_axis}",
        str(mesh.members_per_device),
        *(mib(mesh.bytes_per_device.get(name)) for name in _SIZES),
        "yes" if mesh.fits else "no",
        "?" if flops is None else f"{flops / 1e9:,.4g}",
        "" if pace is None else f"{pace:,.0f}",
        crossing(DATA),
        crossing(ENSEMBLE),
    ]
