"""The figures of a report page, drawn by matplotlib and embedded in the page as SVG.

A figure is about as wide as a phone, so that its text can be read there. Content that needs more
room is divided among several figures side by side.
"""

import dataclasses
import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

Numbers = Sequence[float | None] | np.ndarray

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MOST_MEMBER_LINES = 100
# Shapes that are drawn once a member are vectors up to this many members, and above it a PNG.
_MOST_AS_VECTORS = 40
_MOST_WITH_NUMBERS = 10
_MOST_MEMBERS_NAMED = 10
_MOST_POINTS_NAMED = 8
_LONGEST_LABEL = 18

INK, _MUTED, _GRID, _FAINT = "#1d2329", "#5b6570", "#e4e7eb", "#8d97a3"
# The page's style sheet sets these colours, for a bright and for a dark screen.
_OF_THE_PAGE = {INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--rule)"}
_WIDTH = 5.4  # In inches, each of 72 units in the SVG.
_SPAN_OF_LOG_AXIS = 10**1.5
_PNG_DPI = 200
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 2,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # A run may be called a$b$.
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
_styled = matplotlib.rc_context(_STYLE)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        x: Positions of the points on the horizontal axis.
        y: Heights of the points. A value that is missing or not finite leaves a gap.
        colour: Colour of the line.
        label: Text beside the line. Empty for no text.
        dashed: Whether the line is dashed. Dashed lines are drawn below solid ones.
        band: Heights of the lower and the upper edge of a band around the line. None for no band.
    """

    x: Numbers
    y: Numbers
    colour: str
    label: str = ""
    dashed: bool = False
    band: tuple[Numbers, Numbers] | None = None


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


@_styled
def lines(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_is_count: bool = False,
    from_zero: bool = False,
) -> Figure:
    """Draws curves over one axis, each with its label at its end.

    Args:
        curves: Curves, in the order of drawing.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        x_is_count: Whether `x` is a count, for which the axis is logarithmic with base 2.
        from_zero: Whether the vertical axis begins at zero.
    """
    figure = _figure(3.7)
    axes = figure.add_subplot()
    for curve in curves:
        _draw(axes, curve, marker="o" if len(curve.x) <= 20 else None)
    if x_is_count:
        _count_axis(axes, [n for curve in curves for n in finite(curve.x)])
    else:
        axes.margins(x=0.02)
        points = np.unique(np.concatenate([finite(curve.x) for curve in curves]))
        if len(points) <= _MOST_POINTS_NAMED:
            axes.set_xticks(points[np.isfinite(points)])
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    _label_ends(axes, curves)
    return figure


@_styled
def against_diagonal(curves: Sequence[Curve], *, x_label: str, y_label: str) -> Figure:
    """Draws curves of one probability over another, together with the ideal diagonal."""
    figure = _figure(4.6)
    axes = figure.add_subplot()
    _diagonal(axes)
    for curve in curves:
        _draw(axes, curve, marker="o" if len(curve.x) <= 20 else None)
    axes.set(xlabel=x_label, ylabel=y_label)
    _legend(figure)
    return figure


@_styled
def reliability(bins: Sequence[tuple[Curve, Numbers]]) -> Figure:
    """Draws accuracy over confidence in bins of equal width, and the share of examples in each bin.

    Args:
        bins: Curves of accuracy over confidence with a point for each bin, each with the number of
            examples in its bins.
    """
    figure = _figure(5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _diagonal(above)
    for curve, count in bins:
        confidence, accuracy, counts = finite(curve.x), finite(curve.y), finite(count)
        filled = np.isfinite(confidence) & np.isfinite(accuracy)
        share = np.nan_to_num(counts) / max(np.nansum(counts), 1)
        above.plot(confidence[filled], accuracy[filled], **_line(curve), linewidth=1, alpha=0.5)
        above.scatter(
            confidence[filled],
            accuracy[filled],
            12 + 80 * share[filled],  # A point of few examples is small, so as not to stand out.
            facecolors="none" if curve.dashed else curve.colour,
            edgecolors=curve.colour,
            zorder=_line(curve)["zorder"],
            label=curve.label,
        )
        edges = np.linspace(0, 1, len(share) + 1)
        _stairs(below, Curve(edges, share, curve.colour, dashed=curve.dashed))
    above.set_ylabel("accuracy")
    _legend(figure)
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    below.yaxis.set_major_locator(MaxNLocator(2))
    below.set(xlabel="confidence", ylabel="examples")
    return figure


@_styled
def histograms(curves: Sequence[Curve], *, x_label: str, level: float | None = None) -> Figure:
    """Draws densities over bins. A solid curve is filled.

    Args:
        curves: Curves whose `x` are the edges of the bins, and whose `y` is the density in each.
        x_label: Label of the horizontal axis.
        level: Height of a dashed horizontal line, the ideal density. Default: no line.
    """
    figure = _figure(3.7)
    axes = figure.add_subplot()
    drawn = [curve for curve in curves if np.isfinite(finite(curve.x)).all()]
    for curve in drawn:
        _stairs(axes, curve)
    if level is not None:
        axes.axhline(level, color=_MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel="density")
    if len(drawn) > 1:
        _legend(figure)
    return figure


@_styled
def training(
    steps: Numbers,
    members: np.ndarray,
    curves: Sequence[Curve],
    *,
    y_label: str,
    y_values: np.ndarray,
) -> Figure:
    """Draws a faint curve for every member, and a few bold curves.

    The vertical axis is logarithmic if the values span a wide range.

    Args:
        steps: Steps of the points.
        members: Values of the members, NaN if missing; float[points, members].
        curves: Bold curves.
        y_label: Label of the vertical axis.
        y_values: All values of the figures that share the vertical axis, which set its range.
    """
    figure = _figure(3.7)
    axes = figure.add_subplot()
    count = members.shape[1]
    drawn = np.linspace(0, count - 1, min(count, MOST_MEMBER_LINES)).round().astype(int)
    axes.plot(
        finite(steps),
        members[:, drawn],
        color=_FAINT,
        linewidth=0.8,
        alpha=float(np.clip(8 / max(count, 1), 0.2, 0.7)),
        rasterized=count > _MOST_AS_VECTORS,
    )
    for curve in curves:
        _draw(axes, curve, marker=None)
    y_values = y_values[np.isfinite(y_values)]
    axes.update_datalim(np.column_stack([y_values, y_values]), updatex=False)
    if len(y_values) and y_values.max() > _SPAN_OF_LOG_AXIS * y_values.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set(xlabel="step", ylabel=y_label)
    _label_ends(axes, curves)
    return figure


@_styled
def heat_map(matrix: Numbers, member_ids: Sequence[int], *, label: str, colour: str) -> Figure:
    """Draws a number for every pair of members. A larger number has a stronger colour.

    Args:
        matrix: Numbers, float[members, members]. The diagonal is left out, and cells that are not
            finite are grey.
        member_ids: Ids of the members, in their order.
        label: Label of the colour bar.
        colour: Colour of the largest number. Zero is transparent.
    """
    figure = _figure(4.4)
    axes = figure.add_subplot()
    values, count = finite(matrix), len(member_ids)
    np.fill_diagonal(values, np.nan)
    most = np.nanmax(values) if np.isfinite(values).any() else 1.0
    shades = LinearSegmentedColormap.from_list("", [(colour, 0.0), (colour, 1.0)])
    cells = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=shades.with_extremes(bad=(_FAINT, 0.25)),
        vmin=0,
        vmax=most or 1.0,
    )
    if count <= _MOST_WITH_NUMBERS:
        digits = max(1 - math.floor(math.log10(most or 1.0)), 0)
        for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
            value = values[row, column]
            number = f"{value:.{digits}f}".removeprefix("0")
            on_it = "white" if value > 0.8 * most else INK
            axes.text(column, row, number, color=on_it, ha="center", va="center", fontsize=9)
    every = math.ceil(count / _MOST_MEMBERS_NAMED)
    ticks = range(0, count, every)
    axes.set_xticks(ticks, [str(member_ids[tick]) for tick in ticks])
    axes.set_yticks(ticks, [str(member_ids[tick]) for tick in ticks])
    axes.set(xlabel="member", ylabel="member")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(cells, ax=axes, label=label, shrink=0.8)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    return figure


def svg(figure: Figure, alt: str, name: str) -> str:
    """Returns a figure as an SVG element that scales with its container.

    Args:
        figure: Figure that a function of this module drew.
        alt: Description of the figure for screen readers.
        name: Name of the figure, unique on the page. The ids in the SVG are made from it.

    Returns:
        The SVG, the same for the same figure. It contains no date and refers to no other file.
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


