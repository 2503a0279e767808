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
from dist_ens.errors import RunError, code_of_write
from dist_ens.file_writing import replace_file
from dist_ens.paths import given_path
from dist_ens.report.files import to_json
from dist_ens.report.metrics_file import records_in


class JsonLines:
    """A writer that appends records of metrics to a file, one JSON object per line.

    A run that resumes drops the lines of later steps, since it will write them again. It also drops
    lines that are not records, with a warning. On several hosts, only process 0 writes.

    Args:
        path: Path of the file, such as `runs/a/metrics.jsonl`. Its folder is made if it does not
            exist.

    Raises:
        RunError: When the run begins or a record is written, if the file cannot be read or written.

    >>> import tempfile
    >>> run = RunInfo(None, member_ids=[0, 1], first_step=0, last_step=20, batch_size=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = JsonLines(f"{folder}/metrics.jsonl")
    ...     writer.begin(run)
    ...     writer.write(10, {"train/loss": 0.5})
    ...     writer.close()
    ...     print(pathlib.Path(folder, "metrics.jsonl").read_text(), end="")
    {"step": 10, "train/loss": 0.5}
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
            replace_file(self._path, b"".join(kept))
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file after its lines are on disk.

        Raises:
            RunError: If the system cannot write the lines.
        """
        if self._file is None:
            return
        try:
            self.sync()
        finally:
            # `write` has reported a line that could not be written.
            with self._closing, contextlib.suppress(OSError):
                self._file.close()

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Appends the record of a step.

        Args:
            step: Number of steps that the state has seen.
            record: Numbers by name, such as `train/loss`.

        Raises:
            RunError: If the system cannot write the line.
        """
        with self._explained():
            if self._file is not None:
                self._file.write(to_json({"step": step, **record}) + "\n")
                self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on disk. Any thread may call it.

        Raises:
            RunError: If the system cannot write the lines.
        """
        with self._closing, self._explained():
            if self._file is not None and not self._file.closed:
                os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises an error of the system as a `RunError` that names the file."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"The metrics could not be written to {quoted(self._path)}: {error.strerror}. Free "
                "some space, or make the file writable, and run the same command again.",
                exit_code=code_of_write(error),
            ) from error
