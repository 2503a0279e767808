"""The sections of a report page: their figures and captions."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dist_ens.json_text import Json
from dist_ens.layout import ENSEMBLE
from dist_ens.metrics.catalogue import COMPARED, label_of
from dist_ens.report import figures
from dist_ens.report.figures import Curve, Numbers
from dist_ens.report.run_files import RunReport

MEAN_MEMBER = "mean_member"
_BOTH = (ENSEMBLE, MEAN_MEMBER)
_BOTH_KEY = "solid: the ensemble, dashed: its mean member"
# Largest number of points of a training curve. More would be finer than the figure.
_MOST_POINTS = 300
# Metrics whose course over training is drawn.
_TRAINING = ("train/loss", *(f"test/{metric.name}" for metric in COMPARED))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run that is shown on the page.

    Attributes:
        run: Content of its report.
        colour: Colour of the run among several. None for a single run.
    """

    run: RunReport
    colour: str | None

    def colour_of(self, who: str) -> str:
        """Returns the colour of the ensemble or of its mean member.

        Only a single run has two: among several runs, a colour is a run everywhere on the page.
        """
        return self.colour or figures.COLOURS[_BOTH.index(who)]

    @property
    def title(self) -> str:
        """Title of a figure that shows only this run."""
        return self.run.name if self.colour else ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A figure of a section.

    Attributes:
        figure: Figure.
        alt: Description of the figure for screen readers.
        title: Title of the figure.
    """

    figure: Figure
    alt: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: figures of one kind.

    Attributes:
        name: Name of the section in links.
        title: Heading of the section.
        caption: Explanation of the figures.
        panels: Figures of the section.
        key: Explanation of the line styles in the legend of several runs. None if each run has
            separate figures, which need no legend.
        note: Sentences about what is not drawn. They are shown even if there is no figure.
    """

    name: str
    title: str
    caption: str
    panels: list[Panel]
    key: str | None = None
    note: str = ""


def having(shown: Sequence[Shown], name: str) -> Iterator[tuple[Shown, Json]]:
    """Returns the runs whose curves have a section, each with the data of the section."""
    return (
        (each, data)
        for each in shown
        for key, data in each.run.curves.items()
        if key.partition("=")[0] == name  # Such as `ood=notmnist`, beside `ood=kmnist`.
    )


def _of_both(each: Shown, points: Mapping[str, tuple[Numbers, Numbers]]) -> list[Curve]:
    """Returns the curves of the ensemble and of its mean member, which is dashed.

    Args:
        each: Run of the curves.
        points: Horizontal and vertical positions of the points, for those of the two that exist.
    """
    return [
        Curve(*points[who], each.colour_of(who), _words(who), dashed=who == MEAN_MEMBER)
        for who in _BOTH
        if who in points
    ]


def _in_one_figure(runs: Sequence[tuple[Shown, Json]], x: str) -> list[Curve]:
    """Returns the curves of both of several runs, without labels if a legend tells the runs apart.

    Args:
        runs: Runs, each with the data of the section.
        x: Name of the horizontal positions in the data.
    """
    return [
        dataclasses.replace(curve, label="" if each.colour else curve.label)
        for each, of in runs
        for curve in _of_both(each, {who: (of[x], of[who]) for who in _BOTH if who in of})
    ]


def _reliability(shown: Sequence[Shown]) -> Section:
    """Returns the section with reliability diagrams."""
    panels = []
    for each, of in having(shown, "reliability"):
        points = {who: (bins["confidence"], bins["accuracy"]) for who, bins in of.items()}
        counts = (of[who]["count"] for who in _BOTH if who in of)
        figure = figures.reliability([*zip(_of_both(each, points), counts, strict=True)])
        alt = "Accuracy over confidence in bins, for the ensemble and for the mean member."
        panels.append(Panel(figure, alt, each.title))
    return Section(
        "reliability",
        "Reliability",
        "Each point is a bin of test examples, and a larger point has more examples. On the "
        "diagonal, predictions with a confidence of 80 % are right 80 % of the time. Below it the "
        "model is overconfident, above it underconfident. The bars show the share of the examples "
        "in each bin. A point over a low bar is uncertain.",
        panels,
    )


def _coverage_curve(shown: Sequence[Shown]) -> Section:
    """Returns the section with the coverage of intervals."""
    curves = _in_one_figure([*having(shown, "coverage_curve")], "nominal")
    return Section(
        "coverage_curve",
        "Coverage of intervals",
        "The share of targets inside the central intervals of a given predicted probability. On "
        "the diagonal the intervals have the right width. Below it they are too narrow and the "
        "model is overconfident. Above it they are too wide.",
        _one_panel(
            curves,
            lambda: figures.against_diagonal(
                curves, x_label="predicted probability", y_label="share of targets inside"
            ),
            "Share of targets inside over the probability that the interval was predicted to have.",
        ),
        key=_BOTH_KEY,
    )


