"""The file `metrics.jsonl` of a run: one record of metrics a line."""

import logging
import pathlib
from typing import Any

from dist_ens.commands import quoted
from dist_ens.json_text import from_json, is_number, is_whole

METRICS = "metrics.jsonl"


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a run's metrics, and warns of lines that are not records.

    Args:
        workdir: The run's folder.

    Returns:
        A mapping for each line, with its `step`; empty without a file.

    Raises:
        OSError: If the file cannot be read.
    """
    return [record for _, record in records_in(workdir / METRICS)]


def records_in(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Returns the lines of a file that are records, each with what it holds.

    The last line counts only once its end is written: until then it is being written, or was when
    the power failed.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
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


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns a line's record: numbers by name, and its step, a whole number; None if it is none.

    A step that is written as 5.0 makes no record: no run writes that.
    """
    try:
        record = from_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and is_whole(record.get("step"))
    return record if is_record and all(map(is_number, record.values())) else None
