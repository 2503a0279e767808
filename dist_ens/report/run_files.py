"""What a run leaves for its report, written and read back."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from dist_ens.array_files import read_npy
from dist_ens.commands import command_line, quoted
from dist_ens.errors import UserError
from dist_ens.json_text import from_json
from dist_ens.paths import given_path
from dist_ens.report.files import CURVES, PAGE, PICTURES, SUMMARY, to_json, write_atomically
from dist_ens.report.forms import require_curves, require_summary
from dist_ens.report.metrics_file import METRICS, read_metrics


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
    evaluate = command_line("dist-ens", "evaluate", workdir=workdir)
    curves = _read(workdir / CURVES, partial(_object, require=require_curves), evaluate)
    if curves is None:
        raise UserError(
            f"There is no {CURVES} in {quoted(workdir)}, from which a report is made. Train there, "
            f"or type {evaluate} first."
        )
    train = "dist-ens train with the flags of the run"
    return RunReport(
        name=workdir.resolve().name,
        summary=_read(workdir / SUMMARY, partial(_object, require=require_summary), train) or {},
        metrics=_read(workdir / METRICS, lambda _: read_metrics(workdir), train) or [],
        curves=curves,
        pictures=_read_pictures(workdir / PICTURES, evaluate),
    )


def _object(file: BinaryIO, require: Callable[[Any], None]) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ValueError: If there is none, or it has not the form that is required.
    """
    value = from_json(file.read())
    require(value)
    return value


def _read_pictures(path: pathlib.Path, writer: str) -> list[np.ndarray]:
    """Returns the pictures of a file that a command writes; none if there is no file."""
    if not path.exists():
        return []
    try:
        pictures = read_npy(path, PICTURES)
    except UserError as error:
        raise UserError(f"{error} Or remove the file; {writer} writes it again.") from error
    of_pictures = pictures.ndim in (3, 4) and pictures.size and pictures.dtype.kind in "uif"
    if pictures.shape[:1] != (0,) and not of_pictures:
        raise UserError(
            f"{quoted(path)} holds {pictures.dtype}{list(pictures.shape)}, not pictures [examples, "
            f"height, width] or [examples, height, width, channels]. Remove it; {writer} writes it "
            "again."
        )
    return [*pictures]


def _read(path: pathlib.Path, parse: Callable[[BinaryIO], Any], writer: str) -> Any:
    """What a file holds that a command writes; None if it is not there."""
    try:
        with path.open("rb") as file:
            return parse(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{quoted(path)} cannot be read for the report: {str(error).rstrip('.')}. Remove it; "
            f"{writer} writes it anew."
        ) from error