def _figure(height: float) -> Figure:
    """Returns an empty figure of the common width; `height` is in inches."""
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _line(curve: Curve) -> dict[str, Any]:
    """Returns the style of a curve's line."""
    return {
        "color": curve.colour,
        "linestyle": (0, (3, 1.5)) if curve.dashed else "-",
        "zorder": 2 if curve.dashed else 3,
    }


def _draw(axes: Axes, curve: Curve, *, marker: str | None) -> None:
    """Draws a curve with its band."""
    x = finite(curve.x)
    if curve.band is not None:
        low, high = (finite(edge) for edge in curve.band)
        axes.fill_between(x, low, high, color=curve.colour, alpha=0.1, linewidth=0)
        axes.plot(x, np.column_stack([low, high]), color=curve.colour, linewidth=0.7, alpha=0.5)
    axes.plot(
        x,
        finite(curve.y),
        **_line(curve),
        label=_short(curve.label),
        marker=marker,
        markersize=5,
    )


def _stairs(axes: Axes, curve: Curve) -> None:
    """Draws the heights of bins, filled if the curve is solid: two fills would show a third colour.

    Args:
        axes: Axes to draw on.
        curve: Curve whose `x` are the edges of the bins.
    """
    edges, heights = finite(curve.x), np.nan_to_num(finite(curve.y))
    if not curve.dashed:
        axes.stairs(heights, edges, color=curve.colour, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(heights, edges, **_line(curve), linewidth=1.5, label=_short(curve.label))


def _diagonal(axes: Axes) -> None:
    """Draws the ideal diagonal from (0, 0) to (1, 1)."""
    axes.plot((0, 1), (0, 1), color=_MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="ideal")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))


