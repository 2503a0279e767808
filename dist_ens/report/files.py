"""Files of a run, which are replaced atomically."""

import json
import math
import pathlib
from collections.abc import Mapping

from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import replace_file
from dist_ens.ground.json_text import Json, from_json

SUMMARY = "summary.json"
CURVES = "curves.json"
PICTURES = "pictures.npy"
ANSWERS = "answers.json"
PAGE = "report.html"
REPORT_FILES = (SUMMARY, CURVES, PICTURES, ANSWERS, PAGE)


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
    """Returns `seconds` and `member_examples_per_second` of the summary that was written at a step.

    It is empty if there is no summary of this step, or it cannot be read.
    """
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
