"""What a run leaves for its report, written and read back."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dist_ens.errors import UserError
from dist_ens.report.files import CURVES, PAGE, PICTURES, SUMMARY, to_json, write_atomically
from dist_ens.report.training import METRICS


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What a page tells of a run. A number that is missing or not finite is shown as a dash.

    Attributes:
        name: The run's.
        summary: What `summary.json` holds.
        metrics: The lines of `metrics.jsonl`.
        curves: By the name of a section what it draws; what is absent is left out of the page.
        pictures: Inputs of the examples in `curves["hardest"]`, then of those in
            `curves["most_uncertain"]`, uint8 or float [h, w] or [h, w, c]. A list of which not all
            have one is a table.
    """

    name: str
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    curves: Mapping[str, Any]
    pictures: Sequence[np.ndarray]


def write_report(
    workdir: pathlib.Path,
    scores: Mapping[str, Any],
    curves: Mapping[str, Any],
    pictures: Sequence[np.ndarray],
) -> None:
    """Writes what the report draws, and the report.

    Args:
        workdir: Of the run.
        scores: What the summary has of the test split, or would have if the run were finished.
        curves: See `RunReport`.
        pictures: Likewise.
    """
    from dist_ens.report.page import write_page  # a second to import, at a run's end

    write_atomically(workdir / CURVES, to_json(curves) + "\n")
    unfinished = workdir / f"{PICTURES}.unfinished"
    with unfinished.open("wb") as file:
        np.save(file, np.array(pictures))
    unfinished.replace(workdir / PICTURES)
    run = read_run(workdir)
    run = dataclasses.replace(run, summary={**run.summary, **scores})
    write_page(workdir / PAGE, [run])


def read_run(workdir: pathlib.Path) -> RunReport:
    """What a run has left for its report.

    Args:
        workdir: Of the run.

    Raises:
        UserError: If there is no such folder, or nothing of a run in it that can be read.
    """
    try:
        curves = json.loads((workdir / CURVES).read_text(encoding="utf-8"))
        summary = workdir / SUMMARY
        metrics = workdir / METRICS
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return RunReport(
            name=workdir.resolve().name,
            summary=json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {},
            metrics=[json.loads(line) for line in lines],
            curves=curves,
            pictures=list(np.load(workdir / PICTURES, allow_pickle=False)),
        )
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"A report is made of what train or evaluate left in a workdir. Received: {workdir}: "
            f"{error}. Train there, or type dist-ens evaluate --workdir={workdir} first."
        ) from error
