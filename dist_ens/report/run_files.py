"""What a run leaves for its report, written and read back."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from dist_ens.errors import UserError
from dist_ens.paths import given_path
from dist_ens.report.files import CURVES, PAGE, PICTURES, SUMMARY, to_json, write_atomically
from dist_ens.report.training import read_metrics


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
    workdir = given_path(workdir, "workdir")
    evaluate = f"dist-ens evaluate --workdir={workdir}"
    curves = _read(workdir / CURVES, json.load, evaluate)
    if curves is None:
        raise UserError(
            "A report is made of what train or evaluate left in a workdir. Received: "
            f"{workdir}, which has no {CURVES}. Train there, or type {evaluate} first."
        )
    return RunReport(
        name=workdir.resolve().name,
        summary=_read(workdir / SUMMARY, json.load, "dist-ens train, as before,") or {},
        metrics=read_metrics(workdir),
        curves=curves,
        pictures=_read(workdir / PICTURES, lambda file: [*np.load(file)], evaluate) or [],
    )


def _read(path: pathlib.Path, parse: Callable[[BinaryIO], Any], writer: str) -> Any:
    """What a file holds that a command writes; None if it is not there."""
    try:
        with path.open("rb") as file:
            return parse(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"A report is made of files that can be read. Received: {path}: {error}. Remove it; "
            f"{writer} writes it anew."
        ) from error
