"""Progress of a run on the terminal, or in a notebook."""

import time

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table

from dist_ens.callbacks.json_lines import shown_loss
from dist_ens.callbacks.protocol import RunInfo, StepInfo
from dist_ens.evaluation import Scores
from dist_ens.ground.terminal import PlainConsole
from dist_ens.metrics.catalogue import formatted, headlines, label_of
from dist_ens.processes import cluster

_LINE_EVERY_SECS = 10.0
_BAR_WIDTH, _WIDEST = 10, 1000  # In columns of text.


class ProgressBar:
    """A line with the step, the share of the steps that are done, the loss and the time left.

    On a terminal and in a notebook the line is renewed in place, and what does not fit is left out
    from the right. Elsewhere a new line is printed every ten seconds. Each evaluation prints a line
    with its scores.

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
        self._live: Live | None = None

    def begin(self, run: RunInfo) -> None:
        """Starts the line."""
        if self._console is None:
            self._console = PlainConsole(quiet=not cluster.is_main())
        self._last_step = run.last_step
        self._state = "compiling"
        self._printed_at = time.monotonic()
        # Step and time at which the last call ended. The thread of `Live` reads them together.
        self._now = (run.first_step, self._printed_at)
        # Those of the first call, which compiles, so that the pace leaves it out.
        self._since: tuple[int, float] | None = None
        is_renewed = self._console.is_interactive or self._console.is_jupyter
        if is_renewed and not self._console.quiet:
            self._live = Live(self, console=self._console, transient=True)
            self._live.start()

    def __call__(self, info: StepInfo) -> None:
        """Notes how many steps are done, and the loss."""
        if self._console is None:
            return
        now = time.monotonic()
        self._now = (info.metrics_step, now)
        if "loss" in info.metrics:
            self._state = f"loss {shown_loss(info.metrics):#.4g}"
        if self._since is None:
            self._since = self._now
        if self._live is None and now - self._printed_at >= _LINE_EVERY_SECS:
            self._printed_at = now
            self._console.print("  ".join(self._parts()), soft_wrap=True)

    def evaluated(self, step: int, scores: Scores) -> None:
        """Prints a line with the scores of an evaluation."""
        if self._console is None:
            return
        values, whose = scores.ensemble, "the ensemble"
        if not values:
            values, whose = scores.mean_member, "the mean member"
        names = [metric.name for metric in headlines(values)] or list(values)
        found = ", ".join(f"{label_of(name)} {formatted(values, name)}" for name in names[:2])
        self._console.print(f"step {step:,}: {found} of {whose}", soft_wrap=True)

    def close(self) -> None:
        """Removes the line that is renewed in place."""
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the parts of the line that fit, with a bar if all of them do."""
        parts: list[RenderableType] = [*self._parts()]
        bar = Bar(self._last_step, self._now[0], width=_BAR_WIDTH)
        unbounded = options.update(width=_WIDEST)
        fewer = (parts[:count] for count in range(len(parts), 0, -1))
        for shown in ([parts[0], bar, *parts[1:]], *fewer):
            line = Table.grid(padding=(0, 2, 0, 0))
            line.add_row(*shown)
            if Measurement.get(console, unbounded, line).maximum <= options.max_width:
                yield line
                return

    def _parts(self) -> list[str]:
        """Returns the parts of the line, the most important one first."""
        total = f"{self._last_step:,}"
        (step, now), since = self._now, self._since
        share = step / max(self._last_step, 1)
        parts = [f"step {step:>{len(total)},}/{total}", f"{share:.0%}", self._state]
        if since is None or step <= since[0] or now <= since[1]:
            return parts
        pace = (step - since[0]) / (now - since[1])
        minutes, secs = divmod(round((self._last_step - step) / pace), 60)
        hours, minutes = divmod(minutes, 60)
        return [*parts, f"{hours:,}:{minutes:02}:{secs:02} left", f"{pace:,.1f} steps/s"]
