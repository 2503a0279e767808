"""The logger for Weights & Biases."""

import json
import os
import pathlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from dist_ens.callbacks.logger import EXTRA, Logger
from dist_ens.callbacks.protocol import RunInfo, StepInfo
from dist_ens.ground.extras import imported
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import require_one_of
from dist_ens.ground.paths import given_path

_FLUSH_SECS, _MOST_FLUSH_SECS = 0.5, 5.0
_ANSWER_SECS = 25.0  # Less than a run waits for the thread at its end.


class WandB(Logger):
    """A callback that logs a run to Weights & Biases.

    The names are those of `metrics.jsonl`, and `/median`, `/p05` and `/p95` after them for the
    median and the 5th and 95th percentile of the members. A run that resumes from a checkpoint
    continues with the same id, and logs no step twice. Offline, it adds a folder
    `wandb/offline-run-TIME-ID` with the next steps, and `wandb sync --id=ID FOLDERS` sends all
    folders as one run. If there is no network or no login, a warning says so, and training
    continues.

    Args:
        project: Name of the project. Default: that of the environment variable WANDB_PROJECT, or
            else one that W&B finds.
        name: Name of the run. Default: W&B makes one.
        mode: "online", "offline" or "disabled". Default: that of WANDB_MODE, or else "online".
        folder: Folder in which `wandb/` holds the files. Default: the current one.
        members: Whether each member has a series of its own, such as `train/loss/member_03`.

    Raises:
        UserError: If the extra `[loggers]` is not installed, or `mode` is unknown.

    >>> logger = WandB(project="digits", mode="offline")
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        mode: str | None = None,
        folder: str | os.PathLike[str] = ".",
        members: bool = False,
    ) -> None:
        super().__init__(members)
        if mode is not None:
            require_one_of("mode", mode, ("online", "offline", "disabled"))
        self._project, self._name, self._mode = project, name, mode
        self._folder = given_path(folder, "folder")
        self._wandb = imported("wandb", EXTRA)
        # Numbers of the newest step, which may have a second record. W&B takes a step once.
        self._row: dict[str, float] = {}
        self._row_step = self._next_step = 0
        # Step of the state, and of the newest one that is saved or about to be.
        self._step = self._saved_step = 0

    def begin(self, run: RunInfo) -> None:
        """Starts the thread, on process 0."""
        self._step = self._saved_step = run.first_step
        super().begin(run)

    def before(self, info: StepInfo) -> None:
        """Notes the step of the state."""
        self._step = info.step

    def state(self) -> Callable[[], JsonDict | None]:
        """Returns a function that returns the id of the run. It is called when a save begins."""
        self._saved_step = self._step
        return super().state()

    def open(self, run: RunInfo) -> None:
        """Opens a run, or continues one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = self._wandb.setup().settings.mode
        mode = self._mode or known
        # Its question for a key would wait for an answer.
        if mode == known == "online" and not self._wandb.login(prompt=False, verify=False):
            raise PermissionError("no API key is known; type wandb login")
        last_step = _last_step_offline(self._folder / "wandb", self._run_id)
        self._run_id = self._run_id or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            dir=str(self._folder),
            id=self._run_id,
            resume="allow",
            mode=mode,
            reinit="create_new",
            config=self.settings(run),
            allow_val_change=True,
            settings=self._wandb.Settings(
                console="off",
                quiet=True,
                init_timeout=_ANSWER_SECS,
                finish_timeout=_ANSWER_SECS,
                # Otherwise a killed process loses the records of up to 15 seconds.
                x_transaction_log_flush_interval=_FLUSH_SECS,
            ),
        )
        self._row, self._next_step = {}, max(self._run.starting_step, last_step + 1)

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Adds the numbers to those of the step, and logs the step before."""
        if step > self._row_step:
            self._log_row()
        if step >= self._next_step:
            self._row_step = step
            self._row |= record

    def flush(self) -> None:
        """Logs the step that is saved, and waits until the file of the run is written."""
        if not self._row or self._row_step > self._saved_step:
            return
        self._log_row()
        _ = self._run.step  # The answer comes after the row has arrived.
        file, now = pathlib.Path(self._run.settings.sync_file), time.time()
        while file.exists() and file.stat().st_mtime <= now > time.time() - _MOST_FLUSH_SECS:
            time.sleep(_FLUSH_SECS / 10)

    def end(self, failed: bool) -> None:
        """Logs the newest step, and waits for the upload."""
        self._log_row()
        self._run.finish(exit_code=int(failed))

    def _log_row(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._row_step, commit=True)
            self._row, self._next_step = {}, self._row_step + 1


def _last_step_offline(folder: pathlib.Path, run_id: str | None) -> int:
    """Returns the last step in the files of a run that was offline; -1 without files."""
    steps = [-1]
    for file in folder.glob(f"offline-run-*-{run_id}/*.wandb"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        found = subprocess.run(command, capture_output=True, check=True, text=True)
        records = map(json.loads, found.stdout.splitlines())
        steps += [each["history"]["step"]["num"] for each in records if each["type"] == "history"]
    return max(steps)
