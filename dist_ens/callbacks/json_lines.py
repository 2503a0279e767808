"""Records of metrics, flat dicts of numbers for one step, and their writer as JSON lines."""

import contextlib
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dist_ens.callbacks.protocol import RunInfo
from dist_ens.checkpoint.run_digests import DIGESTS, fault_of, write_run_file
from dist_ens.ensemble.failures import FAILED_UPDATES, IS_FROZEN
from dist_ens.evaluation import Scores
from dist_ens.ground.causes import explained
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import SaveError, code_of_write
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.predictors import padded
from dist_ens.processes import cluster
from dist_ens.report.files import PARTS, files_of, records_in, to_json
from dist_ens.storage import file_at

_EVERY_SECS = 5.0  # Time after which the newest lines are written again.
_MOST_PARTS = 100  # Number of parts that are put together while a run lasts.
_LARGEST_PART = 2**20  # Bytes after which a part is not written again.


class JsonLines:
    """A writer of records of metrics to a file, one JSON object per line.

    While a run lasts, its newest lines are in parts, the files of the folder `NAME.parts` beside
    the file NAME. Every few seconds, and before a checkpoint is saved, the newest part is written
    anew. When the run ends, all lines are in the one file. `de.load(folder).history` reads both.

    A run that resumes drops the lines of later steps, since it will write them again. It also drops
    lines that are not records, with a warning. On several hosts, only process 0 writes.

    Lines that cannot be written, as on a full disk, stay in memory with a warning, and are written
    with a later line. No checkpoint is saved before the lines of its steps are stored.

    Args:
        path: Path or address of the file, such as `runs/a/metrics.jsonl`. Its folder is made if it
            does not exist.

    Raises:
        UserError: When the run begins, if the file cannot be written.
        SaveError: When the run ends, or a checkpoint is about to be saved, if the file cannot be
            read or written.

    >>> import pathlib, tempfile
    >>> run = RunInfo(None, member_ids=[0, 1], first_step=0, last_step=20, batch_size=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = JsonLines(f"{folder}/metrics.jsonl")
    ...     writer.begin(run)
    ...     writer.write(10, {"train/loss": 0.5})
    ...     writer.close()
    ...     print(pathlib.Path(folder, "metrics.jsonl").read_text(), end="")
    {"step": 10, "train/loss": 0.5}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place, self._name = file_at(path, "path")
        self._is_open = False
        # The lines of the newest part, those of them that are stored, and where it begins.
        self._part = self._stored = b""
        self._first = self._num_parts = 0
        self._warned: str | None = None  # Cause of the last warning.
        self._using, self._writing = threading.Lock(), threading.Lock()
        self._has_ended = threading.Event()

    def begin(self, run: RunInfo) -> None:
        """Reads the file, and drops the lines of later steps."""
        if not cluster.is_main():
            return
        self._place.require_writable([self._name], is_new=True)
        with self._explained():
            self._place.make()
            for name in files_of(self._place, self._name):
                if fault := fault_of(self._place, name):
                    logging.warning("%s: %s.", quoted(f"{self._place}/{name}"), fault)
            self._put_together(run.first_step)
        self._is_open, self._has_ended = True, threading.Event()
        # A server that does not answer must not keep the run waiting.
        threading.Thread(target=self._write_often, daemon=True).start()

    def close(self) -> None:
        """Puts all lines into the file."""
        if self._is_open:
            self._has_ended.set()
            self.sync()
            self._is_open = False
            with self._writing, self._explained():
                self._put_together()

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Adds the record of a step."""
        if self._is_open:
            with self._using:
                self._part += (to_json({"step": step, **record}) + "\n").encode()

    def holds(self, step: int, names: Iterable[str]) -> bool:
        """Returns whether the stored records of a step have values of all names."""
        records = [record for _, record in records_in(self._place, self._name)]
        return {*names} <= {name for each in records if each["step"] == step for name in each}

    def sync(self) -> None:
        """Waits until all lines are stored, and begins a new part. Any thread may call it."""
        if self._is_open:
            with self._writing, self._explained():
                self._write_part()
                self._begin_part()

    def _write_often(self) -> None:
        """Stores the newest lines every few seconds."""
        while not self._has_ended.wait(_EVERY_SECS):
            with self._writing:
                try:
                    self._write_part()
                    if len(self._stored) > _LARGEST_PART:
                        self._begin_part()
                except OSError as error:
                    self._warn(error)
                else:
                    self._warned = None

    def _write_part(self) -> None:
        """Writes the newest part as a whole."""
        with self._using:
            part = self._part
        if part != self._stored:
            write_run_file(self._place, f"{self._name}{PARTS}/{self._first}", part)
            self._stored = part

    def _begin_part(self) -> None:
        """Begins a new part after the lines that are stored."""
        if not self._stored:
            return
        with self._using:
            self._part = self._part[len(self._stored) :]
        self._first += self._stored.count(b"\n")
        self._stored, self._num_parts = b"", self._num_parts + 1
        if self._num_parts >= _MOST_PARTS:
            self._put_together()

    def _put_together(self, last_step: float = math.inf) -> None:
        """Moves the lines of all parts up to a step into the file."""
        records = records_in(self._place, self._name)
        lines = [line for line, record in records if record["step"] <= last_step]
        content = b"".join(lines)
        if content != self._place.read_tagged(self._name)[0]:
            write_run_file(self._place, self._name, content)
        for folder in (f"{DIGESTS}/{self._name}{PARTS}", f"{self._name}{PARTS}"):
            (self._place / folder).remove_all()
        self._first, self._num_parts = len(lines), 0

    def _warn(self, error: OSError) -> None:
        """Warns of an error of writing, unless the last warning had the same cause."""
        why = explained(error)
        if why.what != self._warned:
            logging.warning(
                "The metrics cannot be written to %s: %s. They stay in memory, and the next record "
                "tries again. %s.",
                quoted(f"{self._place}/{self._name}"),
                why.what,
                why.remedy,
            )
        self._warned = why.what

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises an error of the system as a `SaveError` that names the file."""
        try:
            yield
        except OSError as error:
            why = explained(error)
            raise SaveError(
                f"The metrics could not be written to {quoted(f'{self._place}/{self._name}')}: "
                f"{why.what}. {why.remedy}, then run the same command again to resume.",
                exit_code=code_of_write(error),
            ) from error


def score_record(
    split: str, ensemble: Mapping[str, float], members: Sequence[JsonDict]
) -> dict[str, float]:
    """Returns the record of an evaluation, given the scores of the ensemble and of each member.

    >>> score_record("test", {"nll": 0.1}, [{"member_id": 3, "nll": 0.2}])
    {'test/nll': 0.1, 'test/nll/member_03': 0.2}
    """
    record = {f"{split}/{name}": value for name, value in ensemble.items()}
    for member in members:
        record |= {
            f"{split}/{name}/member_{padded(member['member_id'])}": value
            for name, value in member.items()
            if name != "member_id"
        }
    return record


def hyper_record(member_ids: Sequence[int], hyper: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the record of the settings of the members, float[members] by name.

    >>> hyper_record([0, 5], {"learning_rate": np.array([0.5, 0.25])})
    {'hyper/learning_rate/member_00': 0.5, 'hyper/learning_rate/member_05': 0.25}
    """
    return {
        f"hyper/{name}/member_{member_id:02d}": float(value)
        for name, values in hyper.items()
        for member_id, value in zip(member_ids, values, strict=True)
    }


