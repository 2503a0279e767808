"""The figures of each section of a report page. Their captions are in `page.html.jinja`."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dist_ens.ground.json_text import Json
from dist_ens.layout import ENSEMBLE
from dist_ens.metrics.catalogue import COMPARED, HEADLINES, NLL, label_of
from dist_ens.report import figures
from dist_ens.report.facts import told_of_more
from dist_ens.report.figures import Curve
from dist_ens.report.files import RunReport
from dist_ens.report.style import COLOURS, INK, Numbers, colours, finite

MEAN_MEMBER = "mean_member"
_BOTH = (ENSEMBLE, MEAN_MEMBER)
# Largest number of points of a training curve. More would be finer than the figure.
_MOST_POINTS = 300
# Metrics whose course over training is drawn.
_HEADLINES = tuple(metric.name for metric in (NLL, *HEADLINES))  # The first is drawn.
_MOST_PAIRED = 3  # Largest number of settings of which each two are drawn.
_SCORED = ("valid/", "test/")
_TRAINING = ("train/loss", *(f"{part}{metric.name}" for part in _SCORED for metric in COMPARED))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run that is shown on the page, with its colour among several runs."""

    run: RunReport
    colour: str | None

    def colour_of(self, who: str) -> str:
        """Returns the colour of the ensemble or of its mean member, two for a single run only."""
        return self.colour or COLOURS[_BOTH.index(who)]

    @property
    def title(self) -> str:
        """Title of a figure that shows only this run."""
        return self.run.name if self.colour else ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A figure of a section, with its description for screen readers."""

    figure: Figure
    alt: str
    title: str = ""


def having(shown: Sequence[Shown], name: str) -> Iterator[tuple[Shown, Json]]:
    """Returns the runs whose curves have a section, each with the data of the section."""
    return (
        (each, data)
        for each in shown
        for key, data in each.run.curves.items()
        if key.partition("=")[0] == name  # Such as `ood=notmnist`, beside `ood=kmnist`.
    )


def _of_both(each: Shown, points: Mapping[str, tuple[Numbers, Numbers]]) -> list[Curve]:
    """Returns the curves of the ensemble and of its mean member, which is dashed."""
    return [
        Curve(*points[who], each.colour_of(who), _words(who), dashed=who == MEAN_MEMBER)
        for who in _BOTH
        if who in points
    ]


def _in_one_figure(shown: Sequence[Shown], section: str, x: str) -> list[Curve]:
    """Returns the curves of all runs; a legend tells several runs apart."""
    return [
        dataclasses.replace(curve, label="" if each.colour else curve.label)
        for each, of in having(shown, section)
        for curve in _of_both(each, {who: (of[x], of[who]) for who in _BOTH if who in of})
    ]


def _reliability(shown: Sequence[Shown]) -> Iterator[Panel]:
    for each, of in having(shown, "reliability"):
        points = {who: (bins["confidence"], bins["accuracy"]) for who, bins in of.items()}
        counts = (of[who]["count"] for who in _BOTH if who in of)
        figure = figures.reliability([*zip(_of_both(each, points), counts, strict=True)])
        alt = "Accuracy over confidence in bins, for the ensemble and for the mean member."
        yield Panel(figure, alt, each.title)


def _coverage_curve(shown: Sequence[Shown]) -> Iterator[Panel]:
    if curves := _in_one_figure(shown, "coverage_curve", "nominal"):
        figure = figures.against_diagonal(
            curves, x_label="predicted probability", y_label="share of targets inside"
        )
        yield Panel(
            figure,
            "Share of targets inside over the probability that the interval was predicted to have.",
        )


def _pit(shown: Sequence[Shown]) -> Iterator[Panel]:
    for each, of in having(shown, "pit"):
        densities = {}
        for who in _BOTH:
            if who in of:
                count = finite(of[who])
                edges = np.linspace(0, 1, len(count) + 1)
                densities[who] = (edges, len(count) * count / max(np.nansum(count), 1))
        figure = figures.histograms(
            _of_both(each, densities),
            x_label="predicted probability of less than the target",
            level=1.0,
        )
        alt = "Density of the predicted probability of less than the target."
        yield Panel(figure, alt, each.title)


def _risk_coverage(shown: Sequence[Shown]) -> Iterator[Panel]:
    if curves := _in_one_figure(shown, "risk_coverage", "coverage"):
        risk = named(shown, "risk_coverage", "score")
        figure = figures.lines(
            curves, x_label="share of examples kept", y_label=risk, from_zero=True
        )
        yield Panel(figure, f"The {risk} over the share of examples that are kept.")


def _score_against_members(shown: Sequence[Shown]) -> Iterator[Panel]:
    runs = list(having(shown, "score_against_members"))
    for name in dict.fromkeys(name for _, of in runs for name in of if name != "num_members"):
        curves = [
            Curve(
                of["num_members"],
                of[name]["mean"],
                each.colour or COLOURS[0],
                band=(of[name]["low"], of[name]["high"]),
            )
            for each, of in runs
            if name in of
        ]
        figure = figures.lines(curves, x_label="members", y_label=label_of(name), x_is_count=True)
        yield Panel(figure, f"{label_of(name)} over the number of members.")


def _hyper(shown: Sequence[Shown]) -> Iterator[Panel]:
    for each in shown:
        settings: Mapping[str, Numbers] = each.run.summary.get("hyper", {})
        members = each.run.summary.get("members", [])
        scores = [name for name in _HEADLINES if any(name in member for member in members)]
        if not settings or not scores:
            continue
        score, colour = scores[0], each.colour_of(MEAN_MEMBER)
        values = [member.get(score) for member in members]
        for name, x in settings.items():
            figure = figures.points(x, values, colour, labels=(_words(name), label_of(score)))
            yield Panel(
                figure, f"{label_of(score)} of each member over {_words(name)}.", each.title
            )
        if len(settings) > _MOST_PAIRED:
            continue
        for (name, x), (other, y) in itertools.combinations(settings.items(), 2):
            labels = _words(name), _words(other)
            figure = figures.points(x, y, colour, labels=labels, shade=values)
            alt = f"{label_of(score)} of each member by {labels[0]} and {labels[1]}."
            yield Panel(figure, alt, f"{each.title} {label_of(score)} by colour".strip())


def _training(shown: Sequence[Shown]) -> Iterator[Panel]:
    for name in _TRAINING:
        is_scored = name.startswith(_SCORED)
        series = [(each, *_series(each.run.metrics, name)) for each in shown]
        series = [one for one in series if len(one[1]) > 1]  # A single point makes no curve.
        # Runs are drawn side by side on the same vertical axis.
        y_values = np.concatenate([[], *(v.ravel() for one in series for v in one[2:])])
        label = f"{name.partition('/')[0]} {label_of(name.partition('/')[2])}"
        for each, steps, whole, members in series:
            colour = each.colour_of(MEAN_MEMBER)
            median = Curve(steps, _median(members), colour, "median member", dashed=True)
            curves = [median] if members.shape[1] else []
            if is_scored or not curves:
                curves.append(Curve(steps, whole, each.colour_of(ENSEMBLE), _words(ENSEMBLE)))
            figure = figures.training(steps, members, curves, y_label=label, y_values=y_values)
            yield Panel(figure, f"{label} of every member over the step.", each.title)


def undrawn_training(shown: Sequence[Shown]) -> str:
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


def _shift(shown: Sequence[Shown]) -> Iterator[Panel]:
    runs = list(having(shown, "shift"))
    kinds = list(dict.fromkeys(kind for _, of in runs for kind in of))
    # A single run has all kinds of shift in one figure. Several runs have one figure for each kind.
    for group in [[kind] for kind in kinds] if len(shown) > 1 else [kinds]:
        # The first two colours are those of the ensemble and of its mean member.
        kind_colours = colours(len(_BOTH) + len(group))[len(_BOTH) :]
        curves: dict[str, list[Curve]] = {}
        for each, of in runs:
            for kind, colour in zip(group, kind_colours, strict=True):
                style = (each.colour, "") if each.colour else (colour, _words(kind))
                scores = dict(of.get(kind, {}))
                strength = scores.pop("strength", [])
                for name, values in scores.items():
                    curves.setdefault(name, []).append(Curve(strength, values, *style))
        title = _words(group[0]) if len(shown) > 1 else ""
        for name, of_score in curves.items():
            figure = figures.lines(of_score, x_label="strength of shift", y_label=label_of(name))
            yield Panel(figure, f"{label_of(name)} over the strength of shift.", title)


def _ood(shown: Sequence[Shown]) -> Iterator[Panel]:
    for each, of in having(shown, "ood"):
        for score, density in of.items():
            if score == "name":
                continue
            curves = [
                Curve(density["edges"], density["in"], each.colour_of(ENSEMBLE), "test split"),
                Curve(density["edges"], density["out"], INK, of["name"], dashed=True),
            ]
            figure = figures.histograms(curves, x_label=label_of(score))
            alt = f"Density of {label_of(score)} on the test split and on {of['name']}."
            yield Panel(figure, alt, each.title)


def _disagreement(shown: Sequence[Shown]) -> Iterator[Panel]:
    for each, of in having(shown, "disagreement"):
        ids, colour = each.run.curves["member_id"], each.colour_of(ENSEMBLE)
        figure = figures.heat_map(of, ids, label="disagreement", colour=colour)
        yield Panel(figure, "Disagreement of every two members.", each.title)


def named(shown: Sequence[Shown], section: str, field: str) -> str:
    """Returns the values of a field in the data of a section, joined by "or"."""
    return " or ".join(dict.fromkeys(str(of[field]) for _, of in having(shown, section)))


def more_members(shown: Sequence[Shown]) -> str:
    """Returns sentences about the gain from more members of each run that estimated it."""
    return " ".join(
        f"{each.title}: {told}" if each.title else told
        for each in shown
        if each.run.summary.get("more_members") is not None
        for told in told_of_more(each.run.summary["more_members"])
    )


def older(shown: Sequence[Shown], question: str) -> str:
    """Returns sentences about answers that are older than the scores of their run."""
    return " ".join(
        f"{each.title}: {note}" if each.title else note
        for each in shown
        for note in each.run.older(each.run.answers_to(question).values())
    )


SECTIONS: Mapping[str, Callable[[Sequence[Shown]], Iterator[Panel]]] = {
    "reliability": _reliability,
    "coverage_curve": _coverage_curve,
    "pit": _pit,
    "risk_coverage": _risk_coverage,
    "score_against_members": _score_against_members,
    "hyper": _hyper,
    "training": _training,
    "shift": _shift,
    "ood": _ood,
    "disagreement": _disagreement,
}


def _series(
    metrics: Sequence[Mapping[str, Json]], name: str
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns steps, values over all members and of each member, of at most `_MOST_POINTS`."""
    lines = [line for line in metrics if name in line]
    kept = np.linspace(0, len(lines) - 1, min(len(lines), _MOST_POINTS)).round().astype(int)
    lines = [lines[k] for k in kept]
    members = sorted({key for line in lines for key in line if key.startswith(f"{name}/member_")})
    values = [[line.get(key) for key in members] for line in lines]
    return (
        [line["step"] for line in lines],
        finite([line[name] for line in lines]),
        finite(values).reshape(len(lines), len(members)),
    )


def _median(members: np.ndarray) -> np.ndarray:
    """Returns the median over the members with finite values, float[points]; NaN without any."""
    some = np.isfinite(members).any(axis=1)
    median = np.full(len(members), np.nan)
    median[some] = np.nanmedian(members[some], axis=1)
    return median


def _words(name: str) -> str:
    return name.replace("_", " ")
