"""What a running loop tells people and scripts: metric lines, and progress."""

import contextlib
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dist_ens.commands import quoted
from dist_ens.errors import RunError
from dist_ens.json_text import from_json, is_number, is_whole
from dist_ens.layout import to_host
from dist_ens.report.files import to_json, write_atomically

METRICS = "metrics.jsonl"

_LINE_EVERY_SECS = 10.0


class MetricsWriter:
    """Lines of `metrics.jsonl`, one step's metrics each.

    A run that resumes drops the lines of later steps, for it will write them again. It also drops
    lines that are not records, with a warning.

    Args:
        workdir: The run's folder.
        step: Steps already taken.

    Raises:
        RunError: If the file cannot be read or written.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        self._path = workdir / METRICS
        with self._told_if_unwritable():
            records = _records(self._path)
            kept = [line for line, record in records if record["step"] <= step]
            write_atomically(self._path, b"".join(kept))
            self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._closing = threading.Lock()

    def close(self) -> None:
        """Closes the file; its lines are on disk then, or a `RunError` says that they are not."""
        try:
            self.sync()
        finally:
            with self._closing, contextlib.suppress(OSError):  # of a line that was told already
                self._file.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step.

        Raises:
            RunError: If the system refuses.
        """
        with self._told_if_unwritable():
            self._file.write(to_json({"step": step, **metrics}) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Returns when all lines are on disk, as they are once the file is closed; in any thread.

        Raises:
            RunError: If the system refuses.
        """
        with self._closing, self._told_if_unwritable():
            if not self._file.closed:
                os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _told_if_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"The metrics could not be written to {quoted(self._path)}: {error.strerror}. Free "
                "some space, or make the file writable, and run the same command again."
            ) from error


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a run's metrics, and warns of lines that are not records.

    Args:
        workdir: The run's folder.

    Returns:
        A mapping for each line, with its `step`; empty without a file.

    Raises:
        OSError: If the file cannot be read.
    """
    return [record for _, record in _records(workdir / METRICS)]


def _records(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
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


def metrics_line(
    split: str, ensemble: Mapping[str, float], members: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Names of the scores in a metrics line.

    >>> metrics_line("test", {"nll": 0.1}, [{"member_id": 3, "nll": 0.2}])
    {'test/nll': 0.1, 'test/nll/member_03': 0.2}
    """
    line = {f"{split}/{name}": value for name, value in ensemble.items()}
    for member in members:
        line |= {
            f"{split}/{name}/member_{int(member['member_id']):02d}": value
            for name, value in member.items()
            if name != "member_id"
        }
    return line


class TrainingReporter:
    """Metric lines, and the pace, of a running loop; a context. Every host has one, one writes.

    A call's metrics are read when the next call has been dispatched, so that the device never waits
    for the host, or before that by the thread that saves what the call left; those of the first
    call, which is waited for, at once.

    Args:
        console: Where the pace goes: a bar on a terminal, a line every ten seconds elsewhere.
        workdir: The run's folder; None on the hosts that do not write.
        member_ids: Names of the members, in their order.
        first_step: Steps already taken.
        last_step: Steps of the whole run.
        every_steps: How often a line of training metrics is written; the last step has one too.
        member_examples_per_step: Members times global batch size.
    """

    def __init__(
        self,
        console: Console,
        workdir: pathlib.Path | None,
        *,
        member_ids: Sequence[int],
        first_step: int,
        last_step: int,
        every_steps: int,
        member_examples_per_step: int,
    ) -> None:
        self._console = console
        self._member_ids = member_ids
        self._first_step, self._last_step = first_step, last_step
        self._every_steps = every_steps
        self._per_step = member_examples_per_step
        self._writer = None if workdir is None else MetricsWriter(workdir, first_step)
        self._reading = threading.Lock()
        self._pending: tuple[int, int, Mapping[str, jax.Array]] | None = None
        self._started = self._shown_at = time.monotonic()
        self._ended: float | None = None
        self._shown_step = first_step
        self._paused_secs = 0.0
        self._training_secs = 0.0  # until the last call that was waited for
        self._first_call: tuple[float, int] | None = None  # seconds and steps; it compiles
        self._text = "compiling"
        self._bar = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(self._text, total=last_step, completed=first_step)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A thread that saves may be about to read the last call, but who asks a second time for the
        # end will not wait, and hosts of which one failed do not read together.
        try:
            if kind is None or (kind is not KeyboardInterrupt and jax.process_count() == 1):
                self.catch_up()
        finally:
            self._ended = time.monotonic()
            self._bar.stop()
            if self._writer is not None:
                self._writer.close()

    def updated(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics, float32[steps, members], of the call just dispatched."""
        self.catch_up()
        self._pending = (previous_step, step, metrics)
        if self._first_call is None:  # the next may be done when it is dispatched, as in waves
            self.catch_up()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Catches up; what happens inside is no training."""
        self.catch_up()
        since = time.monotonic()
        yield
        paused_secs = time.monotonic() - since
        self._paused_secs += paused_secs
        self._shown_at += paused_secs

    def catch_up(self, last_step: float = math.inf) -> None:
        """Waits for the last call, and reads what it left; in any thread.

        Args:
            last_step: Of calls that are waited for.
        """
        with self._reading:
            if self._pending is not None and self._pending[1] <= last_step:
                pending, self._pending = self._pending, None
                self._read(*pending)

    def keep(self, last_step: int) -> None:
        """Catches up with calls to a step, and returns when their lines are on disk."""
        self.catch_up(last_step)
        if self._writer is not None:
            self._writer.sync()

    def _read(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        jax.block_until_ready(metrics)
        self._training_secs = self.seconds() - self._paused_secs
        if self._first_call is None:
            self._first_call = (self._training_secs, step - previous_step)
        if (
            step // self._every_steps > previous_step // self._every_steps
            or step == self._last_step
        ):
            self._write(step, {k: v.mean(axis=0) for k, v in to_host(metrics).items()})
        self._show_pace(step)

    def evaluated(self, step: int, scores: Mapping[str, Any]) -> None:
        """Takes `{"test": …, "members": […]}`, the scores of the state at `step`."""
        if self._writer is not None:
            self._writer.write(step, metrics_line("test", scores["test"], scores["members"]))

    def seconds(self) -> float:
        """From the loop's begin to its end; compilation, evaluation and saving included."""
        return (self._ended or time.monotonic()) - self._started

    def member_examples_per_second(self, step: int) -> float:
        """Pace of training. Saving counts; evaluation, and a first call of several, do not."""
        seconds, steps = self._training_secs, step - self._first_step
        if self._first_call is not None and self._first_call[1] < steps:
            seconds, steps = seconds - self._first_call[0], steps - self._first_call[1]
        return steps * self._per_step / seconds if steps else 0.0

    def _write(self, step: int, member_metrics: Mapping[str, np.ndarray]) -> None:
        mean = {name: float(values.mean()) for name, values in member_metrics.items()}
        self._text = f"loss {mean['loss']:.4f}"
        if self._writer is None:
            return
        members = [
            {"member_id": i, **{name: float(v[k]) for name, v in member_metrics.items()}}
            for k, i in enumerate(self._member_ids)
        ]
        self._writer.write(step, metrics_line("train", mean, members))

    def _show_pace(self, step: int) -> None:
        seconds = time.monotonic() - self._shown_at
        self._bar.update(self._task, completed=step)
        if seconds < (1.0 if self._console.is_terminal else _LINE_EVERY_SECS):
            return
        pace = (step - self._shown_step) / seconds
        text = f"{pace:,.1f} steps/s, {pace * self._per_step:,.0f} member-examples/s, {self._text}"
        self._shown_at, self._shown_step = time.monotonic(), step
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(f"step {step:,}/{self._last_step:,}: {text}")
