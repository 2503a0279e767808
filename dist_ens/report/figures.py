"""The figures of a report page and of a benchmark, drawn by matplotlib."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from dist_ens.report.style import FAINT, INK, MUTED, Numbers, Options, finite, new_figure, styled

MOST_MEMBER_LINES = 100
# Shapes that are drawn once a member are vectors up to this many members, and above it a PNG.
_MOST_AS_VECTORS = 40
_MOST_WITH_NUMBERS = 10
_MOST_MEMBERS_NAMED = 10
_MOST_POINTS_NAMED = 8
_MOST_MARKED = 20  # Largest number of points of a curve that are marked.
_LONGEST_LABEL = 18
_SPAN_OF_LOG_AXIS = 10**1.5
_IDEAL: Options = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a figure, with a gap where a value is missing or not finite.

    Dashed lines are drawn below solid ones. A band has a lower and an upper edge.
    """

    x: Numbers
    y: Numbers
    colour: str
    label: str = ""
    dashed: bool = False
    band: tuple[Numbers, Numbers] | None = None


@styled
def lines(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_is_count: bool = False,
    from_zero: bool = False,
) -> Figure:
    """Draws labelled curves over one axis, which is logarithmic with base 2 for counts."""
    figure = new_figure(3.7)
    axes = figure.add_subplot()
    for curve in curves:
        _draw(axes, curve)
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


@styled
def against_diagonal(curves: Sequence[Curve], *, x_label: str, y_label: str) -> Figure:
    """Draws curves of one probability over another, together with the ideal diagonal."""
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    _diagonal(axes)
    for curve in curves:
        _draw(axes, curve)
    axes.set(xlabel=x_label, ylabel=y_label)
    _legend(figure)
    return figure


@styled
def reliability(bins: Sequence[tuple[Curve, Numbers]]) -> Figure:
    """Draws accuracy over confidence in bins, and the share of examples in each."""
    figure = new_figure(5.4)
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


@styled
def histograms(curves: Sequence[Curve], *, x_label: str, level: float | None = None) -> Figure:
    """Draws densities over bins, with the edges `x`, and a dashed line at an ideal `level`."""
    figure = new_figure(3.7)
    axes = figure.add_subplot()
    drawn = [curve for curve in curves if np.isfinite(finite(curve.x)).all()]
    for curve in drawn:
        _stairs(axes, curve)
    if level is not None:
        axes.axhline(level, **_IDEAL)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel="density")
    if len(drawn) > 1:
        _legend(figure)
    return figure


@styled
def training(
    steps: Numbers,
    members: np.ndarray,
    curves: Sequence[Curve],
    *,
    y_label: str,
    y_values: np.ndarray,
) -> Figure:
    """Draws a faint curve for every member, float[points, members], and a few bold curves.

    `y_values` are those of all figures that share the vertical axis. It is logarithmic if their
    range is wide.
    """
    figure = new_figure(3.7)
    axes = figure.add_subplot()
    count = members.shape[1]
    drawn = np.linspace(0, count - 1, min(count, MOST_MEMBER_LINES)).round().astype(int)
    axes.plot(
        finite(steps),
        members[:, drawn],
        color=FAINT,
        linewidth=0.8,
        alpha=float(np.clip(8 / max(count, 1), 0.2, 0.7)),
        rasterized=count > _MOST_AS_VECTORS,
    )
    for curve in curves:
        _draw(axes, curve, most_marked=0)
    y_values = y_values[np.isfinite(y_values)]
    axes.update_datalim(np.column_stack([y_values, y_values]), updatex=False)
    if len(y_values) and y_values.max() > _SPAN_OF_LOG_AXIS * y_values.min() > 0:
        axes.set_yscale("log")
        _number_log_axis(axes.yaxis)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set(xlabel="step", ylabel=y_label)
    _label_ends(axes, curves)
    return figure


@styled
def points(
    x: Numbers, y: Numbers, colour: str, *, labels: tuple[str, str], shade: Numbers | None = None
) -> Figure:
    """Draws a point for each member, over axes that are logarithmic if the values span much.

    `labels` are those of the axes. A `shade` colours the points by a third number, whose values
    are beside a bar.
    """
    figure = new_figure(3.7)
    axes = figure.add_subplot()
    for values, name in ((finite(x), "x"), (finite(y), "y")):
        if np.nanmin(values) > 0 and np.nanmax(values) > _SPAN_OF_LOG_AXIS * np.nanmin(values):
            getattr(axes, f"set_{name}scale")("log")
            _number_log_axis(getattr(axes, f"{name}axis"))
    shown = finite(x), finite(y)
    if shade is None:
        axes.scatter(*shown, 26, color=colour, alpha=0.7)
    else:
        drawn = axes.scatter(*shown, 34, c=finite(shade), cmap="viridis")
        bar = figure.colorbar(drawn, ax=axes, shrink=0.8)
        bar.outline.set_visible(False)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    return figure


def _number_log_axis(axis: Axis) -> None:
    """Writes plain numbers along a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@styled
def heat_map(matrix: Numbers, member_ids: Sequence[int], *, label: str, colour: str) -> Figure:
    """Draws a number for every pair of members; grey cells are not finite."""
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    values, count = finite(matrix), len(member_ids)
    np.fill_diagonal(values, np.nan)
    most = np.nanmax(values) if np.isfinite(values).any() else 1.0
    shades = LinearSegmentedColormap.from_list("", [(colour, 0.0), (colour, 1.0)])
    cells = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=shades.with_extremes(bad=(FAINT, 0.25)),
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


def plot_rates(num_members: Sequence[int], rates: Mapping[str, Sequence[float]]) -> bytes:
    """Returns curves of member-examples per second over the number of members, as a PNG file."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, values in rates.items():
        axes.plot(num_members, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(num_members, [str(n) for n in num_members])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("members")
    axes.set_ylabel("member-examples per second")
    axes.grid(alpha=0.3)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _line(curve: Curve) -> Options:
    """Returns the style of a curve's line."""
    return {
        "color": curve.colour,
        "linestyle": (0, (3, 1.5)) if curve.dashed else "-",
        "zorder": 2 if curve.dashed else 3,
    }


def _draw(axes: Axes, curve: Curve, most_marked: int = _MOST_MARKED) -> None:
    """Draws a curve with its band, and marks its points if they are few."""
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
        marker="o" if len(x) <= most_marked else None,
        markersize=5,
    )


def _stairs(axes: Axes, curve: Curve) -> None:
    """Draws the heights of bins, filled if solid: two fills would show a third colour."""
    edges, heights = finite(curve.x), np.nan_to_num(finite(curve.y))
    if not curve.dashed:
        axes.stairs(heights, edges, color=curve.colour, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(heights, edges, **_line(curve), linewidth=1.5, label=_short(curve.label))


def _diagonal(axes: Axes) -> None:
    """Draws the ideal diagonal from (0, 0) to (1, 1)."""
    axes.plot((0, 1), (0, 1), **_IDEAL, label="ideal")
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
    """Writes each curve's label beside its last point, with a line to it if it had to be moved."""
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
