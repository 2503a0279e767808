"""The files of a run from which its report is made. They are replaced atomically."""

import dataclasses
import hashlib
import io
import json
import logging
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dist_ens.checkpoint.run_digests import fault_of, write_run_file
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import replace_file
from dist_ens.ground.json_text import Json, JsonDict, from_json, is_number, is_whole
from dist_ens.ground.paths import given_path

METRICS = "metrics.jsonl"  # A record of metrics on each line.
SUMMARY = "summary.json"
CURVES = "curves.json"
PICTURES = "pictures.npy"
ANSWERS = "answers.json"
PAGE = "report.html"
REPORT_FILES = (SUMMARY, CURVES, PICTURES, ANSWERS, PAGE)
SCORES = "scores"  # The answer that holds the scores of the test split.


def to_json(value: Json, *, indent: int | None = None) -> str:
    """Returns a value as JSON, where numbers that are not finite become null."""

    def finite(value: Json) -> Json:
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, indent=indent)


def write_summary(workdir: pathlib.Path, summary: Mapping[str, Json]) -> None:
    """Writes `summary.json` atomically."""
    write_run_file(workdir / SUMMARY, to_json(summary, indent=2) + "\n")


def pace_before(workdir: pathlib.Path, step: int) -> dict[str, float]:
    """Returns the pace in the summary that was written at a step; empty without one."""
    try:
        before = from_json(bytes_in(workdir / SUMMARY))
    except (OSError, ValueError):
        return {}
    names = ("seconds", "member_examples_per_second")
    is_of_step = isinstance(before, dict) and before.get("steps") == step
    return {name: before[name] for name in names if name in before} if is_of_step else {}


def write_scores(path: pathlib.Path, scores: Mapping[str, Json]) -> None:
    """Writes scores as JSON atomically."""
    replace_file(path, to_json(scores, indent=2) + "\n")


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
        answers: Newest answer to each further question, such as `shift`, with its `step`.
        step: Step of the scores. None if it is not known.
    """

    name: str
    summary: Mapping[str, Json]
    metrics: Sequence[Mapping[str, Json]]
    curves: Mapping[str, Json]
    pictures: Sequence[np.ndarray]
    faults: Sequence[str] = ()
    answers: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    step: int | None = None

    def answers_to(self, question: str) -> dict[str, Json]:
        """Returns the answers to a kind of question, such as `calibration`, by their options."""
        parts = ((*name.partition("="), answer) for name, answer in self.answers.items())
        return {option: answer for kind, _, option, answer in parts if kind == question}

    def older(self, answers: Iterable[Mapping[str, Json]]) -> list[str]:
        """Returns a sentence if answers are of another step than the scores, and else nothing."""
        older = sorted({of["step"] for of in answers if self.step is not None} - {self.step})
        if not older:
            return []
        steps = " and ".join(f"{step:,}" for step in older)
        return [f"Older: of step {steps}, and the scores above are of step {self.step:,}."]


def write_report(
    workdir: pathlib.Path,
    scores: Mapping[str, Json],
    curves: Mapping[str, Json],
    pictures: Sequence[np.ndarray],
) -> None:
    """Writes the data of the report, and the page with these scores in place of the summary's."""
    write_run_file(workdir / CURVES, to_json(curves) + "\n")
    file = io.BytesIO()
    np.save(file, np.array(pictures))
    write_run_file(workdir / PICTURES, file.getvalue())
    redraw(workdir, scores)


def redraw(workdir: pathlib.Path, scores: Mapping[str, Json] | None = None) -> None:
    """Writes the page again from the files of a run, with other scores if they are given."""
    from dist_ens.report.page import write_page  # This import takes a second.

    run = read_run(workdir)
    run = dataclasses.replace(run, summary={**run.summary, **(scores or {})})
    write_page(workdir / PAGE, [run], write_run_file)


