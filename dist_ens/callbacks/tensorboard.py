"""The logger for TensorBoard."""

import json
import os
import time
from collections.abc import Mapping

from dist_ens.callbacks.logger import EXTRA, Logger
from dist_ens.callbacks.protocol import RunInfo
from dist_ens.ground.extras import imported
from dist_ens.ground.paths import given_path


class TensorBoard(Logger):
    """A callback that logs a run to event files of TensorBoard.

    `tensorboard --logdir=FOLDER` shows them. A resumed run adds a file, with which TensorBoard
    hides the later steps of the files before. The names are those of `metrics.jsonl`, and
    `/median`, `/p05` and `/p95` after them for the median and the 5th and 95th percentile of the
    members. If the files cannot be written, a warning says so, and training continues.

    Args:
        folder: Path of the folder, made if it does not exist. A run that begins anew hides the
            runs that it holds.
        members: Whether each member has a series of its own, such as `train/loss/member_03`.

    Raises:
        UserError: If the extra `[loggers]` is not installed.

    >>> logger = TensorBoard("runs/a/tensorboard", members=True)
    """

    def __init__(self, folder: str | os.PathLike[str], *, members: bool = False) -> None:
        super().__init__(members)
        self._folder = given_path(folder, "folder")
        self._files = imported("tensorboardX.event_file_writer", EXTRA)
        self._events = imported("tensorboardX.proto.event_pb2", EXTRA)
        self._summary = imported("tensorboardX.summary", EXTRA)

    def open(self, run: RunInfo) -> None:
        """Opens a file that hides later steps, and writes the settings."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # SummaryWriter would write in a thread, and block the caller after a full disk. TensorBoard
        # reads the files in the order of their names, which count seconds only.
        prefix, suffix = str(self._folder / "events"), f".{time.time_ns()}"
        self._writer = self._files.EventsWriter(prefix, suffix)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.first_step + 1 if run.first_step else 0, session_log=start)
        text = json.dumps(self.settings(run), indent=4).replace("\n", "\n    ")  # A block of code.
        self._add(run.first_step, summary=self._summary.text("settings", f"    {text}"))
        self._writer.flush()

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Writes the numbers."""
        for name, value in record.items():
            self._add(step, summary=self._summary.scalar(name, value))
        self._writer.flush()

    def end(self, failed: bool) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)