def _pit(shown: Sequence[Shown]) -> Section:
    """Returns the section with the histograms of PIT values."""
    panels = []
    for each, of in having(shown, "pit"):
        counts = {who: figures.finite(of[who]) for who in _BOTH if who in of}
        densities = {
            who: (
                np.linspace(0, 1, len(count) + 1),
                len(count) * count / max(np.nansum(count), 1),
            )
            for who, count in counts.items()
        }
        figure = figures.histograms(
            _of_both(each, densities),
            x_label="predicted probability of less than the target",
            level=1.0,
        )
        alt = "Density of the predicted probability of less than the target."
        panels.append(Panel(figure, alt, each.title))
    return Section(
        "pit",
        "Where targets fall",
        "The predicted probability of a value below the target (PIT), from 0 to 1. If the "
        "distributions are right, all bars are as high as the dashed line. A valley means that "
        "they are too narrow, a hill that they are too wide, and a slope that they are shifted.",
        panels,
    )


def _risk_coverage(shown: Sequence[Shown]) -> Section:
    """Returns the section with the risk-coverage curves."""
    runs = list(having(shown, "risk_coverage"))
    curves = _in_one_figure(runs, "coverage")
    score = " or ".join(dict.fromkeys(str(of["score"]) for _, of in runs))
    return Section(
        "risk_coverage",
        "Risk against coverage",
        f"The {score} of the examples that are kept when the least certain ones are rejected. All "
        "examples are kept at the right, and only the most certain ones at the left. A low curve "
        "that rises steadily means that the uncertainty shows which predictions to trust.",
        _one_panel(
            curves,
            lambda: figures.lines(
                curves, x_label="share of examples kept", y_label=score, from_zero=True
            ),
            f"The {score} over the share of examples that are kept.",
        ),
        key=_BOTH_KEY,
    )


def _score_against_members(shown: Sequence[Shown]) -> Section:
    """Returns the section with the scores over the number of members."""
    runs = list(having(shown, "score_against_members"))
    names = dict.fromkeys(name for _, of in runs for name in of if name != "num_members")
    panels = []
    for name in names:
        curves = [
            Curve(
                of["num_members"],
                of[name]["mean"],
                each.colour or figures.COLOURS[0],
                band=(of[name]["low"], of[name]["high"]),
            )
            for each, of in runs
            if name in of
        ]
        figure = figures.lines(curves, x_label="members", y_label=label_of(name), x_is_count=True)
        panels.append(Panel(figure, f"{label_of(name)} over the number of members."))
    return Section(
        "score_against_members",
        "Score against number of members",
        "The score of ensembles of a number of the run's members, drawn at random, with its 95 % "
        "interval. Where the line is flat, further members add little.",
        panels,
        key="",
    )


def _training(shown: Sequence[Shown]) -> Section:
    """Returns the section with the training curves."""
    panels, most_members = [], 0
    for name in _TRAINING:
        is_test = name.startswith("test/")
        series = [(each, *_series(each.run.metrics, name)) for each in shown]
        series = [one for one in series if len(one[1]) > 1]  # A single point makes no curve.
        # Runs are drawn side by side on the same vertical axis.
        y_values = np.concatenate([[], *(v.ravel() for one in series for v in one[2:])])
        label = f"{name.partition('/')[0]} {label_of(name.partition('/')[2])}"
        for each, steps, whole, members in series:
            most_members = max(most_members, members.shape[1])
            colour = each.colour_of(MEAN_MEMBER)
            median = Curve(steps, _median(members), colour, "median member", dashed=True)
            curves = [median] if members.shape[1] else []
            if is_test or not curves:
                curves.append(Curve(steps, whole, each.colour_of(ENSEMBLE), _words(ENSEMBLE)))
            figure = figures.training(steps, members, curves, y_label=label, y_values=y_values)
            panels.append(Panel(figure, f"{label} of every member over the step.", each.title))
    caption = (
        "Each faint line is a member, and the dashed line is their median. A member far from the "
        "others is stuck or has diverged. A test score that becomes worse while the training loss "
        "still falls is a sign of overfitting."
    )
    if most_members > figures.MOST_MEMBER_LINES:
        caption += f" {figures.MOST_MEMBER_LINES} of {most_members:,} members are drawn."
    return Section("training", "Training", caption, panels, note=_undrawn_training(shown))


def _undrawn_training(shown: Sequence[Shown]) -> str:
    """Returns sentences about the runs that have too few records for a training curve."""
    notes = []
    for each in shown:
        steps = [line["step"] for line in each.run.metrics if _TRAINING[0] in line]
        if len(steps) < 2:
            records = f"one record (step {steps[0]:,})" if steps else "no record"
            run = each.title or "This run"
            notes.append(f"{run} has {records} in metrics.jsonl, and a curve needs two.")
    advice = "A smaller logging.every_steps, in Python log_every, writes more in the next run."
    return " ".join([*notes, advice]) if notes else ""


