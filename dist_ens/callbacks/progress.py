"""Progress of a run on the terminal, or in a notebook."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dist_ens import cluster
from dist_ens.callbacks.protocol import RunInfo, StepInfo
from dist_ens.callbacks.records import shown_loss
from dist_ens.evaluation import Scores
from dist_ens.terminal import PlainConsole

_LINE_EVERY_SECS, _BAR_EVERY_SECS = 10.0, 1.0


class ProgressBar:
    """A progress bar with the pace of training.

    It is a bar on a terminal and in a notebook. Elsewhere it prints a line every ten seconds or so.

    Args:
        console: Console to write to. Default: standard output, on process 0 only.

    >>> import io
    >>> console = Console(file=io.StringIO(), force_terminal=True, width=80)
    >>> bar = ProgressBar(console)
    >>> bar.begin(RunInfo(None, member_ids=[0], first_step=20, last_step=1000, batch_size=8))
    >>> bar.close()
    >>> "20/1,000" in console.file.getvalue()
    True
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._text = "compiling"

    def begin(self, run: RunInfo) -> None:
        """Starts the bar."""
        if self._console is None:
            self._console = PlainConsole(quiet=not cluster.is_main())
        console = self._console
        self._shows_bar = console.is_terminal or console.is_jupyter
        self._last_step = run.last_step
        self._examples = run.batch_size * len(run.member_ids)
        self._shown_step, self._shown_at = run.first_step, time.monotonic()
        self._bar = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._shows_bar,
            transient=True,
        )
        self._task = self._bar.add_task(self._text, total=run.last_step, completed=run.first_step)
        self._bar.start()

    def __call__(self, info: StepInfo) -> None:
        """Shows how many steps are done, and the loss."""
        if self._bar is None or self._console is None:
            return
        step = info.metrics_step
        self._bar.update(self._task, completed=step)
        secs = time.monotonic() - self._shown_at
        if secs < (_BAR_EVERY_SECS if self._shows_bar else _LINE_EVERY_SECS):
            return
        if "loss" in info.metrics:
            self._text = f"loss {shown_loss(info.metrics):.4f}"
        pace = (step - self._shown_step) / secs
        text = f"{pace:,.1f} steps/s, {pace * self._examples:,.0f} member-examples/s, {self._text}"
        self._shown_step, self._shown_at = step, time.monotonic()
        if self._shows_bar:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(f"step {step:,}/{self._last_step:,}: {text}")

    def evaluated(self, step: int, scores: Scores) -> None:
        """Restarts the measurement of the pace, which leaves out the time of the evaluation."""
        self._shown_step, self._shown_at = step, time.monotonic()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
