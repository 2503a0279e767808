"""What a run tells people and scripts: metric lines, progress, the table, the summary.

Only process 0 reports; the caller sees to that.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dist_ens.layout import to_host

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"

_LINE_EVERY_SECS = 10.0
_MEMBERS_SHOWN = 20


class MetricsWriter:
    """Lines of `metrics.jsonl`, one step's metrics each.

    A run that goes on from a checkpoint drops the lines of later steps, for it will write them
    again.

    Args:
        workdir: The run's folder.
        step: Steps already taken.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        path = workdir / METRICS
        kept = [line for line in _whole_lines(path) if _step_of(line) <= step]
        write_atomically(path, "".join(kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step."""
        self._file.write(_json({"step": step, **metrics}) + "\n")
        self._file.flush()


def _whole_lines(path: pathlib.Path) -> list[str]:
    """The lines that were written to their end; the last may not have been."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _step_of(line: str) -> float:
    """The step of a metrics line; infinity for a line that is none, so that it is dropped."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(value: Any, **options: Any) -> str:
    """JSON, in which a number that is not finite is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, **options)


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
    for the host.

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
        self._pending: tuple[int, int, Mapping[str, jax.Array]] | None = None
        self._started = self._shown_at = time.monotonic()
        self._ended: float | None = None
        self._shown_step = first_step
        self._first_call: tuple[float, int] | None = None  # seconds and steps; it compiles
        self._paused_secs = 0.0
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

    def __exit__(self, *_: object) -> None:
        self._ended = time.monotonic()
        self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def updated(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics, float32[steps, members], of the call just dispatched."""
        self._read_pending()
        self._pending = (previous_step, step, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Reads what the last call left, waiting for it; what happens inside is no training."""
        self._read_pending()
        since = time.monotonic()
        yield
        self._paused_secs += time.monotonic() - since

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        previous_step, step, metrics = self._pending
        self._pending = None
        jax.block_until_ready(metrics)
        if self._first_call is None:
            self._first_call = (self.seconds() - self._paused_secs, step - previous_step)
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
        """Pace of the updates alone; without the first call, which compiles, if there were more."""
        seconds, steps = self.seconds() - self._paused_secs, step - self._first_step
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


def told(scores: Mapping[str, float], name: str) -> str:
    """A score in a few digits: of classes four after the point, in a target's own unit four."""
    return f"{scores[name]:{'.4f' if 'accuracy' in scores else '.4g'}}"


def scores_table(
    ensemble: Mapping[str, float],
    mean_member: Mapping[str, float],
    members: Sequence[Mapping[str, float]],
    num_groups: int = 1,
) -> Table:
    """The table at the end of a run: the ensemble, the mean member, and the members.

    Args:
        ensemble: A number for each score; of several groups the mean of theirs.
        mean_member: Likewise.
        members: Likewise of each, with its `member_id`.
        num_groups: Of members, each an ensemble.
    """
    table = Table(title="test split", title_justify="left")
    table.add_column("")
    for name in ensemble:
        table.add_column(name, justify="right")

    def row(label: str, scores: Mapping[str, float], style: str | None = None) -> None:
        table.add_row(label, *(told(scores, name) for name in ensemble), style=style)

    size = len(members) // num_groups
    mean_of = f"mean of {num_groups} groups, " if num_groups > 1 else ""
    row(f"{mean_of}ensemble of {size}", ensemble, "bold")
    row("mean member", mean_member)
    table.add_section()
    for member in members[:_MEMBERS_SHOWN]:
        row(f"member {int(member['member_id'])}", member, "dim")
    if len(members) > _MEMBERS_SHOWN:
        table.add_row(f"… {len(members) - _MEMBERS_SHOWN} more in {SUMMARY}", style="dim")
    return table


def plot_rates(
    path: pathlib.Path, num_members: Sequence[int], rates: Mapping[str, Sequence[float]]
) -> None:
    """A picture of member-examples per second over the number of members.

    Args:
        path: Of the PNG file.
        num_members: Along the horizontal axis.
        rates: A curve for each name, a number for each number of members.
    """
    from matplotlib.figure import Figure  # slow to import, and seldom needed

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, values in rates.items():
        axes.plot(num_members, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(num_members, [str(n) for n in num_members])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("members")
    axes.set_ylabel("member-examples per second")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_summary(workdir: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json`, whole or not at all."""
    write_scores(workdir / SUMMARY, summary)


def pace_before(workdir: pathlib.Path, step: int) -> dict[str, float]:
    """`seconds` and `member_examples_per_second` of the summary at this step; empty without one."""
    try:
        before = json.loads((workdir / SUMMARY).read_text(encoding="utf-8"))
        if before["steps"] == step:
            return {name: before[name] for name in ("seconds", "member_examples_per_second")}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is not ours
    return {}


def write_scores(path: pathlib.Path, scores: Mapping[str, Any]) -> None:
    """Writes scores as JSON, whole or not at all."""
    write_atomically(path, _json(scores, indent=2) + "\n")


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file by one that is on disk already, so that no reader sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