def _shift(shown: Sequence[Shown]) -> Section:
    """Returns the section with the scores over the strength of a shift."""
    runs = list(having(shown, "shift"))
    kinds = list(dict.fromkeys(kind for _, of in runs for kind in of))
    scores = dict.fromkeys(
        name for _, of in runs for kind in of.values() for name in kind if name != "strength"
    )
    panels = []
    # A single run has all kinds of shift in one figure. Several runs have one figure for each kind.
    for group in [[kind] for kind in kinds] if len(shown) > 1 else [kinds]:
        # The first two colours are those of the ensemble and of its mean member.
        kind_colours = figures.colours(len(_BOTH) + len(group))[len(_BOTH) :]
        for name in scores:
            curves = [
                Curve(
                    of[kind]["strength"],
                    of[kind][name],
                    each.colour or colour,
                    "" if each.colour else _words(kind),
                )
                for each, of in runs
                for kind, colour in zip(group, kind_colours, strict=True)
                if name in of.get(kind, {})
            ]
            if curves:
                figure = figures.lines(curves, x_label="strength of shift", y_label=label_of(name))
                title = _words(group[0]) if len(shown) > 1 else ""
                alt = f"{label_of(name)} over the strength of shift."
                panels.append(Panel(figure, alt, title))
    return Section(
        "shift",
        "Shifted inputs",
        "The ensemble's score on test inputs that are corrupted with increasing strength. A flat "
        "line means a robust ensemble. If the NLL grows much faster than the errors, the ensemble "
        f"becomes overconfident.{_older(shown, 'shift')}",
        panels,
        key="",
    )


def _ood(shown: Sequence[Shown]) -> Section:
    """Returns the section with the uncertainty in and out of distribution."""
    runs = list(having(shown, "ood"))
    names = " or ".join(dict.fromkeys(str(of["name"]) for _, of in runs))
    panels = [
        Panel(
            figures.histograms(
                [
                    Curve(density["edges"], density["in"], each.colour_of(ENSEMBLE), "test split"),
                    Curve(density["edges"], density["out"], figures.INK, of["name"], dashed=True),
                ],
                x_label=label_of(score),
            ),
            f"Density of {label_of(score)} on the test split and on {of['name']}.",
            each.title,
        )
        for each, of in runs
        for score, density in of.items()
        if score != "name"
    ]
    return Section(
        "ood",
        "In and out of distribution",
        f"The ensemble's uncertainty on the test split and on inputs of another kind, {names}. The "
        "less the two overlap, the better the uncertainty detects inputs of another kind."
        f"{_older(shown, 'ood')}",
        panels,
    )


def _older(shown: Sequence[Shown], question: str) -> str:
    """Returns what a caption says of answers that are older than the scores of their run."""
    notes = [
        f" {each.title + ': ' if each.title else ''}{note}"
        for each in shown
        for note in each.run.older(each.run.answers_to(question).values())
    ]
    return "".join(notes)


def _disagreement(shown: Sequence[Shown]) -> Section:
    """Returns the section with the disagreement of pairs of members."""
    return Section(
        "disagreement",
        "Disagreement of members",
        "The difference between the predictions of every two members. A stronger colour is a "
        "larger difference. The members of a pale pair are nearly copies of each other and add "
        "little to the ensemble. A strong row and column are a member that differs from all "
        "others. Of more than 100 members, 100 are compared.",
        [
            Panel(
                figures.heat_map(
                    of,
                    each.run.curves["member_id"],
                    label="disagreement",
                    colour=each.colour_of(ENSEMBLE),
                ),
                "Disagreement of every two members.",
                each.title,
            )
            for each, of in having(shown, "disagreement")
        ],
    )


# The sections are in the order of the page.
SECTIONS: tuple[Callable[[Sequence[Shown]], Section], ...] = (
    _reliability,
    _coverage_curve,
    _pit,
    _risk_coverage,
    _score_against_members,
    _training,
    _shift,
    _ood,
    _disagreement,
)


def _one_panel(curves: Sequence[Curve], draw: Callable[[], Figure], alt: str) -> list[Panel]:
    """Returns the panel of all curves, or an empty list if there is no curve."""
    return [Panel(draw(), alt)] if curves else []


def _series(
    metrics: Sequence[Mapping[str, Json]], name: str
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns the points of a training curve, at most `_MOST_POINTS` evenly spaced ones.

    Args:
        metrics: Records of `metrics.jsonl`.
        name: Name of the metric.

    Returns:
        The steps, the values over all members, float[points], and the value of each member,
        float[points, members]. The last point is included.
    """
    lines = [line for line in metrics if name in line]
    kept = np.linspace(0, len(lines) - 1, min(len(lines), _MOST_POINTS)).round().astype(int)
    lines = [lines[k] for k in kept]
    members = sorted({key for line in lines for key in line if key.startswith(f"{name}/member_")})
    values = [[line.get(key) for key in members] for line in lines]
    return (
        [line["step"] for line in lines],
        figures.finite([line[name] for line in lines]),
        figures.finite(values).reshape(len(lines), len(members)),
    )


def _median(members: np.ndarray) -> np.ndarray:
    """Returns the median over the members with finite values, float[points]; NaN without any."""
    some = np.isfinite(members).any(axis=1)
    median = np.full(len(members), np.nan)
    median[some] = np.nanmedian(members[some], axis=1)
    return median


def _words(name: str) -> str:
    """Returns a name with spaces in place of underscores."""
    return name.replace("_", " ")