def read_run(workdir: pathlib.Path) -> RunReport:
    """Reads the content of a run's report from its folder, which must have `curves.json`."""
    workdir = given_path(workdir, "workdir")
    try:
        curves = _read_json(workdir / CURVES)
        summary = _read_json(workdir / SUMMARY) or {}
        metrics = read_metrics(workdir)
        pictures = workdir / PICTURES
        shown = [*np.load(pictures, allow_pickle=False)] if pictures.exists() else []
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"The files of {quoted(workdir)} cannot be read for the report: {first_line(error)} "
            f"Remove the file, and type {_evaluate(workdir)} to write it again."
        ) from error
    if curves is None:
        raise UserError(
            f"There is no {CURVES} in {quoted(workdir)}, from which a report is made. Train there, "
            f"or type {_evaluate(workdir)} first."
        )
    clauses = [fault_of(workdir / name) for name in (SUMMARY, ANSWERS, METRICS, CURVES, PICTURES)]
    faults = [
        f"Of {quoted(workdir)} {clause}, so what is shown of it may be wrong."
        for clause in clauses
        if clause is not None
    ]
    for fault in faults:
        logging.warning(fault)
    answers = newest_answers(read_answers(workdir))
    scores = answers.pop(SCORES, None)
    if scores is not None and scores["step"] >= summary.get("steps", 0):
        summary = {**summary, **scores, "steps": scores["step"]}
    return RunReport(
        name=workdir.resolve().name,
        summary=summary,
        metrics=metrics,
        curves=curves | {name: of["curve"] for name, of in answers.items() if "curve" in of},
        pictures=shown,
        faults=faults,
        answers=answers,
        step=summary.get("steps"),
    )


def keep_answers(
    workdir: pathlib.Path,
    step: int,
    state: str | None,
    answers: Mapping[str, Json],
    *,
    is_newest: bool,
) -> None:
    """Adds answers to those of a run. An answer to the same question at the same step is replaced.

    `state` is the digest of the members at this step. If the step is the newest of the run, answers
    of later steps belong to a run that was in the folder before, and are removed.
    """
    kept = read_answers(workdir)
    if is_newest:
        kept = {key: entry for key, entry in kept.items() if int(key) <= step}
    before = kept.get(str(step), {})
    same = before["answers"] if before and before["state"] == state else {}
    # The last answer to a kind of question is the one by which a run predicts.
    others = {question: answer for question, answer in same.items() if question not in answers}
    kept[str(step)] = {"state": state, "answers": {**others, **answers}}
    steps = to_json(kept)
    write_run_file(workdir / ANSWERS, f'{{"sha256": "{_sha256(steps)}", "steps": {steps}}}\n')


def read_answers(workdir: pathlib.Path) -> JsonDict:
    """Returns the `steps` of `answers.json`; empty if there is no file.

    A step has `state`, a digest of the members, and `answers`, a dict from a question, such as
    `conformal=aps level=0.9`. A changed number would calibrate predictions, so the file has a hash.
    """
    try:
        kept = _read_json(workdir / ANSWERS)
        if kept is None:
            return {}
        if kept["sha256"] != _sha256(to_json(kept["steps"])):
            raise ValueError("its content does not match its hash")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{quoted(workdir / ANSWERS)} cannot be read for the report: {first_line(error)} "
            f"Remove it, and type {_evaluate(workdir)} to write it again."
        ) from error
    return kept["steps"]


def newest_answers(kept: Mapping[str, Json]) -> JsonDict:
    """Returns the newest answer to each question, with its `step`.

    >>> kept = {"9": {"state": None, "answers": {"shift": {}}}}
    >>> newest_answers(kept | {"8": {"state": None, "answers": {"shift": {}, "ood=a": {}}}})
    {'ood=a': {'step': 8}, 'shift': {'step': 9}}
    """
    found: JsonDict = {}
    for step in sorted(map(int, kept)):
        for question, answer in kept[str(step)]["answers"].items():
            found.pop(question, None)
            found[question] = {**answer, "step": step}
    return found


def _read_json(path: pathlib.Path) -> JsonDict | None:
    """Returns the JSON object in a file, or None if there is no file."""
    try:
        value = from_json(bytes_in(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _evaluate(workdir: pathlib.Path) -> str:
    return command_line("dist-ens", "evaluate", workdir=workdir)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_metrics(workdir: pathlib.Path) -> list[JsonDict]:
    """Returns the records of a run's metrics, each with its `step`; empty if there is no file."""
    return [record for _, record in records_in(workdir / METRICS)]


def records_in(path: pathlib.Path) -> list[tuple[bytes, JsonDict]]:
    """Returns the whole lines of a file that are records, each with its record."""
    try:
        *lines, _ = bytes_in(path).split(b"\n")
    except FileNotFoundError:
        return []
    read = [(line + b"\n", _record(line)) for line in lines]
    records = [(line, record) for line, record in read if record is not None]
    if dropped := len(read) - len(records):
        logging.warning(
            "%d of %d lines in %s are not records of metrics and are left out.",
            dropped,
            len(read),
            quoted(path),
        )
    return records


def _record(line: bytes) -> JsonDict | None:
    """Returns the record of a line, numbers by name with a `step`; None if it is no record."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and is_whole(record.get("step"))
    return record if is_record and all(map(is_number, record.values())) else None
