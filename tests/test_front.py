"""What the commands share."""

import io

from rich.console import Console
from rich.table import Table

from launch import front


def test_figures_are_not_cut_however_narrow_the_console():
    table = Table("mesh", *["bytes"] * 20)
    figures = [f"{number:,}" for number in range(10**9, 10**9 + 20)]
    table.add_row("1024 x 1024", *figures)
    console = Console(file=io.StringIO(), width=40)
    front.print_table(console, table)
    printed = console.file.getvalue()
    assert all(printed.count(figure) == 1 for figure in figures)
    assert "1024 x 1024" in printed
    assert "\u2026" not in printed
    assert console.width == 40
