"""Metrics as JSON lines."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import TextIO

from dist_ens import cluster
from dist_ens.callbacks.protocol import RunInfo
from dist_ens.commands import quoted
from dist_ens.errors import RunError
from dist_ens.paths import given_path
from dist_ens.report.files import to_json, write_atomically
from dist_ens.report.metrics_file import records_in


class JsonLines:
    """Writes records of metrics to a file, one JSON object a line.

    A run that resumes drops the lines of later steps, since it will write them again. It also drops
    lines that are not records, with a warning. On several hosts process 0 writes.

    Args:
        path: Path of the file, such as `runs/a/metrics.jsonl`. Its folder is made if it does not
            exist.

    Raises:
        RunError: When the run begins or a record is written, if the file cannot be read or written.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = given_path(path, "path")
        self._file: TextIO | None = None
        self._closing = threading.Lock()

    def begin(self, run: RunInfo) -> None:
        """Opens the file, and drops the lines of later steps."""
        if not cluster.is_main():
            return
        with self._explained():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            records = records_in(self._path)
            kept = [line for line, record in records if record["step"] <= run.first_step]
            write_atomically(self._path, b"".join(kept))
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file; its lines are on disk then, or a `RunError` says that they are not."""
        if self._file is None:
            return
        try:
            self.sync()
        finally:
            with (
                self._closing,
                contextlib.suppress(OSError),
            ):  # a line that could not be written was reported
                self._file.close()

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Appends the record of a step.

        Raises:
            RunError: If the system refuses.
        """
        with self._explained():
            if self._file is not None:
                self._file.write(to_json({"step": step, **record}) + "\n")
                self._file.flush()

    def sync(self) -> None:
        """Returns when all lines are on disk; may be called in any thread.

        Raises:
            RunError: If the system refuses.
        """
        with self._closing, self._explained():
            if self._file is not None and not self._file.closed:
                os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"The metrics could not be written to {quoted(self._path)}: {error.strerror}. Free "
                "some space, or make the file writable, and run the same command again."
            ) from error
