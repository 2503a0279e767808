"""The metrics of a running loop, read one call later so that no device waits for the host."""

import threading
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from dist_ens.layout import to_host


class MetricsReader:
    """A reader of the metrics of each call after the next call has been dispatched.

    A thread that saves may read them earlier, so that the records of a checkpoint's steps are
    written before the checkpoint. The first call, which compiles, is read at once.

    Attributes:
        step: Number of steps taken up to the last row that was read.
        losses: Loss of each member at this step, float[members].
    """

    def __init__(
        self,
        num_members: int,
        first_step: int,
        on_read: Callable[[int, Mapping[str, np.ndarray]], None],
    ) -> None:
        self._first_step, self._on_read = first_step, on_read
        self._reading = threading.Lock()
        self._pending: tuple[int, int, Mapping[str, jax.Array]] | None = None
        self._unseen: list[dict[str, np.ndarray]] = []
        self.step, self.losses = first_step, np.zeros(num_members)
        self._started = time.monotonic()
        self._paused_secs = 0.0
        self._training_secs = 0.0  # Seconds of training until the last call that was read.
        # Seconds and steps of the first call, which compiles.
        self._first_call: tuple[float, int] | None = None
        self._ended: float | None = None

    def dispatched(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Stores the metrics of a call, float32[steps, members], and reads those before it."""
        self.catch_up()
        self._pending = (previous_step, step, metrics)
        # With waves, a call has ended when it returns, so the time of a first call that compiles
        # must be taken before the next call.
        if self._first_call is None:
            self.catch_up()

    def catch_up(self, last_step: float = float("inf")) -> None:
        """Reads the metrics of the last call, unless it ends after `last_step`. Any thread may."""
        with self._reading:
            if self._pending is not None and self._pending[1] <= last_step:
                pending, self._pending = self._pending, None
                self._read(*pending)

    def unseen(self) -> dict[str, np.ndarray]:
        """Returns the metrics read since this method was last called, float32[steps, members]."""
        with self._reading:
            parts, self._unseen = self._unseen, []
        if len(parts) <= 1:
            return parts[0] if parts else {}
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def paused(self, secs: float) -> None:
        """Excludes some seconds from the pace, such as those of an evaluation."""
        self._paused_secs += secs

    def end(self) -> None:
        """Stops the clock of `seconds`, once."""
        self._ended = self._ended or time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end, with all that a run does."""
        return (self._ended or time.monotonic()) - self._started

    def steps_per_second(self) -> float:
        """Returns the pace without evaluations, and without the first call if there are more."""
        seconds, steps = self._training_secs, self.step - self._first_step
        if self._first_call is not None and self._first_call[1] < steps:
            seconds, steps = seconds - self._first_call[0], steps - self._first_call[1]
        return steps / seconds if steps else 0.0

    def _read(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        jax.block_until_ready(metrics)
        self._training_secs = self.seconds - self._paused_secs
        if self._first_call is None:
            self._first_call = (self._training_secs, step - previous_step)
        with jax.transfer_guard("allow"):
            values: dict[str, np.ndarray] = to_host(metrics)
        self.step = step
        if "loss" in values:  # A user's own step need not have one.
            self.losses = values["loss"][-1]
        self._unseen.append(values)
        self._on_read(step, values)
