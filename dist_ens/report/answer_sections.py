"""The sections of a report page about further questions to a run, such as its calibration."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dist_ens.json_text import Json
from dist_ens.metrics.catalogue import described, formatted, label_of
from dist_ens.report import figures
from dist_ens.report.panels import Shown

_DASH = "—"


@dataclasses.dataclass(frozen=True)
class AnswerTable:
    """A table of answers of one run.

    Attributes:
        title: Name of the run among several; empty for a single run.
        columns: Heading of each column.
        rows: Cells of each row, from the left. A cell is a text and the small text below it.
        notes: Sentences below the table.
        svg: Figure beside the table; empty without one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    notes: Sequence[str] = ()
    svg: str = ""


@dataclasses.dataclass(frozen=True)
class AnswerSection:
    """A section of the page: the answers of each run to one kind of question.

    Attributes:
        name: Name of the section in links.
        title: Heading of the section.
        caption: Explanation of the tables.
        tables: A table for each run that was asked.
    """

    name: str
    title: str
    caption: str
    tables: Sequence[AnswerTable]


def answer_sections(shown: Sequence[Shown]) -> list[AnswerSection]:
    """Returns the sections of the questions that at least one run was asked.

    Args:
        shown: Runs that are shown on the page.
    """
    sections = [
        AnswerSection(
            "calibration",
            "After calibration",
            "The scores of the ensemble before and after a map of its predictions that was fitted "
            "on the validation split. dist-ens predict --calibrated applies the map.",
            [_calibrations(each, of) for each, of in _asked(shown, "calibration")],
        ),
        AnswerSection(
            "conformal",
            "Conformal predictions",
            "Sets of classes or intervals that hold the right answer with the requested "
            "probability. The coverage is the share of the test split that they hold. dist-ens "
            "predict --conformal=0.9 writes them.",
            [_conformal(each, of) for each, of in _asked(shown, "conformal")],
        ),
        AnswerSection(
            "out_of_bag",
            "Out-of-bag predictions",
            "The scores of training examples, each predicted by the members that were not trained "
            "on it, beside the scores of the test split.",
            [_out_of_bag(each, of) for each, of in _asked(shown, "out_of_bag")],
        ),
        AnswerSection(
            "detection",
            "Detection of inputs of another kind",
            "How well each measure of uncertainty separates inputs of another kind from the test "
            "split. An AUROC of 1 is perfect, and 0.5 is chance.",
            [table for each, of in _asked(shown, "ood") for table in _detection(each, of)],
        ),
    ]
    return [section for section in sections if section.tables]


def _asked(shown: Sequence[Shown], question: str) -> list[tuple[Shown, dict[str, Json]]]:
    """Returns the runs that were asked a kind of question, each with its answers of one step.

    A run is returned once for each step that it has answers of, the newest first.
    """
    found = []
    for each in shown:
        answers = each.run.answers_to(question)
        for step in sorted({of["step"] for of in answers.values()}, reverse=True):
            found.append(
                (each, {option: of for option, of in answers.items() if of["step"] == step})
            )
    return found


def _calibrations(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the scores before and after each calibration of a run."""
    run, first = each.run, next(iter(answers.values()))["before"]
    before = first["test"]
    others = run.summary.get("metrics", {})
    after = {method: of["scores"] for method, of in answers.items()}
    names = [name for name in before if any(name in of["test"] for of in after.values())]
    rows = [
        [
            (described(name, others)[0], ""),
            (_number(before, name), _ends(first.get("test_interval"), before, name)),
            *(
                (_number(of["test"], name), _ends(of.get("test_interval"), of["test"], name))
                for of in after.values()
            ),
        ]
        for name in names
    ]
    warnings = [sentence for of in after.values() for sentence in of.get("warnings", [])]
    bins = {method: of["reliability"] for method, of in after.items() if "reliability" in of}
    svg = ""
    if bins:
        drawn = {**({"before": first["reliability"]} if "reliability" in first else {}), **bins}
        alt = "Accuracy over confidence in bins, before and after calibration."
        step = next(iter(answers.values()))["step"]
        curves = [
            (figures.Curve(of["confidence"], of["accuracy"], colour, name), of["count"])
            for (name, of), colour in zip(drawn.items(), figures.colours(len(drawn)), strict=True)
        ]
        svg = figures.svg(figures.reliability(curves), alt, f"calibration-{run.name}-{step}")
    columns = ["score", "before", *(f"after {method}" for method in after)]
    notes = [*_parameters(after), *warnings, *run.older(answers.values())]
    return AnswerTable(each.title, columns, rows, notes, svg)


def _parameters(after: Mapping[str, Json]) -> list[str]:
    """Returns sentences about the maps that have a single number."""
    return [
        f"{name.capitalize()} {value:.4g}: predictions were "
        f"{'over' if value > 1 else 'under'}confident."
        for of in after.values()
        for name, value in of.get("parameters", {}).items()
        if isinstance(value, float)
    ]


def _conformal(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the coverage and the size of the conformal predictions of a run."""
    scores = [of["scores"] for of in answers.values()]
    sizes = [name for name in ("mean_set_size", "mean_width") if any(name in s for s in scores)]
    rows = [
        [
            (of["method"], ""),
            (f"{of['level']:g}", ""),
            *(
                (_plain(of.get(name)), _ends(of.get("interval"), {}, name))
                for name in ("coverage", *sizes)
            ),
        ]
        for of in scores
    ]
    columns = ["method", "requested", "coverage", *map(label_of, sizes)]
    return AnswerTable(each.title, columns, rows, each.run.older(answers.values()))


def _out_of_bag(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the out-of-bag scores of a run beside those of the test split."""
    [of] = answers.values()
    scores, test = of["scores"], of["before"]["test"]
    rows = [
        [
            (described(name, each.run.summary.get("metrics", {}))[0], ""),
            (_number(scores, name), _ends(of.get("interval"), scores, name)),
            (_number(test, name), _ends(of["before"].get("test_interval"), test, name)),
        ]
        for name in scores
    ]
    note = f"No member left out {of['not_scored']:,} of the training examples."
    notes = [note, *each.run.older([of])]
    return AnswerTable(each.title, ["score", "out-of-bag", "test split"], rows, notes)


def _detection(each: Shown, answers: Mapping[str, Json]) -> list[AnswerTable]:
    """Returns the scores of the detection of each other kind of inputs."""
    tables = []
    for of in answers.values():
        rows = [
            [
                (label_of(measure), ""),
                *((_number(scores, name), "") for name in ("auroc", "aupr", "fpr95")),
            ]
            for measure, scores in of["scores"].items()
        ]
        name = of["curve"]["name"]
        title = f"{each.title}: {name}" if each.title else name
        notes = each.run.older([of])
        tables.append(AnswerTable(title, ["measure", "AUROC", "AUPR", "FPR95"], rows, notes))
    return tables


def _number(scores: Mapping[str, Json], name: str) -> str:
    """Returns a score as text, or a dash if it is missing or not finite."""
    value = scores.get(name)
    return _DASH if value is None or not math.isfinite(value) else formatted(scores, name)


def _plain(value: Json) -> str:
    """Returns a number as text with four significant digits, or a dash if it is missing."""
    return _DASH if value is None else f"{value:.4g}"


def _ends(intervals: Mapping[str, Json] | None, scores: Mapping[str, Json], name: str) -> str:
    """Returns the two ends of a score's 95 % interval, or an empty string without one."""
    ends = (intervals or {}).get(name)
    if not ends or None in ends:
        return ""
    return " to ".join(
        formatted({**scores, name: end}, name) if scores else _plain(end) for end in ends
    )
