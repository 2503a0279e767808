"""The report of one run, or of several runs side by side, as one self-contained HTML page.

The page needs no network and runs no script. It is made from the files of the runs, so nothing is
trained or evaluated again.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jinja2
import numpy as np

from dist_ens.errors import UserError, counted
from dist_ens.file_writing import replace_file
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import DATA, ENSEMBLE
from dist_ens.metrics.catalogue import COMPARED, described, has_unit, in_table, label_of
from dist_ens.report import figures
from dist_ens.report.answer_sections import answer_sections
from dist_ens.report.panels import (
    MEAN_MEMBER,
    SECTIONS,
    Section,
    Shown,
    having,
)
from dist_ens.report.pictures import picture_url
from dist_ens.report.run_files import RunReport

_TEMPLATE = "page.html.jinja"

_DASH = "—"
_MEMBERS_SHOWN = 20
# Lists of examples: name, title, captions for classes and for real targets, and what follows both.
_EXAMPLES = (
    (
        "hardest",
        "Hardest examples",
        "The wrongly predicted test examples with the highest NLL, the highest first.",
        "The test examples with the largest errors, the largest first.",
        "Look among them for wrong labels, and for kinds of inputs that the training data lacks.",
    ),
    (
        "most_uncertain",
        "Most uncertain examples",
        "The test examples that the ensemble is least certain of. High mutual information means "
        "that the members contradict each other, which more data can settle. High entropy with low "
        "mutual information means that the input itself is ambiguous.",
        "The test examples with the largest predicted variance, or the widest predicted interval.",
        "",
    ),
)


def write_page(
    path: pathlib.Path,
    runs: Sequence[RunReport],
    write: Callable[[pathlib.Path, str], None] = replace_file,
) -> None:
    """Writes the report of one run, or of several runs side by side.

    Args:
        path: Path of the HTML file, which is replaced atomically.
        runs: Runs to report, at least one.
        write: Function that writes the page.

    Raises:
        UserError: If there is no run.
    """
    if not runs:
        raise UserError("There is no run to report. Give at least one workdir.")
    several = len(runs) > 1
    run_colours: Sequence[str | None] = figures.colours(len(runs)) if several else [None]
    shown = [Shown(run, colour) for run, colour in zip(runs, run_colours, strict=True)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [section for make in SECTIONS if (section := make(shown)).panels or section.note]
    page = environment.get_template(_TEMPLATE).render(
        title=f"{len(runs)} runs side by side" if several else runs[0].name,
        runs=[
            {
                "name": each.run.name,
                "colour": each.colour and figures.on_any_screen(each.colour),
                "result": " ".join([*each.run.faults, _result(each.run.summary)]),
                "facts": _facts(each.run.summary),
            }
            for each in shown
        ],
        scores=_score_rows(runs),
        note=_note(runs),
        members=None if several else _member_rows(runs[0].summary),
        sections=[_rendered(section) for section in sections],
        answers=answer_sections(shown),
        example_sections=[
            section
            for section in (_classes(shown), *(_examples(shown, *texts) for texts in _EXAMPLES))
            if section["lists"]
        ],
    )
    write(path, page)


def _rendered(section: Section) -> JsonDict:
    """Returns a section for the template, with its figures as SVG."""
    return {
        "name": section.name,
        "title": section.title,
        "caption": section.caption,
        "key": section.key,
        "note": section.note,
        "panels": [
            {
                "title": panel.title,
                "svg": figures.svg(panel.figure, panel.alt, f"{section.name}-{k}"),
            }
            for k, panel in enumerate(section.panels)
        ],
    }


def _result(summary: Mapping[str, Json]) -> str:
    """Returns one sentence that compares the ensemble with its mean member."""
    test, mean = summary.get("test", {}), summary.get(MEAN_MEMBER, {})
    told, better = [], {}
    for metric in COMPARED:
        ours, theirs = test.get(metric.name), mean.get(metric.name)
        if not (_is_number(ours) and _is_number(theirs)):
            continue
        told.append(f"{metric.label} {_number(ours, test)} against {_number(theirs, test)}")
        gain = ours - theirs if metric.direction == "higher" else theirs - ours
        better[metric.label] = int(np.sign(gain))
    if not told:
        return "There is no finite score to compare the ensemble with its mean member."
    groups = summary.get("groups") or 1
    pooled = summary.get("num_members", 0) - len(summary.get("left_out_members", ()))
    size = f" of {pooled // groups:,}" if pooled > 0 else ""
    over = f", averaged over {groups:,} groups" if groups > 1 else ""
    return f"The ensemble{size} {_verdict(better)}{over}: {', '.join(told)}."


def _verdict(better: Mapping[str, int]) -> str:
    """Returns the comparison in words, in one clause if all scores agree.

    Args:
        better: Sign of the gain over the mean member by the label of the score: 1 is better.
    """
    words = {1: "better than", 0: "as good as", -1: "worse than"}
    if len(set(better.values())) == 1:
        return f"is {words[next(iter(better.values()))]} its mean member"
    parts = (f"{words[sign]} its mean member in {name}" for name, sign in better.items())
    return "is " + " but ".join(parts)


def _failed(member: Mapping[str, Json]) -> str:
    """Returns what happened to a member with failed updates, in words."""
    first, last = member["first_step"], member["last_step"]
    when = f"at step {first:,}" if first == last else f"from step {first:,} to {last:,}"
    count = counted(member["failed_updates"], "failed update")
    frozen = ", frozen" if member["is_frozen"] else ""
    return f"member {member['member_id']}: {count} {when} ({member['cause']}){frozen}"


def _facts(summary: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Returns the facts about a run, as pairs of a term and its value."""
    facts = []
    if "num_members" in summary:
        members, groups = summary["num_members"], summary.get("groups") or 1
        in_groups = f" in {groups:,} groups of {members // groups:,}" if groups > 1 else ""
        facts.append(("members", f"{members:,}{in_groups}"))
    if broken := summary.get("broken_members"):
        are_left_out = {*broken} <= {*summary.get("left_out_members", ())}
        left_out = ", left out of the ensemble" if are_left_out else ""
        listed = ", ".join(str(member_id) for member_id in broken)
        facts.append(("NaN predicted", f"by members {listed}{left_out}"))
    if failed := summary.get("failures", {}).get("members"):
        shown = "; ".join(_failed(member) for member in failed[:_MEMBERS_SHOWN])
        more = f"; {len(failed) - _MEMBERS_SHOWN:,} more" if len(failed) > _MEMBERS_SHOWN else ""
        facts.append((f"failed, policy {summary['failures']['policy']}", shown + more))
    facts += _trained_on(summary.get("experiment", {}), summary.get("network"))
    if "steps" in summary:
        facts.append(("steps", f"{summary['steps']:,}"))
    if "mesh" in summary:
        mesh = summary["mesh"]
        facts.append((f"mesh, {ENSEMBLE} x {DATA}", f"{mesh[ENSEMBLE]} x {mesh[DATA]}"))
    if "execution" in summary:
        facts.append(("execution", str(summary["execution"])))
    if _is_number(summary.get("seconds")):
        facts.append(("time", _duration(summary["seconds"])))
    if _is_number(summary.get("member_examples_per_second")):
        pace = summary["member_examples_per_second"]
        facts.append(("member-examples per second", f"{pace:,.0f}"))
    return facts


