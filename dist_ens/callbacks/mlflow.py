"""The logger for MLflow."""

import logging
import time
from collections.abc import Mapping

from dist_ens.callbacks.logger import EXTRA, Logger
from dist_ens.callbacks.protocol import RunInfo
from dist_ens.ground.extras import imported

_MOST_PARAMS, _MOST_METRICS = 100, 1000  # of one request


class MLflow(Logger):
    """A callback that logs a run to MLflow.

    The names are those of `metrics.jsonl`, and `/median`, `/p05` and `/p95` after them for the
    median and the 5th and 95th percentile of the members. A run that resumes from a checkpoint
    continues the same run of MLflow, and logs no step twice. If the server does not answer or the
    database cannot be written, a warning says so, and training continues.

    Args:
        experiment: Name of the experiment, made if it does not exist.
        run_name: Name of the run. Default: MLflow makes one.
        tracking_uri: Address of a server or a database, such as "http://127.0.0.1:5000" or
            "sqlite:///runs/mlflow.db". Default: MLflow's own, which is the environment variable
            MLFLOW_TRACKING_URI, or else the database mlflow.db in the current folder.
        members: Whether each member has a metric of its own, such as `train/loss/member_03`.

    Raises:
        UserError: If the extra `[loggers]` is not installed.

    >>> logger = MLflow(experiment="digits", tracking_uri="sqlite:///mlflow.db")
    """

    def __init__(
        self,
        *,
        experiment: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        members: bool = False,
    ) -> None:
        super().__init__(members)
        self._experiment, self._run_name = experiment, run_name
        self._tracking_uri = tracking_uri
        self._mlflow = imported("mlflow", EXTRA)
        for module in ("sqlalchemy", "alembic"):  # Only MLflow's local store imports them.
            imported(module, EXTRA)
        # Last step that is logged of each metric, in a run that continues.
        self._last_steps: dict[str, int] = {}

    def open(self, run: RunInfo) -> None:
        """Opens a run and logs the settings, or continues one."""
        # Its traceback of an error of the database would come beside the warning.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        self._last_steps, self._continues = {}, self._run_id is not None
        if self._continues:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        created = self._client.create_run(number, run_name=self._run_name)
        self._run_id = created.info.run_id
        param = self._mlflow.entities.Param
        params = [param(name, str(value)) for name, value in self.settings(run).items()]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=part)

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Logs the numbers that are not logged yet."""
        metric, milliseconds = self._mlflow.entities.Metric, int(1000 * time.time())
        metrics = [
            metric(name, value, milliseconds, step)
            for name, value in record.items()
            if step > self._last_step(name)
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def end(self, failed: bool) -> None:
        """Marks the run as finished or failed."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _last_step(self, name: str) -> int:
        """Returns the last step that an earlier process has logged of a metric; -1 for none."""
        if not self._continues:
            return -1
        if name not in self._last_steps:
            history = self._client.get_metric_history(self._run_id, name)
            self._last_steps[name] = max((each.step for each in history), default=-1)
        return self._last_steps[name]


def _parts(items: list[object], size: int) -> list[list[object]]:
    """Returns a list in parts of at most some items."""
    return [items[first : first + size] for first in range(0, len(items), size)]
