"""The report of one run, or of several runs side by side, as one self-contained HTML page.

The page needs no network and runs no script. It is made from the files of the runs, so nothing is
trained or evaluated again.
"""

from collections.abc import Mapping, Sequence

import jinja2
import numpy as np

from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.metrics.catalogue import COMPARED, described, in_table
from dist_ens.report.answers import answer_tables
from dist_ens.report.examples import example_lists, part_lists
from dist_ens.report.facts import MOST_MEMBERS, facts, interval, is_finite, number
from dist_ens.report.figures import MOST_MEMBER_LINES
from dist_ens.report.files import RunReport
from dist_ens.report.panels import (
    MEAN_MEMBER,
    SECTIONS,
    Shown,
    more_members,
    named,
    older,
    undrawn_training,
)
from dist_ens.report.style import colours, on_any_screen, svg


def page_of(runs: Sequence[RunReport]) -> str:
    """Returns the report of one run, or of several runs side by side, as HTML."""
    if not runs:
        raise UserError("There is no run to report. Give at least one workdir.")
    several = len(runs) > 1
    run_colours: Sequence[str | None] = colours(len(runs)) if several else [None]
    shown = [Shown(run, colour) for run, colour in zip(runs, run_colours, strict=True)]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dist_ens.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda panel, name: svg(panel.figure, panel.alt, name)
    environment.filters["on_any_screen"] = on_any_screen
    return environment.get_template("page.html.jinja").render(
        title=f"{len(runs)} runs side by side" if several else runs[0].name,
        shown=shown,
        result=_result,
        facts=facts,
        scores=_score_rows(runs),
        members=None if several else _member_rows(runs[0].summary),
        sections={name: list(make(shown)) for name, make in SECTIONS.items()},
        most_lines=MOST_MEMBER_LINES,
        named=named,
        older=older,
        more_members=more_members,
        undrawn_training=undrawn_training,
        answers=answer_tables(shown),
        classes=part_lists(shown, "class"),
        targets=part_lists(shown, "target"),
        has_classes=any("accuracy" in run.summary.get("test", {}) for run in runs),
        hardest=example_lists(shown, "hardest"),
        most_uncertain=example_lists(shown, "most_uncertain"),
    )


def _result(summary: Mapping[str, Json]) -> str:
    """Returns one sentence that compares the ensemble with its mean member."""
    test, mean = summary.get("test", {}), summary.get(MEAN_MEMBER, {})
    compared, signs = [], {}
    for metric in COMPARED:
        ours, theirs = test.get(metric.name), mean.get(metric.name)
        if is_finite(ours) and is_finite(theirs):
            compared.append(f"{metric.label} {number(ours, test)} against {number(theirs, test)}")
            gain = ours - theirs if metric.direction == "higher" else theirs - ours
            signs[metric.label] = int(np.sign(gain))
    if not compared:
        return "There is no finite score to compare the ensemble with its mean member."
    groups = summary.get("groups") or 1
    count = summary.get("num_members", 0) * (summary.get("heads") or 1)
    pooled = count - len(summary.get("left_out_members", ()))
    size = f" of {pooled // groups:,}" if pooled > 0 else ""
    over = f", averaged over {groups:,} groups" if groups > 1 else ""
    return f"The ensemble{size} is {_verdict(signs)}{over}: {', '.join(compared)}."


def _verdict(signs: Mapping[str, int]) -> str:
    """Returns the signs of the gain in each score in words, in one clause if all agree."""
    words = {1: "better than", 0: "as good as", -1: "worse than"}
    if len({*signs.values()}) == 1:
        return f"{words[next(iter(signs.values()))]} its mean member"
    return " but ".join(f"{words[sign]} its mean member in {name}" for name, sign in signs.items())


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
    scores = summary.get("test", {})
    values = {of: summary.get(of, {}).get(name) for of in ("test", MEAN_MEMBER)}
    better = None
    if direction and all(map(is_finite, values.values())) and len({*values.values()}) == 2:
        better = (max if direction == "higher" else min)(values.values())
    cells = []
    for of, value in values.items():
        deviation = summary.get(f"{of}_std", {}).get(name)
        cells.append(
            {
                "value": number(value, scores),
                "interval": interval(summary.get(f"{of}_interval"), name, scores),
                "deviation": f"± {number(deviation, scores)}" if is_finite(deviation) else "",
                "is_better": better is not None and value == better,
            }
        )
    return cells


def _member_rows(summary: Mapping[str, Json]) -> JsonDict | None:
    """Returns the scores of the first members as a table, or None if no member has scores."""
    members, test = summary.get("members", []), summary.get("test", {})
    scores = [name for name in test if any(name in m for m in members)]
    if not scores:
        return None
    names = in_table(scores)
    hyper = summary.get("hyper", {})
    rows = [
        (
            m["member_id"],
            [f"{values[k]:.3g}" for values in hyper.values()]
            + [number(m.get(name), test) for name in names],
        )
        for k, m in enumerate(members[:MOST_MEMBERS])
    ]
    labels = [described(name, summary.get("metrics", {}))[0] for name in names]
    return {
        "names": [*(name.replace("_", " ") for name in hyper), *labels],
        "rows": rows,
        "note": f"{len(rows)} of {counted(len(members), 'member')}. All their scores are in "
        "summary.json.",
    }
