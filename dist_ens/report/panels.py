"""The pictures of a report page, section by section: what they show, and what to read from it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dist_ens.layout import ENSEMBLE
from dist_ens.metrics.catalogue import COMPARED, label_of
from dist_ens.report import figures
from dist_ens.report.figures import Curve
from dist_ens.report.run_files import RunReport

MEAN_MEMBER = "mean_member"
_BOTH = (ENSEMBLE, MEAN_MEMBER)
_BOTH_KEY = "solid: the ensemble, dashed: its mean member"
# Points of a training curve: more are finer than the picture.
_MOST_POINTS = 300
# Metrics whose course over training is drawn.
_TRAINING = ("train/loss", *(f"test/{metric.name}" for metric in COMPARED))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run and its colour among several; None for a run alone."""

    run: RunReport
    colour: str | None

    @property
    def title(self) -> str:
        """Over a picture of this run only."""
        return self.run.name if self.colour else ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A picture, what it shows in words, and the title over it."""

    figure: Figure
    alt: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Pictures of one kind.

    Attributes:
        name: By which it is linked to.
        title: Over it.
        caption: How to read it, and what to conclude.
        panels: Its pictures.
        key: What a key of several runs' colours says of the lines; None where each run has
            pictures of its own.
    """

    name: str
    title: str
    caption: str
    panels: list[Panel]
    key: str | None = None


def having(shown: Sequence[Shown], name: str) -> Iterator[tuple[Shown, Any]]:
    """The runs whose curves have this section, and what they have."""
    return ((each, each.run.curves[name]) for each in shown if name in each.run.curves)


def _of_both(each: Shown, x: figures.Numbers, heights: Mapping[str, Any]) -> list[Curve]:
    """The ensemble's curve and its mean member's: in two colours, or in the run's, one dashed."""
    return [
        Curve(x, heights[who], each.colour, dashed=who == MEAN_MEMBER)
        if each.colour
        else Curve(x, heights[who], colour, _words(who))
        for who, colour in zip(_BOTH, figures.COLOURS, strict=False)
        if who in heights
    ]


def _reliability(shown: Sequence[Shown]) -> Section:
    return Section(
        "reliability",
        "Reliability",
        "Each point is a bin of test examples, the larger the more of them: on the diagonal, "
        "predictions made with a confidence of 80 % are right 80 % of the time, below it the model "
        "is overconfident and above it too cautious; the bars say which share of the examples a "
        "bin holds, and a point over a low bar says little.",
        [
            Panel(
                figures.reliability({_words(who): of[who] for who in _BOTH if who in of}),
                "Accuracy over confidence in bins, of the ensemble and of the mean member.",
                each.title,
            )
            for each, of in having(shown, "reliability")
        ],
    )


