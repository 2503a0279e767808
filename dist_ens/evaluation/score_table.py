"""The table of the scores of an ensemble, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dist_ens.ground.errors import counted
from dist_ens.metrics.catalogue import MULTILABEL, UNBALANCED, formatted, in_table

if TYPE_CHECKING:
    from rich.table import Table

    from dist_ens.evaluation.scores import Scores

# Largest numbers of members, of classes and of scores in a table.
_MOST_ROWS, _MOST_COLUMNS = 20, 10
# Metrics that are means over classes, by the name of the score of one class.
_OF_MEANS = {m.by_class[0]: m.name for m in (*UNBALANCED, *MULTILABEL) if m.by_class is not None}


def table_of(scores: "Scores", title: str | None, others: str) -> "Table":
    """Returns the table of some scores; see `Scores.table`."""
    from rich.table import Table  # The library rich is slow to import.

    groups, test, mean = len(scores.groups), scores.ensemble, scores.mean_member
    names = in_table(test or mean, scores.metrics)[:_MOST_COLUMNS]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in (*scores.hyper, *names):
        table.add_column(name, justify="right")

    def row(
        label: str,
        values: Mapping[str, float],
        style: str | None = None,
        settings: Sequence[float] | None = None,
    ) -> None:
        values = {_OF_MEANS.get(name, name): value for name, value in values.items()}
        cells = (formatted(values, name) if name in values else "" for name in names)
        shown = [f"{value:.3g}" for value in settings or ()] or [""] * len(scores.hyper)
        table.add_row(label, *shown, *cells, style=style)

    if test:
        size = (len(scores.members) - len(scores.left_out)) // groups
        mean_of = f"mean of {groups} groups, " if groups > 1 else ""
        row(f"{mean_of}ensemble of {size}", test, "bold")
    row("mean member", mean)
    table.add_section()
    for number, member in enumerate(scores.members[:_MOST_ROWS]):
        out = ", left out" if member["member_id"] in scores.left_out else ""
        if scores.member_weights is not None and not out:
            out = f", weight {scores.member_weights[number]:.3g}"
        settings = [values[number] for values in scores.hyper.values()]
        row(f"member {member['member_id']}{out}", member, "dim", settings)
    if len(scores.members) > _MOST_ROWS:
        table.add_row(f"… {len(scores.members) - _MOST_ROWS} more {others}", style="dim")
    named = [each for each in scores.by_class if isinstance(each["class"], str)]
    for kind, parts in (("class", named), ("target", scores.by_target)):
        if parts:
            table.add_section()
        for each in parts[:_MOST_ROWS]:
            row(f"{kind} {each[kind]}", {n: v for n, v in each.items() if n != kind})
        if len(parts) > _MOST_ROWS:
            more = counted(len(parts) - _MOST_ROWS, f"more {kind}")
            table.add_row(f"… {more}", style="dim")
    return table