def _trained_on(experiment: Mapping[str, Json], network: str | None) -> list[tuple[str, str]]:
    """Returns the settings by which runs differ, as pairs of a term and its value."""
    if not experiment:
        return []
    data, loss, optimizer = (experiment[name] for name in ("data", "loss", "optimizer"))
    examples = "" if data["examples"] == "shared" else f", {data['examples']}"
    beside = "".join(
        f", {name.replace('_', ' ')} {value}" for name, value in loss["options"].items() if value
    )
    schedule = "" if optimizer["schedule"] == "constant" else f", {optimizer['schedule']}"
    return [
        ("network", network or _DASH),
        ("data", data["source"] + examples),
        ("loss", loss["name"] + beside),
        ("optimizer", f"{optimizer['name']}, {optimizer['learning_rate']:g}{schedule}"),
        ("batch", f"{data['global_batch_size']:,}"),
        ("seed", str(experiment["seed"])),
    ]


def _duration(seconds: float) -> str:
    """Returns a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _score_rows(runs: Sequence[RunReport]) -> list[JsonDict]:
    """Returns the scores of any run, each with a pair of cells for each run."""
    names = dict.fromkeys(name for run in runs for name in run.summary.get("test", {}))
    others = {name: own for run in runs for name, own in run.summary.get("metrics", {}).items()}
    rows = []
    for name in names:
        label, direction = described(name, others)
        cells = [_cells(run.summary, name, direction) for run in runs]
        arrow = {"higher": " ↑", "lower": " ↓"}.get(direction or "", "")
        rows.append({"name": label + arrow, "cells": cells})
    return rows


def _cells(summary: Mapping[str, Json], name: str, direction: str | None) -> list[JsonDict]:
    """Returns the cells of the ensemble and of its mean member, with the better score marked."""
    both = ("test", MEAN_MEMBER)
    values = [summary.get(of, {}).get(name) for of in both]
    better = None
    if all(map(_is_number, values)) and values[0] != values[1]:
        better = max(values) if direction == "higher" else better
        better = min(values) if direction == "lower" else better
    return [
        {**_cell(summary, of, name), "is_better": better is not None and value == better}
        for of, value in zip(both, values, strict=True)
    ]


def _cell(summary: Mapping[str, Json], of: str, name: str) -> dict[str, str]:
    """Returns a score, its interval and its standard deviation over groups, or empty strings."""
    scores = summary.get("test", {})
    deviation = summary.get(f"{of}_std", {}).get(name)
    return {
        "value": _number(summary.get(of, {}).get(name), scores),
        "interval": _interval(summary.get(f"{of}_interval"), name, scores),
        "deviation": f"± {_number(deviation, scores)}" if _is_number(deviation) else "",
    }


def _note(runs: Sequence[RunReport]) -> str:
    """Returns the explanation below the table of scores."""
    notes = "↑ higher is better, ↓ lower is better. Bold: the better of the two."
    if any("test_interval" in run.summary for run in runs):
        notes += " Small: the 95 % interval."
    if any("test_std" in run.summary for run in runs):
        notes += (
            " After ±: the standard deviation over groups. Each group has different examples. The "
            "figures show all groups together, without pairs of members and single examples."
        )
    return notes


def _interval(intervals: Mapping[str, Json] | None, name: str, scores: Mapping[str, Json]) -> str:
    """Returns the two ends of a score's interval, or an empty string without an interval."""
    ends = (intervals or {}).get(name)
    return " to ".join(_number(end, scores) for end in ends) if ends else ""


