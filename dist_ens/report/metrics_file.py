"""The file `metrics.jsonl` of a run, with one record of metrics on each line."""

import logging
import pathlib

from dist_ens.ground.commands import quoted
from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.json_text import JsonDict, from_json, is_number, is_whole

METRICS = "metrics.jsonl"


def read_metrics(workdir: pathlib.Path) -> list[JsonDict]:
    """Returns the records of a run's metrics, each with its `step`; empty if there is no file."""
    return [record for _, record in records_in(workdir / METRICS)]


def records_in(path: pathlib.Path) -> list[tuple[bytes, JsonDict]]:
    """Returns the lines of a file that are records, each with its record.

    A last line without an end is ignored. It is still being written, or its writer was interrupted.
    """
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
