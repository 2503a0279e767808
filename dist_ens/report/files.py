"""Files of a run that are replaced as a whole, or not at all."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from dist_ens.json_text import from_json, is_number

SUMMARY = "summary.json"
CURVES = "curves.json"
PICTURES = "pictures.npy"
PAGE = "report.html"


def to_json(value: Any, **options: Any) -> str:
    """JSON, in which a number that is not finite is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, **options)


def write_summary(workdir: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json`, whole or not at all."""
    write_scores(workdir / SUMMARY, summary)


def pace_before(workdir: pathlib.Path, step: int) -> dict[str, float]:
    """Returns `seconds` and `member_examples_per_second` of the summary that was left at a step.

    Args:
        workdir: The run's folder.
        step: Steps already taken.

    Returns:
        The two numbers by their names; empty if there is no summary of this step, or it is damaged.
    """
    try:
        before = from_json((workdir / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}
    names = ("seconds", "member_examples_per_second")
    if not isinstance(before, dict) or before.get("steps") != step:
        return {}
    pace = {n: before[n] for n in names if before.get(n) is not None and is_number(before[n])}
    return pace if len(pace) == len(names) else {}


def write_scores(path: pathlib.Path, scores: Mapping[str, Any]) -> None:
    """Writes scores as JSON, whole or not at all."""
    write_atomically(path, to_json(scores, indent=2) + "\n")


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file by one that is on disk already, so that no reader sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")  # a name of a file may be no text
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
