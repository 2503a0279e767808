"""The files of a run from which its report is made. They are replaced atomically."""

import dataclasses
import hashlib
import io
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dist_ens.checkpoint.run_digests import fault_of, write_run_file
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.json_text import Json, JsonDict, from_json, is_number, is_whole
from dist_ens.storage import ABSENT, Folder, Place, not_readable, place_of

METRICS = "metrics.jsonl"  # A record of metrics on each line.
PARTS = ".parts"  # End of the name of the folder of a log's newest lines.
SUMMARY = "summary.json"
CURVES = "curves.json"
PICTURES = "pictures.npy"
ANSWERS = "answers.json"
PAGE = "report.html"
REPORT_FILES = (SUMMARY, CURVES, PICTURES, ANSWERS, PAGE)
SCORES = "scores"  # The answer that holds the scores of the test split.
_OF_SOME_SCORES = ("member_weights", "more_members")  # Keys that other scores may not have.
CHOICE = "choice"  # The answer that holds the members with which the run predicts.


def to_json(value: Json, *, indent: int | None = None) -> str:
    """Returns a value as JSON, where numbers that are not finite become null."""

    def finite(value: Json) -> Json:
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, indent=indent)


def write_summary(workdir: Place, summary: Mapping[str, Json]) -> None:
    """Writes `summary.json` atomically."""
    write_run_file(workdir, SUMMARY, to_json(summary, indent=2) + "\n")


def pace_before(workdir: Place, step: int) -> dict[str, float]:
    """Returns the pace in the summary that was written at a step; empty without one."""
    try:
        before = from_json(workdir.read(SUMMARY))
    except (OSError, ValueError):
        return {}
    names = ("seconds", "member_examples_per_second")
    is_of_step = isinstance(before, dict) and before.get("steps") == step
    return {name: before[name] for name in names if name in before} if is_of_step else {}


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
    workdir: Place,
    scores: Mapping[str, Json],
    curves: Mapping[str, Json],
    pictures: Sequence[np.ndarray],
) -> None:
    """Writes the data of the report, and the page with these scores in place of the summary's."""
    write_run_file(workdir, CURVES, to_json(curves) + "\n")
    file = io.BytesIO()
    np.save(file, np.array(pictures))
    write_run_file(workdir, PICTURES, file.getvalue())
    redraw(workdir, scores)


def redraw(workdir: Place, scores: Mapping[str, Json] | None = None) -> None:
    """Writes the page again from the files of a run, with other scores if they are given."""
    from dist_ens.report.page import page_of  # This import takes a second.

    run = read_run(workdir)
    run = dataclasses.replace(run, summary={**run.summary, **(scores or {})})
    write_run_file(workdir, PAGE, page_of([run]))


def read_run(folder: Folder) -> RunReport:
    """Reads the content of a run's report from its folder, which must have `curves.json`."""
    workdir = place_of(folder, "workdir")
    try:
        curves = _read_json(workdir, CURVES)
        summary = _read_json(workdir, SUMMARY) or {}
        metrics = read_metrics(workdir)
        pictures, tag = workdir.read_tagged(PICTURES)
        shown = [] if tag == ABSENT else [*np.load(io.BytesIO(pictures), allow_pickle=False)]
    except OSError as error:
        raise not_readable(workdir, error) from error
    except (ValueError, EOFError) as error:
        raise UserError(
            f"The files of {quoted(workdir)} cannot be read for the report: {first_line(error)} "
            f"Remove the file, and type {_evaluate(workdir)} to write it again."
        ) from error
    if curves is None:
        raise UserError(
            f"There is no {CURVES} in {quoted(workdir)}, from which a report is made. Train there, "
            f"or type {_evaluate(workdir)} first."
        )
    names = [SUMMARY, ANSWERS, CURVES, PICTURES, *files_of(workdir, METRICS)]
    clauses = [fault_of(workdir, name) for name in names]
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
        of_others = {n: v for n, v in summary.items() if n not in _OF_SOME_SCORES}
        summary = {**of_others, **scores, "steps": scores["step"]}
    choice = answers.pop(CHOICE, {})
    if choice.get("member_ids") and choice["step"] == summary.get("steps"):
        summary = {**summary, CHOICE: choice}
    return RunReport(
        name=workdir.name,
        summary=summary,
        metrics=metrics,
        curves=curves | {name: of["curve"] for name, of in answers.items() if "curve" in of},
        pictures=shown,
        faults=faults,
        answers=answers,
        step=summary.get("steps"),
    )


