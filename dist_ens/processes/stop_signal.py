"""Signals that stop a run at the same call of the update on every host.

JAX is imported when a run begins. A command hears signals before that, by this module, too.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar

# A signal within this time of the first one is a copy of it. A service manager and a terminal may
# signal a launcher and its processes at once, and the launcher passes the signal on.
COPY_SECS = 1.0
_ANSWER = (
    f"Stopping after the current step; a second signal, at least {COPY_SECS:g} s later, ends at "
    "once.\n"
)


class EvaluationStoppedError(Exception):
    """A signal stopped an evaluation, between the same two batches on every host."""


class FirstSignal:
    """The time of the first signal to a process."""

    def __init__(self) -> None:
        self._secs: float | None = None

    def is_second(self) -> bool:
        """Returns whether a signal that comes now is a second one. Call it at each signal."""
        now = time.monotonic()
        if self._secs is None:
            self._secs = now
        return now - self._secs >= COPY_SECS


class StopSignal:
    """A context that turns a signal into a stop at the same call boundary on every host.

    On a single host, signals are caught after `listen` is called. On several hosts they are caught
    from the beginning of the context. A second signal ends the process at once. Only the main
    thread can catch signals, so in another thread the stop is never set. The loop of a run sets
    `has_progress`, whether the end of the process would lose steps.
    """

    # Signals that are caught. A command adds those that preempt it.
    numbers: ClassVar[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM)
    # Context that catches the signals of this process now; None without one.
    current: ClassVar["StopSignal | None"] = None
    # Whether a context of this process has caught a signal.
    has_caught: ClassVar[bool] = False

    def __enter__(self) -> "StopSignal":
        import jax

        self._are_several = jax.process_count() > 1
        self.signal: int | None = None
        self.has_progress = self._stops_evaluations = self._is_reached = False
        self._calls = 0
        self._first, self._is_caught = FirstSignal(), False
        self._previous: dict[int, object] = {}
        if self._are_several:
            self.listen()
        return self

    def listen(self) -> None:
        """Starts to catch signals."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        if self._are_several:
            keep_notifier()
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self._on_signal)
        StopSignal.current = self

    def __exit__(self, *_: object) -> None:
        StopSignal.current = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stores the first signal to this host, and ends the process at the second."""
        if self._first.is_second():
            raise KeyboardInterrupt
        if self._is_caught:
            return
        # Another host may have been stopped before this one. Its signal is not counted here.
        self._is_caught, self.signal = True, number
        StopSignal.has_caught = True
        notify_hosts()
        with contextlib.suppress(OSError):  # The terminal may be closed.
            os.write(2, _ANSWER.encode())

    def is_set(self) -> bool:
        """Returns whether to stop now, the same on every host. All hosts must ask equally often."""
        if not self._are_several:
            return self.signal is not None
        from jax.experimental import multihost_utils

        self._calls += 1
        # JAX says so at one call only.
        if multihost_utils.reached_preemption_sync_point(self._calls):
            self.signal = self.signal or signal.SIGTERM
            self._is_reached = True
        return self._is_reached

    @contextlib.contextmanager
    def stopping_evaluations(self) -> Iterator[None]:
        """Lets a signal stop an evaluation in the body, by an `EvaluationStoppedError`."""
        self._stops_evaluations = True
        try:
            yield
        finally:
            self._stops_evaluations = False

    def stop_evaluation(self) -> None:
        """Raises an `EvaluationStoppedError` if a signal stops the evaluation of a run here."""
        if self._stops_evaluations and self.is_set():
            raise EvaluationStoppedError


# C function by which JAX hears of SIGTERM and makes all hosts agree on a step.
_notifier: int | None = None


def keep_notifier() -> None:
    """Keeps the handler of SIGTERM that JAX has installed, before Python installs its own.

    Of two handlers the one that was installed last receives the signal. JAX installs its handler
    when `jax.distributed` starts, and would hear of no SIGTERM any more.
    """
    global _notifier
    installed = _installed_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    of_python = _installed_handler(signal.SIGTERM)
    if installed not in (of_python, int(signal.SIG_DFL), int(signal.SIG_IGN)):
        _notifier = installed


def notify_hosts() -> None:
    """Tells the other hosts of a run that this host has to stop."""
    if _notifier is not None:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(_notifier)(signal.SIGTERM)


def _installed_handler(number: int) -> int:
    """Returns the address of the C function that receives a signal."""
    action = (ctypes.c_void_p * 32)()  # `struct sigaction` begins with the handler.
    ctypes.CDLL(None).sigaction(int(number), None, action)
    return action[0] or 0
