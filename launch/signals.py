"""Signals to a command, which are heard even while the main thread compiles.

Python calls a handler in the main thread, between two instructions of Python. While the main thread
compiles, it executes none for minutes. So a thread of this module is woken by each signal, too. It
ends the process if no progress would be lost, and at a second signal. A signal that comes within a
second of the first one is a copy of it, and changes nothing.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from dist_ens.ground.errors import ExitCode
from dist_ens.processes.stop_signal import FirstSignal, StopSignal, notify_hosts

# A machine is taken away with one of these signals. The command is started again later.
_PREEMPTIONS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_CAUGHT = (signal.SIGINT, *_PREEMPTIONS)
# Time for the main thread to answer a signal. Ctrl-C gets more: `bench` keeps what it has timed.
_PATIENCE_SECS, _PATIENCE_AT_INTERRUPT_SECS = 0.5, 3.0

# Environment variable with the process id of the `dist-ens local` that started this process.
LAUNCHER = "DIST_ENS_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # Of prctl(2): the signal to this process when its parent dies.

_received: list[int] = []
_first = FirstSignal()
_is_answered = False  # Whether the main thread has acted on the first signal.


def begin() -> None:
    """Starts to listen to signals. Call it once, in the main thread, before JAX is imported.

    A signal that the process ignores, as after `nohup`, stays ignored.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    end_at_interrupt()
    _handle(caught_preemptions(), _preempt)
    # A child that is forked would write its signals into the same pipe.
    os.register_at_fork(after_in_child=_forget)
    # It runs last, as it is the first to be registered. A signal would change the exit code.
    atexit.register(lambda: _handle([signal.SIGINT, *caught_preemptions()], signal.SIG_IGN))
    threading.Thread(target=_listen, args=(reads,), name="signals", daemon=True).start()
    _end_with_launcher()


def take_over(handler: Callable[[int, FrameType | None], None]) -> None:
    """Calls a function at each signal, in place of what this module does."""
    signal.set_wakeup_fd(-1)
    _handle([signal.SIGINT, *caught_preemptions()], handler)


def leave_running(what: str) -> None:
    """Makes each signal end this process with a message about work that goes on without it.

    Started again, the command would do its work a second time. So its exit code is that of Ctrl-C,
    after which no launcher starts it again.
    """
    take_over(lambda number, frame: _leave(number, what, ExitCode.INTERRUPTED))


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks signals in its body, and in the processes that it starts until they call `begin`.

    Such a process would die of a signal that comes before it can act on one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def caught_preemptions() -> list[int]:
    """Returns the numbers of the signals that preempt this process."""
    return [number for number in _PREEMPTIONS if signal.getsignal(number) != signal.SIG_IGN]


def raise_at_interrupt() -> None:
    """Makes Ctrl-C raise a KeyboardInterrupt, which the command reports."""
    signal.signal(signal.SIGINT, _interrupt)


def end_at_interrupt() -> None:
    """Makes Ctrl-C end the process at once and silently, with the exit code of a stopped command.

    The default of the system would end it by the signal itself, which a launcher takes for a loss.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(exit_code()))


def exit_code(number: int | None = None) -> int:
    """Returns the exit code of a command that a signal ended."""
    numbers = _received if number is None else [number]
    is_preempted = any(number in _PREEMPTIONS for number in numbers)
    return ExitCode.PREEMPTED if is_preempted else ExitCode.INTERRUPTED


def _handle(numbers: list[int], handler: signal.Handlers | Callable[..., object]) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _end_with_launcher() -> None:
    """Makes the end of `dist-ens local`, if that started this process, preempt this process.

    A launcher that is killed cannot pass anything on, and its processes would go on without it.
    """
    launcher = os.environ.pop(LAUNCHER, "")  # It is not the launcher of commands started here.
    if launcher:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # It has died already.
        _end(signal.SIGTERM)


def _preempt(number: int, frame: FrameType | None) -> None:
    if _answers():
        _end(number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _answers():
        raise KeyboardInterrupt


def _answers() -> bool:
    """Returns whether the main thread acts on a signal, which it does not on a copy of the first.

    A copy would stop it while it tells the other hosts why this one ends.
    """
    global _is_answered
    is_caught = _is_answered or StopSignal.has_caught
    is_copy = not _first.is_second() and is_caught
    _is_answered = True
    return not is_copy


def _forget() -> None:
    """Makes a preemption end a child process, and hides the child's signals from this thread."""
    signal.set_wakeup_fd(-1)
    _handle(caught_preemptions(), signal.SIG_DFL)


def _listen(reads: int) -> NoReturn:
    """Acts on the first signal if no progress would be lost, and on the second at once."""
    while True:
        for number in os.read(reads, 1):
            if number in _CAUGHT:
                _received.append(number)
                if _first.is_second():
                    _leave(number, "The last checkpoint is kept.", exit_code(number))
                if len(_received) == 1:
                    threading.Thread(target=_end_if_idle, args=(number,), daemon=True).start()


def _end_if_idle(number: int) -> None:
    """Ends the process if its main thread does not answer a signal, and no progress is lost."""
    stopping = StopSignal.current
    if stopping is not None:
        notify_hosts()
    is_interrupt = number == signal.SIGINT
    time.sleep(_PATIENCE_AT_INTERRUPT_SECS if is_interrupt else _PATIENCE_SECS)
    run = StopSignal.current
    if stopping is not None and run is not stopping:
        return  # The run has stopped in order, and the command is about to end.
    if not _is_answered and (run is None or not run.has_progress):
        _end(number)


def _end(number: int) -> NoReturn:
    """Ends a command that has nothing to save, and says so on all hosts."""
    what = "Nothing is lost. Run the same command again."
    hosts = sys.modules.get("launch.hosts")  # It imports JAX, which takes a second.
    if hosts is not None and hosts.are_several():
        hosts.leave(exit_code(number), _sentence(number, what))
    _leave(number, what, exit_code(number))


def _leave(number: int, what: str, code: int) -> NoReturn:
    """Says why the command ends, and ends the process at once."""
    try:
        os.write(2, f"{_sentence(number, what)}\n".encode())
    finally:
        os._exit(code)


def _sentence(number: int, what: str) -> str:
    return f"Ended by {signal.Signals(number).name}. {what}"