def keep_answers(
    workdir: Place,
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
    write_run_file(workdir, ANSWERS, f'{{"sha256": "{_sha256(steps)}", "steps": {steps}}}\n')


def read_answers(workdir: Place) -> JsonDict:
    """Returns the `steps` of `answers.json`; empty if there is no file.

    A step has `state`, a digest of the members, and `answers`, a dict from a question, such as
    `conformal=aps level=0.9`. A changed number would calibrate predictions, so the file has a hash.
    """
    try:
        kept = _read_json(workdir, ANSWERS)
        if kept is None:
            return {}
        if kept["sha256"] != _sha256(to_json(kept["steps"])):
            raise ValueError("its content does not match its hash")
    except OSError as error:
        raise not_readable(workdir, error) from error
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{quoted(f'{workdir}/{ANSWERS}')} cannot be read for the report: {first_line(error)} "
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


def _read_json(workdir: Place, name: str) -> JsonDict | None:
    """Returns the JSON object in a file, or None if there is no file."""
    try:
        value = from_json(workdir.read(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")
    return value


def _evaluate(workdir: Place) -> str:
    return command_line("dist-ens", "evaluate", workdir=workdir)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_metrics(workdir: Place) -> list[JsonDict]:
    """Returns the records of a run's metrics, each with its `step`; empty if there are none."""
    return [record for _, record in records_in(workdir, METRICS)]


def records_in(workdir: Place, name: str) -> list[tuple[bytes, JsonDict]]:
    """Returns the lines of a log that are records, each with its record.

    While a run lasts, its newest lines are in parts, of which each names how many lines are before
    it. A run that ended between writing lines to another file and deleting their part has them in
    both.
    """
    parts = files_of(workdir, name)[1:]
    lines = _lines(workdir.read_tagged(name)[0])
    for part in parts:
        content, tag = workdir.read_tagged(part)
        # A run that is training may have put it into the file meanwhile.
        if tag == ABSENT and part not in files_of(workdir, name):
            return records_in(workdir, name)
        # There are fewer lines if somebody has removed the file.
        lines += _lines(content)[max(len(lines) - int(part.rpartition("/")[2]), 0) :]
    read = [(line + b"\n", _record(line)) for line in lines]
    records = [(line, record) for line, record in read if record is not None]
    if dropped := len(read) - len(records):
        logging.warning(
            "%d of %d lines in %s are not records of metrics and are left out.",
            dropped,
            len(read),
            quoted(f"{workdir}/{name}"),
        )
    return records


def files_of(workdir: Place, name: str) -> list[str]:
    """Returns the names of a log's file and of its parts, in the order of their lines."""
    found = [path.rpartition("/")[2] for path in workdir.names(f"{name}{PARTS}")]
    firsts = sorted(int(first) for first in found if first.isdecimal())
    return [name, *(f"{name}{PARTS}/{first}" for first in firsts)]


def _lines(content: bytes) -> list[bytes]:
    """Returns the whole lines in a file."""
    return content.split(b"\n")[:-1]


def _record(line: bytes) -> JsonDict | None:
    """Returns the record of a line, numbers by name with a `step`; None if it is no record."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and is_whole(record.get("step"))
    return record if is_record and all(map(is_number, record.values())) else None
