"""The cadence of a run: the calls of the update after which it is saved."""

import math

import jax

from dist_ens.processes import cluster


class Cadence:
    """A rule for when to save, by steps, by seconds, or both. All hosts make the same decision.

    On one host, every call of `is_due` reads the clock. Several hosts must read the clock of one of
    them. That takes a millisecond or more and waits for the devices, so they read it rarely. Each
    host predicts the step at which the interval will end, and all read the clock again at that
    step. It is at most as many steps away as the interval already has. A pace that was too fast at
    first therefore postpones a save by less than one interval.

    The first interval begins after the first call of the update, because that call compiles. A save
    by the step is due at the first call that reaches a multiple of `every_steps`.
    """

    def __init__(self, every_steps: int | None, every_secs: float | None, step: int) -> None:
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._step = step
        # First step of the current interval, and the clock at that step.
        self._interval: tuple[int, float] | None = None
        self._next_reading = 0

    def is_due(self, step: int) -> bool:
        """Returns whether to save now. Every host asks after every call, with the same step."""
        previous, self._step = self._step, step
        if step == previous:
            return False
        every = self._every_steps
        is_due = every is not None and step // every > previous // every
        if self._every_secs is not None:
            if self._interval is None or is_due:
                self._begin_interval(step, cluster.clock())
            elif jax.process_count() == 1 or step >= self._next_reading:
                is_due = self._has_ended(*self._interval, step, self._every_secs)
        return is_due

    def _begin_interval(self, step: int, now: float) -> None:
        self._interval = step, now
        self._next_reading = step + 1

    def _has_ended(self, first_step: int, began: float, step: int, every_secs: float) -> bool:
        """Returns whether the interval has ended; if not, predicts when to read the clock again."""
        now = cluster.clock()
        steps, secs = step - first_step, now - began
        if secs >= every_secs:
            self._begin_interval(step, now)
            return True
        steps_left = math.ceil((every_secs - secs) * steps / secs) if secs > 0 else steps
        self._next_reading = step + min(steps, steps_left)
        return False
