"""The console on which a run and the commands print."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dist_ens.ground.commands import printable

_WIDEST = 1000  # Largest width of a table, in columns of text.


class PlainConsole(Console):
    r"""A console that prints each text as it is, and control characters in it as escapes.

    >>> PlainConsole(width=40).print("[b] :smile: \x1b]0;title")
    [b] :smile: \x1b]0;title
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text for printing. Rich calls this for each string, also in a table."""
        return super().render_str(printable(text), **options)


def print_table(console: Console, table: Table) -> None:
    """Prints a table without cutting its cells, even on a narrow console."""
    widest = console.options.update(width=_WIDEST)
    width = console.width
    console.width = max(width, console.measure(table, options=widest).maximum)
    console.print(table)
    console.width = width