def _coverage_curve(shown: Sequence[Shown]) -> Section:
    curves = [
        curve
        for each, of in having(shown, "coverage_curve")
        for curve in _of_both(each, of["nominal"], of)
    ]
    return Section(
        "coverage_curve",
        "Coverage of intervals",
        "How often the target lies in the central interval that is predicted to hold it with a "
        "given probability: on the diagonal intervals are as wide as they ought to be, below it "
        "they are too narrow and the model overconfident, above it too wide.",
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
    panels = []
    for each, of in having(shown, "pit"):
        counts = {_words(who): figures.finite(of[who]) for who in _BOTH if who in of}
        densities = {
            who: len(count) * count / max(np.nansum(count), 1) for who, count in counts.items()
        }
        edges = np.linspace(0, 1, len(next(iter(densities.values()))) + 1)
        figure = figures.histograms(
            edges, densities, x_label="predicted probability of less than the target", level=1.0
        )
        alt = "Density of the targets' places in their predicted distributions."
        panels.append(Panel(figure, alt, each.title))
    return Section(
        "pit",
        "Where targets fall",
        "Where each target lies in its own predicted distribution, from 0 (below all of it) to 1 "
        "(above all of it): bars as high as the dashed line mean that the distributions are right, "
        "a valley that they are too narrow, a hill that they are too wide, a slope that they are "
        "shifted to one side.",
        panels,
    )


def _risk_coverage(shown: Sequence[Shown]) -> Section:
    runs = list(having(shown, "risk_coverage"))
    curves = [curve for each, of in runs for curve in _of_both(each, of["coverage"], of)]
    score = " or ".join(dict.fromkeys(str(of["score"]) for _, of in runs))
    return Section(
        "risk_coverage",
        "Risk against coverage",
        f"The {score} of the examples that are left when the least certain ones are handed to "
        "someone else, from all examples at the right to the most certain ones at the left: the "
        "lower the curve and the more steadily it rises, the better the uncertainty tells which "
        "predictions to trust.",
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
        "The score of ensembles of so many of the run's members, drawn at random, with its "
        "95 % interval: where the line has become flat, further members add little.",
        panels,
        key="",
    )


def _training(shown: Sequence[Shown]) -> Section:
    panels, most_members = [], 0
    for name in _TRAINING:
        is_test = name.startswith("test/")
        series = [(each, *_series(each.run.metrics, name)) for each in shown]
        series = [one for one in series if len(one[1]) > 1]  # a point is no curve
        # Runs are drawn side by side, and read against the same axis.
        y_values = np.concatenate([[], *(v.ravel() for one in series for v in one[2:])])
        label = f"{name.partition('/')[0]} {label_of(name.partition('/')[2])}"
        for each, steps, whole, members in series:
            most_members = max(most_members, members.shape[1])
            median = Curve(steps, _median(members), figures.COLOURS[is_test], "median member")
            curves = [median] if members.shape[1] else []
            if is_test or not curves:
                curves.append(Curve(steps, whole, figures.COLOURS[0], _words(ENSEMBLE)))
            figure = figures.training(steps, members, curves, y_label=label, y_values=y_values)
            panels.append(Panel(figure, f"{label} of every member over the step.", each.title))
    caption = (
        "Each faint line is a member, and the bold one their median: members that stay together "
        "train alike, one that leaves the others has got stuck or diverged, and a test score that "
        "becomes worse while the training loss still falls is a sign of overfitting."
    )
    if most_members > figures.MOST_MEMBER_LINES:
        caption += f" Of {most_members:,} members {figures.MOST_MEMBER_LINES} are drawn."
    return Section("training", "Training", caption, panels)


def _shift(shown: Sequence[Shown]) -> Section:
    runs = list(having(shown, "shift"))
    kinds = list(dict.fromkeys(kind for _, of in runs for kind in of))
    scores = dict.fromkeys(
        name for _, of in runs for kind in of.values() for name in kind if name != "strength"
    )
    panels = []
    # A run alone has all kinds of shift in one picture; several runs have one for each kind.
    for group in [[kind] for kind in kinds] if len(shown) > 1 else [kinds]:
        for name in scores:
            curves = [
                Curve(
                    of[kind]["strength"],
                    of[kind][name],
                    each.colour or colour,
                    "" if each.colour else _words(kind),
                )
                for each, of in runs
                for kind, colour in zip(group, figures.colours(len(group)), strict=True)
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
        "The ensemble's score on test inputs that are corrupted more and more: the flatter the "
        "line, the more robust the ensemble, and where the NLL grows much faster than errors do, "
        "it becomes overconfident.",
        panels,
        key="",
    )


def _ood(shown: Sequence[Shown]) -> Section:
    runs = list(having(shown, "ood"))
    names = " or ".join(dict.fromkeys(str(of["name"]) for _, of in runs))
    panels = [
        Panel(
            figures.histograms(
                density["edges"],
                {"test split": density["in"], str(of["name"]): density["out"]},
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
        f"How uncertain the ensemble is of the test split and of inputs of another kind, {names}: "
        "the less the two overlap, the better its uncertainty tells what it was not trained for.",
        panels,
    )


def _disagreement(shown: Sequence[Shown]) -> Section:
    return Section(
        "disagreement",
        "Disagreement of members",
        "How much the predictions of every two members differ, the darker the more: a pale pair "
        "are nearly copies of each other and add little to the ensemble, and a dark row and column "
        "are a member that stands apart from all others.",
        [
            Panel(
                figures.heat_map(of, each.run.curves["member_id"], label="disagreement"),
                "Disagreement of every two members.",
                each.title,
            )
            for each, of in having(shown, "disagreement")
        ],
    )


# In the order of the page.
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
    """The picture of all curves; none where there is no curve."""
    return [Panel(draw(), alt)] if curves else []


def _series(
    metrics: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Steps, the values over all members, and each member's, float[points, members].

    Of many points so many are taken, evenly, the last among them.
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
    """Of the members that have a number at each point; NaN where none has."""
    some = np.isfinite(members).any(axis=1)
    median = np.full(len(members), np.nan)
    median[some] = np.nanmedian(members[some], axis=1)
    return median


def _words(name: str) -> str:
    return name.replace("_", " ")
