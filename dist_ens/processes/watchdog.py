"""A watchdog for a process that is alive but stuck, which no other process notices.

A thread looks at the progress. A call of C that holds the GIL stops this thread, too. So at each
look the thread starts two timers that need no GIL, and that end a little later than the thread
would act: one of `faulthandler`, which prints the stacks, and one of the kernel, which kills.
"""

import contextlib
import ctypes
import faulthandler
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

from dist_ens.ground.errors import ExitCode
from dist_ens.processes import progress
from dist_ens.processes.peers import Leave, Peers

_LONGEST_LOOK_SECS = 1.0
LATER_SECS = 15.0  # Time for the thread to act and to reach the other processes.


def begin(stacks_after_secs: float, stuck_after_secs: float, leave: Leave) -> None:
    """Starts to watch the progress of this process.

    Without progress, the stacks of all threads are printed, and later the process ends, by `leave`.
    A time of 0 is never.
    """
    progress.made()  # The wait for the other processes has a time-out of its own.
    limits = [limit for limit in (stacks_after_secs, stuck_after_secs) if limit]
    kill_after = _kernel_timer()

    def watch() -> None:
        printed_at = -1  # Progress at which the stacks were printed last.
        while True:
            age = progress.age_secs()
            if stacks_after_secs and progress.count() != printed_at:
                if age > stacks_after_secs:
                    printed_at = progress.count()
                    faulthandler.cancel_dump_traceback_later()
                    message = f"No step for {age:.0f} s (--stacks_after_secs). All stacks:"
                    print(message, file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(file=2, all_threads=True)
                else:
                    faulthandler.dump_traceback_later(stacks_after_secs - age + LATER_SECS, file=2)
            if stuck_after_secs:
                if age > stuck_after_secs:
                    leave(
                        ExitCode.HOST_LOST,
                        f"error: There was no step for --stuck_after_secs={stuck_after_secs:g}."
                        f"{_behind()} Run the same command again to continue from the last "
                        "checkpoint.",
                    )
                kill_after(stuck_after_secs - age + LATER_SECS)
            time.sleep(min(_LONGEST_LOOK_SECS, *(limit / 10 for limit in limits)))

    if limits:
        threading.Thread(target=watch, name="watchdog", daemon=True).start()


def _behind() -> str:
    """Returns a sentence on the process of the run that is behind, if there are several."""
    peers = Peers.current
    with contextlib.suppress(Exception):  # Process 0 may be lost.
        if peers is not None:
            return f" The least progress was made by {peers.behind()}."
    return ""


def _kernel_timer() -> Callable[[float], None]:
    """Returns a function that makes Linux kill this process after some seconds, or later again."""
    if not sys.platform.startswith("linux"):
        return lambda secs: None
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    clock_monotonic, by_signal = 1, 0
    event = struct.pack("Pii48x", 0, signal.SIGKILL, by_signal)
    libc.timer_create(clock_monotonic, event, ctypes.byref(timer))

    def kill_after(secs: float) -> None:
        whole, part = divmod(secs, 1.0)
        once = struct.pack("4l", 0, 0, int(whole), int(part * 1e9))
        libc.timer_settime(timer, 0, once, None)

    return kill_after
