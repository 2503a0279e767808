"""Tables that are printed on the terminal."""

import io
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from dist_ens.ground.json_text import Json
from dist_ens.ground.terminal import PlainConsole
from dist_ens.metrics.catalogue import formatted, in_table
from dist_ens.metrics.metric import Metric

_MEMBERS_SHOWN = 20
_CLASSES_SHOWN = 20
_MOST_COLUMNS = 10
_WIDTH = 160
_WIDEST = 1000  # Largest width of a table on the terminal, in columns of text.


def scores_table(
    ensemble: Mapping[str, float],
    mean_member: Mapping[str, float],
    members: Sequence[Mapping[str, float]],
    num_groups: int = 1,
    left_out: Collection[int] = (),
    *,
    metrics: Sequence[Metric] = (),
    by_class: Sequence[Mapping[str, Json]] = (),
    title: str | None = "test split",
    others: str = "in summary.json",
) -> Table:
    """Returns the table of the ensemble, the mean member and the first 20 members.

    `others` says where the scores of further members are.
    """
    names = in_table(ensemble or mean_member, metrics)[:_MOST_COLUMNS]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")

    def row(label: str, scores: Mapping[str, float], style: str | None = None) -> None:
        cells = (formatted(scores, name) if name in scores else "" for name in names)
        table.add_row(label, *cells, style=style)

    if ensemble:
        size = (len(members) - len(left_out)) // num_groups
        mean_of = f"mean of {num_groups} groups, " if num_groups > 1 else ""
        row(f"{mean_of}ensemble of {size}", ensemble, "bold")
    row("mean member", mean_member)
    table.add_section()
    for member in members[:_MEMBERS_SHOWN]:
        out = ", left out" if member["member_id"] in left_out else ""
        row(f"member {int(member['member_id'])}{out}", member, "dim")
    if len(members) > _MEMBERS_SHOWN:
        table.add_row(f"… {len(members) - _MEMBERS_SHOWN} more {others}", style="dim")
    if by_class:
        table.add_section()
    for each in by_class[:_CLASSES_SHOWN]:
        row(f"class {each['class']}", each)
    if len(by_class) > _CLASSES_SHOWN:
        table.add_row(f"… {len(by_class) - _CLASSES_SHOWN} more classes", style="dim")
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table without cutting its cells, even on a narrow console."""
    widest = console.options.update(width=_WIDEST)
    width = console.width
    console.width = max(width, console.measure(table, options=widest).maximum)
    console.print(table)
    console.width = width


def as_text(table: Table) -> str:
    """Returns a table as plain text."""
    console = PlainConsole(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
