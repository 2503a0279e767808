"""The files of a run from which its report is made."""

import dataclasses
import io
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from dist_ens.array_files import read_npy
from dist_ens.commands import command_line, quoted
from dist_ens.errors import UserError
from dist_ens.file_reading import opened_to_read
from dist_ens.json_text import Json, JsonDict, from_json
from dist_ens.paths import given_path
from dist_ens.report.files import CURVES, PAGE, PICTURES, SUMMARY, to_json
from dist_ens.report.forms import require_curves, require_summary
from dist_ens.report.metrics_file import METRICS, read_metrics
from dist_ens.run_digests import fault_of, write_run_file


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The content of a run's report. A number that is missing or not finite is shown as a dash.

    Attributes:
        name: Name of the run.
        summary: Content of `summary.json`.
        metrics: Records of `metrics.jsonl`.
        curves: Data of each section of the page, by name. Absent sections are left out.
        pictures: Inputs of the examples in `curves["hardest"]`, followed by those in
            `curves["most_uncertain"]`; uint8 or float, [h, w] or [h, w, c]. A list of examples is
            shown as a table if pictures are missing.
        faults: Sentences on files that differ from what the run wrote. Default: none.
    """

    name: str
    summary: Mapping[str, Json]
    metrics: Sequence[Mapping[str, Json]]
    curves: Mapping[str, Json]
    pictures: Sequence[np.ndarray]
    faults: Sequence[str] = ()


def write_report(
    workdir: pathlib.Path,
    scores: Mapping[str, Json],
    curves: Mapping[str, Json],
    pictures: Sequence[np.ndarray],
) -> None:
    """Writes the data of the report, and the page.

    Args:
        workdir: Folder of the run.
        scores: Scores on the test split, with the keys of the summary. They replace those of
            `summary.json`.
        curves: Data of the sections; see `RunReport`.
        pictures: Inputs of the examples; see `RunReport`.
    """
    from dist_ens.report.page import write_page  # This import takes a second.

    write_run_file(workdir / CURVES, to_json(curves) + "\n")
    file = io.BytesIO()
    np.save(file, np.array(pictures))
    write_run_file(workdir / PICTURES, file.getvalue())
    run = read_run(workdir)
    run = dataclasses.replace(run, summary={**run.summary, **scores})
    write_page(workdir / PAGE, [run], write_run_file)


def read_run(workdir: pathlib.Path) -> RunReport:
    """Reads the content of a run's report.

    Args:
        workdir: Folder of the run.

    Raises:
        UserError: If there is no such folder, it has no `curves.json`, or a file is damaged.
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
    clauses = [fault_of(workdir / name) for name in (SUMMARY, METRICS, CURVES, PICTURES)]
    faults = [
        f"Of {quoted(workdir)} {clause}, so what is shown of it may be wrong."
        for clause in clauses
        if clause is not None
    ]
    for fault in faults:
        logging.warning(fault)
    return RunReport(
        name=workdir.resolve().name,
        summary=_read(workdir / SUMMARY, partial(_object, require=require_summary), train) or {},
        metrics=_read(workdir / METRICS, lambda _: read_metrics(workdir), train) or [],
        curves=curves,
        pictures=_read_pictures(workdir / PICTURES, evaluate),
        faults=faults,
    )


def _object(file: BinaryIO, require: Callable[[Json], None]) -> JsonDict:
    """Returns the JSON object in a file.

    Args:
        file: File, open for reading.
        require: Function that raises a `ValueError` if the object has another form.

    Raises:
        ValueError: If the file holds no JSON, or the object has another form.
    """
    value = from_json(file.read())
    require(value)
    return value


def _read_pictures(path: pathlib.Path, writer: str) -> list[np.ndarray]:
    """Returns the pictures in a file, or none if there is no file.

    Args:
        path: Path of the file.
        writer: Command that writes the file, for error messages.

    Raises:
        UserError: If the file cannot be read, or holds something else.
    """
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
    """Returns the content of a file, or None if there is no file.

    Args:
        path: Path of the file.
        parse: Function that returns the content of the open file.
        writer: Command that writes the file, for error messages.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        with opened_to_read(path) as file:
            return parse(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, EOFError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(
            f"{quoted(path)} cannot be read for the report: {why}. Remove it; "
            f"{writer} writes it again."
        ) from error