def _member_rows(summary: Mapping[str, Json]) -> JsonDict | None:
    """Returns the scores of the first members as a table, or None if no member has scores."""
    members = summary.get("members", [])
    scores = [name for name in summary.get("test", {}) if any(name in m for m in members)]
    if not scores:
        return None
    names = [name for name in in_table(scores) if name in scores]
    rows = [
        (m["member_id"], [_number(m.get(name), summary["test"]) for name in names])
        for m in members[:_MEMBERS_SHOWN]
    ]
    return {
        "names": [described(name, summary.get("metrics", {}))[0] for name in names],
        "rows": rows,
        "note": f"{len(rows)} of {counted(len(members), 'member')}. All their scores are in "
        "summary.json.",
    }


def _number(value: Json, scores: Mapping[str, Json]) -> str:
    """Returns a number as text, or a dash if it is not finite.

    The text has four decimals, or four significant digits if a score has the targets' unit.
    """
    if not _is_number(value):
        return _DASH
    if scores and not has_unit(scores) and abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:#.4g}".removesuffix(".")


def _is_number(value: Json) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _classes(shown: Sequence[Shown]) -> JsonDict:
    """Returns the scores of each class for the template, of runs whose classes have names."""
    lists = []
    for each in shown:
        rows, scores = each.run.summary.get("by_class", []), each.run.summary.get("test", {})
        names = [name for name in scores if any(name in row for row in rows)]
        told = [
            [row["class"], str(row["examples"]), *(_number(row.get(n), scores) for n in names)]
            for row in rows
        ]
        fields = ["class", "examples", *map(label_of, names)]
        if told:
            lists.append({"title": each.title, "fields": fields, "rows": told, "urls": []})
    caption = "Scores of the ensemble on the test examples of each class."
    return {"name": "classes", "title": "Classes", "caption": caption, "lists": lists}


def _examples(
    shown: Sequence[Shown], name: str, title: str, of_classes: str, of_targets: str, advice: str
) -> JsonDict:
    """Returns single examples for the template, with pictures if every example has one."""
    lists = []
    has_classes = any("accuracy" in each.run.summary.get("test", {}) for each in shown)
    caption = f"{of_classes if has_classes else of_targets} {advice}"
    for each, examples in having(shown, name):
        scores = each.run.summary.get("test", {})
        fields = list(dict.fromkeys(field for example in examples for field in example))
        first = 0 if name == "hardest" else len(each.run.curves.get("hardest", []))
        pictures = each.run.pictures[first : first + len(examples)]
        has_pictures = len(pictures) == len(examples)
        lists.append(
            {
                "title": each.title,
                "fields": [label_of(field) for field in fields],
                "rows": [
                    [_told(field, example.get(field), scores) for field in fields]
                    for example in examples
                ],
                "urls": [picture_url(values) for values in pictures if has_pictures],
            }
        )
    return {"name": name, "title": title, "caption": caption, "lists": lists}


def _told(field: str, value: Json, scores: Mapping[str, Json]) -> str:
    """Returns a field of an example as text: a name, a class, a target, or a score."""
    if isinstance(value, str):
        return value
    if _is_number(value) and float(value).is_integer():
        return f"{value:.0f}"
    rmse: Json = scores.get("rmse")
    if field in ("label", "prediction") and _is_number(value) and _is_number(rmse) and rmse > 0:
        # Enough digits show an error even if the target is far larger.
        return f"{value:.{max(2 - math.floor(math.log10(rmse)), 0)}f}"
    return _number(value, scores)
