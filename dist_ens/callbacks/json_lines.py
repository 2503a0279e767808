"""Records of metrics, flat dicts of numbers for one step, and their writer as JSON lines."""

import contextlib
import errno
import io
import logging
import os
import pathlib
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dist_ens.callbacks.protocol import RunInfo
from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.run_digests import fault_of, write_digest, write_run_file
from dist_ens.ensemble.failures import FAILED_UPDATES, IS_FROZEN
from dist_ens.evaluation import Scores
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import SaveError, code_of_write
from dist_ens.ground.file_writing import opened_in_place, replace_file
from dist_ens.ground.paths import given_path
from dist_ens.processes import cluster
from dist_ens.report.files import records_in, to_json


class JsonLines:
    """A writer that appends records of metrics to a file, one JSON object per line.

    A run that resumes drops the lines of later steps, since it will write them again. It also drops
    lines that are not records, with a warning. On several hosts, only process 0 writes.

    Lines that cannot be written, as on a full disk, stay in memory with a warning, and are written
    with a later line. No checkpoint is saved before the lines of its steps are on disk.

    Args:
        path: Path of the file, such as `runs/a/metrics.jsonl`. Its folder is made if it does not
            exist.

    Raises:
        SaveError: When the run begins or ends, or a checkpoint is about to be saved, if the file
            cannot be read or written.

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
        self._file: io.FileIO | None = None
        self._unwritten = b""
        self._num_bytes, self._digest = 0, 0  # Those of the lines in the file.
        self._warned: str | None = None  # Cause of the last warning.
        self._using = threading.Lock()

    def begin(self, run: RunInfo) -> None:
        """Opens the file, and drops the lines of later steps."""
        if not cluster.is_main():
            return
        with self._explained():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            records = records_in(self._path)
            kept = [line for line, record in records if record["step"] <= run.first_step]
            if fault := fault_of(self._path):
                logging.warning("%s: %s.", quoted(self._path), fault)
            content = b"".join(kept)
            write_run_file(self._path, content)
            self._digest, self._num_bytes = zlib.crc32(content), len(content)
            self._file = opened_in_place(self._path, "a+")

    def close(self) -> None:
        """Closes the file after its lines are on disk."""
        if self._file is None:
            return
        try:
            self.sync()
        finally:
            with self._using, contextlib.suppress(OSError):
                self._file.close()

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Appends the record of a step."""
        if self._file is None:
            return
        with self._using:
            self._unwritten += (to_json({"step": step, **record}) + "\n").encode()
            try:
                self._write_lines()
            except OSError as error:
                self._warn(error)
            else:
                self._warned = None

    def sync(self) -> None:
        """Waits until all lines are on disk. Any thread may call it."""
        with self._using, self._explained():
            if self._file is not None and not self._file.closed:
                self._write_lines()
                os.fsync(self._file.fileno())
                if not _is_same(self._file, self._path):
                    self._write_again(self._file)
                write_digest(self._path, (self._num_bytes, self._digest))

    def _write_again(self, removed: io.FileIO) -> None:
        """Writes the lines of a file that was removed. They are there as long as it is open."""
        if os.path.lexists(self._path):
            raise OSError(errno.ESTALE, f"{self._path.name} was replaced while it was written")
        number = removed.fileno()
        replace_file(self._path, os.pread(number, os.fstat(number).st_size, 0))
        self._file = opened_in_place(self._path, "a+")
        removed.close()

    def _write_lines(self) -> None:
        """Writes the lines that are not written yet. A part of them may stay unwritten."""
        while self._file is not None and self._unwritten:
            count = self._file.write(self._unwritten)
            self._digest = zlib.crc32(self._unwritten[:count], self._digest)
            self._num_bytes, self._unwritten = self._num_bytes + count, self._unwritten[count:]

    def _warn(self, error: OSError) -> None:
        """Warns of an error of writing, unless the last warning had the same cause."""
        why = explained(error)
        if why.what != self._warned:
            logging.warning(
                "The metrics cannot be written to %s: %s. They stay in memory, and the next record "
                "tries again. %s.",
                quoted(self._path),
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
                f"The metrics could not be written to {quoted(self._path)}: {why.what}. "
                f"{why.remedy}, then run the same command again to resume.",
                exit_code=code_of_write(error),
            ) from error


def _is_same(file: io.FileIO, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def score_record(
    split: str, ensemble: Mapping[str, float], members: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the record of an evaluation, given the scores of the ensemble and of each member.

    >>> score_record("test", {"nll": 0.1}, [{"member_id": 3, "nll": 0.2}])
    {'test/nll': 0.1, 'test/nll/member_03': 0.2}
    """
    record = {f"{split}/{name}": value for name, value in ensemble.items()}
    for member in members:
        record |= {
            f"{split}/{name}/member_{int(member['member_id']):02d}": value
            for name, value in member.items()
            if name != "member_id"
        }
    return record


def finite_scores(scores: Scores, member_score: str | None) -> dict[str, float]:
    """Returns the scores of the ensemble, or of its mean member, that are finite numbers.

    The score that `member_score` names is returned of each member, too.
    """
    values = dict(scores.ensemble or scores.mean_member)
    if member_score is not None:
        values |= {
            f"{member_score}/member_{int(member['member_id']):02d}": member[member_score]
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