def finite_scores(scores: Scores, member_score: str | None) -> dict[str, float]:
    """Returns the scores of the ensemble, or of its mean member, that are finite numbers.

    The score that `member_score` names is returned of each member, too.
    """
    values = dict(scores.ensemble or scores.mean_member)
    if member_score is not None:
        values |= {
            f"{member_score}/member_{padded(member['member_id'])}": member[member_score]
            for member in scores.members
            if member_score in member
        }
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def training_record(
    member_ids: Sequence[int], metrics: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the means of metrics, float32[steps, members], over some steps of training.

    If updates are checked, `failed_updates` and `is_frozen` are recorded at the last step. The
    means then leave out values that are not finite, and the mean over members the frozen ones.
    """
    counts = {name: metrics[name][-1] for name in (FAILED_UPDATES, IS_FROZEN) if name in metrics}
    rest = {name: values for name, values in metrics.items() if name not in counts}
    mean, active = (_finite_mean, counts[IS_FROZEN] == 0) if counts else (np.mean, slice(None))
    means = {name: mean(values, axis=0) for name, values in rest.items()}
    overall = {name: float(mean(v[active])) for name, v in means.items()}
    members = [
        {"member_id": member_id, **{name: float(v[k]) for name, v in (means | counts).items()}}
        for k, member_id in enumerate(member_ids)
    ]
    return score_record(
        "train", overall | {name: float(v.sum()) for name, v in counts.items()}, members
    )


def shown_loss(metrics: Mapping[str, np.ndarray]) -> float:
    """Returns the mean loss at the last of some steps, of the members that are not frozen."""
    losses = metrics["loss"][-1]
    if IS_FROZEN in metrics:
        return float(_finite_mean(losses[metrics[IS_FROZEN][-1] == 0]))
    return float(losses.mean())


def _finite_mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Returns the mean of the finite values along an axis; NaN if there are none."""
    is_finite = np.isfinite(values)
    total = np.where(is_finite, values, 0).sum(axis=axis, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return total / is_finite.sum(axis=axis)
