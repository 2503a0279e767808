"""Times a config on this machine: dist-ens bench --config=FILE [--plot=FILE.png] [--json=FILE]."""

import math
import statistics
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dist_ens import report
from dist_ens.bench import (
    DIST_ENS,
    LOOP,
    VMAP,
    WIDEST,
    Point,
    bench,
    layouts_to_time,
    with_examples_that_fit,
)
from dist_ens.commands import quoted
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.layout import Layout
from dist_ens.paths import shortened
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_path

_PLOT = define_path("plot", "bench.png", "File for the picture.")
_JSON = define_path("json", None, "File to write the figures to.")
_TURNS = flags.DEFINE_integer("turns", 5, "Turns of each way.", lower_bound=2)
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a line for each number of members, then what is concluded; leaves the picture."""
    experiment = _CONFIG.experiment()
    if _PLOT.value.suffix != ".png":
        raise UserError(
            f"--plot={shortened(str(_PLOT.value))} does not end in .png. Try --plot=bench.png."
        )
    if jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes were started, and one process times a config with "
            "its own devices. Start one."
        )
    cli.check_outputs(_PLOT, _JSON)
    console = Console(markup=False, highlight=False)
    source = _CONFIG.open_source(experiment.data)
    num_examples = len(source.train)
    source = with_examples_that_fit(source, Layout.make(1))
    if len(source.train) < num_examples:
        console.print(
            f"Of {num_examples:,} training examples the first {len(source.train):,} are used, for "
            "which there is room in all ways. How fast others are read is not timed.",
            soft_wrap=True,
        )
    parts = _CONFIG.own_parts(source.spec)
    run = Run(experiment, source.spec, source.num_train_examples)
    ranges = source.input_ranges() if experiment.loss.adversarial else None

    def make_ensemble(layout: Layout) -> Ensemble:
        return build_ensemble(run, layout, parts, ranges)

    layouts = layouts_to_time(run)
    sizes = ", ".join(str(layout.num_members) for layout in layouts)
    console.print(
        f"To time, by number of members: {sizes}. After each {quoted(_PLOT.value)} is drawn anew.",
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
    finally:  # also of what was timed before an interruption, or before a disk was full
        if points:
            _tell(console, points)


def _tell(console: Console, points: Sequence[Point]) -> None:
    """The table, and what is concluded from it."""
    cli.print_table(console, _table(points))
    in_doubt = [point for point in points if not all(map(point.is_conclusive, point.ratios))]
    if in_doubt and points[-1] not in in_doubt:  # else the conclusion says it
        console.print("?: the spread is too wide to conclude.")
    if any(VMAP not in point.ratios for point in points):
        console.print(f"{VMAP} would hold all members at once: not where they come in waves.")
    console.print(_conclusion(points[-1]), soft_wrap=True)


def _write(points: Sequence[Point]) -> None:
    """The files, of what is known so far: whoever stops here has that."""
    if _JSON.value is not None:
        as_json = {"sizes": [point.to_dict() for point in points]}
        cli.write_file(_JSON, lambda path: report.write_scores(path, as_json))
    cli.write_file(_PLOT, lambda path: report.plot_rates(path, *_curves(points)))


def _table(points: Sequence[Point]) -> Table:
    table = Table(title="member-examples per second", title_justify="left")
    for column in ("members", DIST_ENS, LOOP, VMAP, f"x {LOOP}", f"x {VMAP}"):
        table.add_column(column, justify="right", min_width=len(column))
    table.add_column("execution", no_wrap=True)  # names of executions are never cut
    for point in points:
        table.add_row(
            str(point.num_members),
            *(_rate(point, name) for name in (DIST_ENS, LOOP, VMAP)),
            *(_ratio(point, name) for name in (LOOP, VMAP)),
            point.execution,
        )
    return table


def _rate(point: Point, name: str) -> str:
    rate = point.examples_per_second.get(name)
    return "" if rate is None else f"{rate:,.0f}"


def _ratio(point: Point, name: str) -> str:
    ratios = point.ratios.get(name)
    if ratios is None:
        return ""
    doubt = "" if point.is_conclusive(name) else " ?"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}){doubt}"


def _conclusion(point: Point) -> str:
    if not all(map(point.is_conclusive, point.ratios)):
        return (
            "The spread is too wide to conclude: neighbours in time differ by more than "
            f"{WIDEST} times. Run it again on a machine that does nothing else, or with more "
            "--turns."
        )
    others = {LOOP: "a loop over them", VMAP: "jit(vmap)"}
    compared = ", and ".join(
        f"{_ratio(point, name)} times as fast as {others[name]}" for name in point.ratios
    )
    return f"With {point.num_members} members dist_ens ({point.execution}) is {compared}."


def _curves(points: Sequence[Point]) -> tuple[list[int], dict[str, list[float]]]:
    return [point.num_members for point in points], {
        name: [point.examples_per_second.get(name, math.nan) for point in points]
        for name in (DIST_ENS, LOOP, VMAP)
    }


def run() -> None:
    """The whole command."""
    cli.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
