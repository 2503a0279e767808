"""The style of a report's figures, and their conversion to SVG.

A figure is about as wide as a phone, so that its text can be read there. Content that needs more
room is divided among several figures side by side.
"""

import html
import io
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.figure import Figure

Numbers = Sequence[float | None] | np.ndarray
Options: TypeAlias = Any  # Options of matplotlib by name.

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID, FAINT = "#1d2329", "#5b6570", "#e4e7eb", "#8d97a3"
# The page's style sheet sets these colours, for a bright and for a dark screen.
_OF_THE_PAGE = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--rule)"}
_WIDTH = 5.4  # In inches, each of 72 units in the SVG.
_PNG_DPI = 200
_STYLE: Options = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 2,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # A run may be called a$b$.
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
styled = matplotlib.rc_context(_STYLE)  # Decorates the functions that draw figures.


def colours(count: int) -> list[str]:
    """Returns a number of colours that can be distinguished."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, count))
    return [matplotlib.colors.to_hex(shade) for shade in shades]


def on_any_screen(colour: str) -> str:
    """Returns a colour as CSS, which the page's style sheet makes lighter on a dark screen."""
    return _OF_THE_PAGE.get(colour, f"color-mix(in srgb, {colour}, #fff var(--lift))")


def finite(values: Numbers | Sequence[Numbers]) -> np.ndarray:
    """Returns numbers as float[...], with NaN where one is missing or not finite."""
    numbers = np.array(values, dtype=float)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def new_figure(height: float) -> Figure:
    """Returns an empty figure of the common width; `height` is in inches."""
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def svg(figure: Figure, alt: str, name: str) -> str:
    """Returns a figure as an SVG element that scales with its container.

    It is the same for the same figure and refers to no other file. Its ids are made from the name,
    which must be unique on the page.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(file, format="svg", dpi=_PNG_DPI, metadata=nothing)
    text = file.getvalue()
    inside = text[text.index(">", text.index("<svg")) + 1 :]
    # The page has its own style sheet, and matplotlib's would apply to every element of the page.
    # Ids of groups are the same in every figure, and nothing refers to them.
    inside = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'<g id="[^"]*"', "<g", inside)
    # Coordinates are cut to a hundredth of a unit, which is finer than any screen.
    inside = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), inside)
    # A bare colour would be the same on a bright and on a dark screen.
    inside = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda colour: on_any_screen(colour[0]), inside)
    width, height = (72 * inches for inches in figure.get_size_inches())
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(alt)}">'
        f"{inside.strip()}"
    )