def _legend(figure: Figure) -> None:
    """Adds a legend above the axes, where it hides no curve."""
    figure.legend(loc="outside upper left", ncols=3, fontsize=10, columnspacing=1.4)


def _count_axis(axes: Axes, counts: Sequence[float]) -> None:
    """Makes the horizontal axis logarithmic, with ticks at counts that are far enough apart."""
    positive = sorted({n for n in counts if n > 0})
    named = positive[:1]
    for count in positive:
        if count >= max(1.3, (positive[-1] / positive[0]) ** (1 / 12)) * named[-1]:
            named.append(count)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(named, [f"{n:g}" for n in named])


def _label_ends(axes: Axes, curves: Sequence[Curve]) -> None:
    """Writes each curve's label beside its last point, moved if labels would overlap.

    A line in the curve's colour leads to the label.
    """
    ends = []
    axes.get_ylim()  # This call computes the limits from the data.
    to_axes = axes.transData + axes.transAxes.inverted()
    for curve in curves:
        y = finite(curve.y)
        y = y[np.isfinite(y)]
        if curve.label and len(y):
            ends.append((float(to_axes.transform((axes.get_xlim()[1], y[-1]))[1]), curve))
    ends.sort(key=lambda end: end[0])
    for height, (end, curve) in zip(_apart([end[0] for end in ends], 0.08), ends, strict=True):
        axes.annotate(
            _short(curve.label),
            (1.0, end),
            (1.08, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                **_line(curve),
                "arrowstyle": "-",
                "linewidth": 1.2,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )


def _short(label: str) -> str:
    """Returns a label that leaves room for the figure: the start and the end of a long label."""
    label = label.lstrip("_")  # Matplotlib ignores labels that begin with an underscore.
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[: half - 1]}…{label[-half:]}"


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Returns ascending heights in [0, 1], moved so that neighbours are `gap` apart if they fit."""
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    apart: list[float] = []
    for height in heights:
        apart.append(max(height, apart[-1] + gap) if apart else height)
    highest = 1.0
    for k in reversed(range(len(apart))):
        apart[k] = min(apart[k], highest)
        highest = apart[k] - gap
    return apart
