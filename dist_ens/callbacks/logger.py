"""`Logger`: a callback that logs a run to a tool of somebody else, which cannot stop the run."""

import logging
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping

import numpy as np

from dist_ens.callbacks.json_lines import hyper_record
from dist_ens.callbacks.protocol import RunInfo, Service
from dist_ens.ground.causes import explained
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.processes import cluster

_OF_MEMBER = re.compile(r"(.+)/member_[\d.]+")
_QUANTILES = {"p05": 0.05, "median": 0.5, "p95": 0.95}
# Seconds that a save, and the end of a run, wait for a tool that does not answer.
_SAVE_SECS, _END_SECS = 10.0, 30.0
EXTRA = "loggers"


class Logger(Service):
    """The base of the loggers. A thread calls the tool, so that the run never waits for it.

    The first exception of a tool is reported in a warning, and the tool is not called again. A
    logger is a `Service`, so that a run may be resumed with other loggers than before.

    Args:
        members: Whether each member is logged too.

    Attributes:
        config: Settings of a run that is started from a config, by name.
    """

    def __init__(self, members: bool) -> None:
        self.config: Mapping[str, Json] = {}
        self._members = members
        self._run_id: str | None = None  # Id of the tool's run, which a resumed run continues.
        self._worker: _Worker | None = None
        self._handled: BaseException | None = None
        self._synced = threading.Event()  # Whether the tool has answered the newest save.
        self._synced.set()

    def open(self, run: RunInfo) -> None:
        """Opens the tool's run `_run_id`, or a new one if that is None."""
        raise NotImplementedError

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Logs numbers by name."""
        raise NotImplementedError

    def flush(self) -> None:
        """Waits until the tool has stored all records."""

    def end(self, failed: bool) -> None:
        """Closes the tool's run, which an exception has ended if it has `failed`."""

    def begin(self, run: RunInfo) -> None:
        """Starts the thread, on process 0."""
        if run.first_step == 0:  # An earlier run may have used this callback.
            self._run_id = None
        if cluster.is_main():
            # A caller may train within an `except`, whose exception is not one of the run.
            self._handled = sys.exc_info()[1]
            self._synced.set()
            self._worker = _Worker(type(self).__name__)
            self._call(lambda: self.open(run))

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Logs a record of metrics."""
        self._call(lambda: self.log(step, summarized(record, self._members)))

    def sync(self) -> None:
        """Waits until all records are stored, for some seconds at the first save that is late."""
        is_late = not self._synced.is_set()
        self._synced = self._call(self.flush)
        self._synced.wait(0 if is_late else _SAVE_SECS)

    def close(self) -> None:
        """Ends the thread."""
        if self._worker is not None:
            failed = sys.exc_info()[1] is not self._handled
            if not self._call(lambda: self.end(failed)).wait(_END_SECS):
                self._worker.fail(TimeoutError(f"no answer in {_END_SECS:.0f} seconds"))
            self._worker.close()
            self._worker = None

    def state(self) -> Callable[[], JsonDict | None]:
        """Returns a function that returns the id of the tool's run; None if there is none."""
        return lambda: None if self._run_id is None else {"run_id": self._run_id}

    def restore(self, state: JsonDict) -> None:
        """Resumes the tool's run."""
        self._run_id = state["run_id"]

    def settings(self, run: RunInfo) -> JsonDict:
        """Returns the settings of a run, and those of each member, by name."""
        ensemble = run.ensemble
        made_by = getattr(ensemble.optimizer, "update", ensemble.optimizer)  # Optax's is a tuple.
        optimizer = getattr(made_by, "__qualname__", type(made_by).__name__)
        of_run = self.config or {
            "network": ensemble.member.name,
            "optimizer": optimizer.partition(".<locals>")[0],
            "num_members": ensemble.num_members,
            "seed": int(ensemble.seed),
            "steps": run.last_step,
            "batch_size": run.batch_size,
            "execution": ensemble.execution,
            "mesh": str(ensemble.layout),
        }
        return {**of_run, **hyper_record(run.member_ids, ensemble.hyper)}

    def _call(self, call: Callable[[], object]) -> threading.Event:
        """Has the thread make a call, and returns an event that is set after it."""
        if self._worker is not None:
            return self._worker.call(call)
        no_call = threading.Event()
        no_call.set()
        return no_call


class _Worker:
    """A thread that makes the calls of one run, one after another, until one fails."""

    def __init__(self, name: str) -> None:
        self._name, self._has_failed = name, False
        self._calls = queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None]()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, call: Callable[[], object]) -> threading.Event:
        """Makes a call unless one has failed, and returns an event that is set after it."""
        has_ended = threading.Event()
        if self._has_failed:
            has_ended.set()
        else:
            self._calls.put((call, has_ended))
        return has_ended

    def close(self) -> None:
        """Ends the thread after the calls before."""
        self._calls.put(None)

    def _work(self) -> None:
        for call, has_ended in iter(self._calls.get, None):
            try:
                if not self._has_failed:
                    call()
            except Exception as error:  # A tool may raise anything.
                self.fail(error)
            has_ended.set()

    def fail(self, error: Exception) -> None:
        """Says once that the tool is not called again."""
        if not self._has_failed:
            self._has_failed = True
            logging.warning(
                "%s logs nothing more, and the run continues without it: %s.",
                self._name,
                explained(error).what or type(error).__name__,
            )


def summarized(record: Mapping[str, float], members: bool) -> dict[str, float]:
    """Returns a record with the median and the band of the members, and with them on request.

    The band has the 5th and the 95th percentile. Values that are not finite are left out of both.

    >>> record = {"test/nll": 0.1, "test/nll/member_00": 0.2, "test/nll/member_01": 0.4}
    >>> {name: round(value, 2) for name, value in summarized(record, members=False).items()}
    {'test/nll': 0.1, 'test/nll/p05': 0.21, 'test/nll/median': 0.3, 'test/nll/p95': 0.39}
    """
    of_members: dict[str, list[float]] = {}
    for name, value in record.items():
        if found := _OF_MEMBER.fullmatch(name):
            of_members.setdefault(found[1], []).append(value)
    shown = {n: v for n, v in record.items() if members or not _OF_MEMBER.fullmatch(n)}
    for name, values in of_members.items():
        finite = np.array(values)[np.isfinite(values)]
        for label, level in _QUANTILES.items():
            shown[f"{name}/{label}"] = float(np.quantile(finite, level)) if len(finite) else np.nan
    return shown
