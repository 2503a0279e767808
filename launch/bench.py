"""Times a config on this machine: dist-ens bench --config=FILE [--plot=FILE.png] [--json=FILE]."""

import math
import statistics
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dist_ens.ensemble import Ensemble
from dist_ens.experiment.bench import (
    DIST_ENS,
    LOOP,
    VMAP,
    WIDEST,
    Point,
    bench,
    layouts_to_time,
    with_examples_that_fit,
)
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.paths import shortened
from dist_ens.ground.terminal import PlainConsole, print_table
from dist_ens.layout import Layout
from dist_ens.report.files import to_json
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file

_PLOT = define_file("plot", "bench.png", "PNG file of steps/s over the number of members.")
_JSON = define_file("json", None, "File to write the figures to.")
_TURNS = flags.DEFINE_integer(
    "turns", 5, "Number of timings of each program. More give a smaller spread.", lower_bound=2
)
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a line for each number of members and a conclusion, and writes the picture."""
    experiment = _CONFIG.experiment()
    if not str(_PLOT.value).endswith(".png"):
        raise UserError(f"--plot={shortened(str(_PLOT.value))} does not end in .png.")
    if jax.process_count() > 1:
        raise UserError("One process times a config with its own devices. Start one.")
    cli.check_outputs(_PLOT, _JSON)
    console = PlainConsole()
    source = _CONFIG.file.open_source(experiment.data)
    num_examples = len(source.train)
    source = with_examples_that_fit(source, Layout.make(1))
    if len(source.train) < num_examples:
        console.print(
            f"Only the first {len(source.train):,} of {num_examples:,} training examples are used, "
            "because more do not fit in memory in every way. Reading of data is not timed.",
            soft_wrap=True,
        )
    parts = _CONFIG.file.own_parts(source.spec)
    run = Run(experiment, source.spec, source.num_train_examples)

    def make_ensemble(layout: Layout) -> Ensemble:
        return build_ensemble(run, layout, parts, source)

    layouts = layouts_to_time(run)
    sizes = ", ".join(str(layout.num_members) for layout in layouts)
    console.print(
        f"Timing these numbers of members: {sizes}. {quoted(_PLOT.value)} is redrawn after each.",
        soft_wrap=True,
    )
    points: list[Point] = []
    try:
        for layout in layouts:
            point = bench(run, source, make_ensemble, layout, _TURNS.value)
            points.append(point)
            rate = point.examples_per_second[DIST_ENS]
            console.print(f"num_members={point.num_members}: {rate:,.0f} member-examples/s")
            _write(points)
    finally:  # Measurements before an interruption or a full disk are shown too.
        if points:
            _tell(console, points)


def _tell(console: Console, points: Sequence[Point]) -> None:
    print_table(console, _table(points))
    if any(VMAP not in point.ratios for point in points):
        console.print(f"{VMAP} is not timed for waves, because it holds all members at once.")
    console.print(_conclusion(points[-1]), soft_wrap=True)


def _write(points: Sequence[Point]) -> None:
    if _JSON.value is not None:
        as_json = {"sizes": [point.to_dict() for point in points]}
        cli.write_file(_JSON, to_json(as_json, indent=2) + "\n")
    from dist_ens.report.figures import plot_rates  # Matplotlib is slow to import.

    cli.write_file(_PLOT, plot_rates(*_curves(points)))


def _table(points: Sequence[Point]) -> Table:
    """Returns the table of the measurements."""
    title = "member-examples per second (?: the spread is too wide to conclude)"
    table = Table(title=title, title_justify="left")
    for column in ("members", DIST_ENS, LOOP, VMAP, f"x {LOOP}", f"x {VMAP}"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("execution", no_wrap=True)  # The name of an execution must not be cut.
    for point in points:
        rates = map(point.examples_per_second.get, (DIST_ENS, LOOP, VMAP))
        table.add_row(
            str(point.num_members),
            *("" if rate is None else f"{rate:,.0f}" for rate in rates),
            *(_ratio(point, name) for name in (LOOP, VMAP)),
            point.execution,
        )
    return table


def _ratio(point: Point, name: str) -> str:
    """Returns the median and the range of a way's ratios as a text; empty without measurements."""
    ratios = point.ratios.get(name)
    if not ratios:
        return ""
    doubt = "" if point.is_conclusive(name) else " ?"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}){doubt}"


def _conclusion(point: Point) -> str:
    """Returns a sentence that compares dist_ens with the other ways."""
    if not all(map(point.is_conclusive, point.ratios)):
        return (
            "The spread is too wide to conclude: the ratios of two rounds differ by more than a "
            f"factor of {WIDEST}. Run the command again on an idle machine, or with more --turns."
        )
    others = {LOOP: "a loop over them", VMAP: "jit(vmap)"}
    compared = ", and ".join(
        f"{_ratio(point, name)} times as fast as {others[name]}" for name in point.ratios
    )
    return (
        f"With {counted(point.num_members, 'member')}, dist_ens ({point.execution}) is {compared}."
    )


def _curves(points: Sequence[Point]) -> tuple[list[int], dict[str, list[float]]]:
    """Returns the numbers of members and the rates of each way, NaN without a measurement."""
    return [point.num_members for point in points], {
        name: [point.examples_per_second.get(name, math.nan) for point in points]
        for name in (DIST_ENS, LOOP, VMAP)
    }


run = cli.command(main, _CONFIG.prepare)

if __name__ == "__main__":
    run()
