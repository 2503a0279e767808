"""The tables of a report page about further questions to a run, such as its calibration."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from dist_ens.ground.json_text import Json
from dist_ens.metrics.catalogue import described, label_of
from dist_ens.report import figures
from dist_ens.report.facts import interval, number
from dist_ens.report.panels import Panel, Shown
from dist_ens.report.style import colours


@dataclasses.dataclass(frozen=True)
class AnswerTable:
    """A table of answers of one run, whose title is empty for a single run.

    A cell is a text and the small text below it. Notes are sentences below the table, and the
    panel stands beside it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    notes: Sequence[str] = ()
    panel: Panel | None = None


def answer_tables(shown: Sequence[Shown]) -> dict[str, list[AnswerTable]]:
    """Returns the tables of each section of the page: a table for each run that was asked."""
    return {
        "calibration": [_calibrations(*asked) for asked in _asked(shown, "calibration")],
        "conformal": [_conformal(*asked) for asked in _asked(shown, "conformal")],
        "out_of_bag": [_out_of_bag(*asked) for asked in _asked(shown, "out_of_bag")],
        "detection": [table for asked in _asked(shown, "ood") for table in _detection(*asked)],
    }


def _asked(shown: Sequence[Shown], question: str) -> Iterator[tuple[Shown, dict[str, Json]]]:
    """Yields runs with their answers to a kind of question, for each step, the newest first."""
    for each in shown:
        answers = each.run.answers_to(question)
        for step in sorted({of["step"] for of in answers.values()}, reverse=True):
            yield each, {option: of for option, of in answers.items() if of["step"] == step}


def _score_rows(
    each: Shown,
    names: Sequence[str],
    *columns: tuple[Mapping[str, Json], Mapping[str, Json] | None],
) -> list[list[tuple[str, str]]]:
    """Returns a row for each score: its label, and its value and interval in each column."""
    others = each.run.summary.get("metrics", {})
    return [
        [
            (described(name, others)[0], ""),
            *(
                (number(scores.get(name), scores), interval(intervals, name, scores))
                for scores, intervals in columns
            ),
        ]
        for name in names
    ]


def _calibrations(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the scores before and after each calibration of a run."""
    before = next(iter(answers.values()))["before"]
    after = {method: of["scores"] for method, of in answers.items()}
    names = [name for name in before["test"] if any(name in of["test"] for of in after.values())]
    both = [(of["test"], of.get("test_interval")) for of in (before, *after.values())]
    notes = [
        f"{name.capitalize()} {value:.4g}: predictions were "
        f"{'over' if value > 1 else 'under'}confident."
        for of in after.values()
        for name, value in of.get("parameters", {}).items()
        if isinstance(value, float)
    ]
    notes += [sentence for of in after.values() for sentence in of.get("warnings", [])]
    return AnswerTable(
        each.title,
        ["score", "before", *(f"after {method}" for method in after)],
        _score_rows(each, names, *both),
        [*notes, *each.run.older(answers.values())],
        _reliability({"before": before, **after}),
    )


def _reliability(calibrations: Mapping[str, Json]) -> Panel | None:
    """Returns the reliability diagrams before and after calibration; None for real targets."""
    bins = {
        of: scores["reliability"] for of, scores in calibrations.items() if "reliability" in scores
    }
    if not bins.keys() - {"before"}:
        return None
    curves = [
        (figures.Curve(of["confidence"], of["accuracy"], colour, label), of["count"])
        for (label, of), colour in zip(bins.items(), colours(len(bins)), strict=True)
    ]
    alt = "Accuracy over confidence in bins, before and after calibration."
    return Panel(figures.reliability(curves), alt)


def _conformal(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the coverage and the size of the conformal predictions of a run."""
    scores = [of["scores"] for of in answers.values()]
    sizes = [name for name in ("mean_set_size", "mean_width") if any(name in s for s in scores)]
    rows = [
        [
            (f"target {part['target']}" if "target" in part else of["method"], ""),
            (f"{of['level']:g}", ""),
            *(
                (number(part.get(name), {}), interval(part.get("interval"), name, {}))
                for name in ("coverage", *sizes)
            ),
        ]
        for of in scores
        for part in (of, *of.get("by_target", ()))
    ]
    columns = ["method", "requested", "coverage", *map(label_of, sizes)]
    return AnswerTable(each.title, columns, rows, each.run.older(answers.values()))


def _out_of_bag(each: Shown, answers: Mapping[str, Json]) -> AnswerTable:
    """Returns the out-of-bag scores of a run beside those of the test split."""
    [of] = answers.values()
    scores, before = of["scores"], of["before"]
    both = (scores, of.get("interval")), (before["test"], before.get("test_interval"))
    note = f"No member left out {of['not_scored']:,} of the training examples."
    return AnswerTable(
        each.title,
        ["score", "out-of-bag", "test split"],
        _score_rows(each, [*scores], *both),
        [note, *each.run.older([of])],
    )


def _detection(each: Shown, answers: Mapping[str, Json]) -> Iterator[AnswerTable]:
    """Yields the scores of the detection of each other kind of inputs."""
    for of in answers.values():
        rows = [
            [
                (label_of(measure), ""),
                *((number(scores.get(name), scores), "") for name in ("auroc", "aupr", "fpr95")),
            ]
            for measure, scores in of["scores"].items()
        ]
        name = of["curve"]["name"]
        title = f"{each.title}: {name}" if each.title else name
        notes = each.run.older([of])
        yield AnswerTable(title, ["measure", "AUROC", "AUPR", "FPR95"], rows, notes)
