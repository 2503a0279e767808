"""A watchdog for a process that is alive but stuck, which no other process notices.

A thread looks at the progress. A call of C that holds the GIL stops this thread, too. So at each
look the thread starts two timers that need no GIL, and that end a little later than the thread
would act: one of `faulthandler`, which prints the stacks, and one of the kernel, which kills.
"""

import contextlib
import faulthandler
import threading
import time

from dist_ens import progress
from dist_ens.exit_codes import ExitCode
from dist_ens.peers import Peers
from launch import ends, hosts
from launch.kernel_timer import KillTimer

_LONGEST_LOOK_SECS = 1.0
LATER_SECS = 15.0  # Time for the thread to act and to tell the other processes.


def begin(stacks_after_secs: float, stuck_after_secs: float) -> None:
    """Starts to watch the progress of this process.

    Args:
        stacks_after_secs: Time without progress after which the stacks of all threads are printed,
            in seconds; 0 for never.
        stuck_after_secs: Time without progress after which the process ends, in seconds; 0 for
            never.
    """
    progress.made()  # The wait for the other processes has a time-out of its own.
    if stacks_after_secs or stuck_after_secs:
        arguments = (stacks_after_secs, stuck_after_secs)
        threading.Thread(target=_watch, args=arguments, name="watchdog", daemon=True).start()


def _watch(stacks_after_secs: float, stuck_after_secs: float) -> None:
    """Prints the stacks at the first time-out, and ends the process at the second."""
    limits = [limit for limit in (stacks_after_secs, stuck_after_secs) if limit]
    printed_at = -1  # Progress at which the stacks were printed last.
    timer = KillTimer()
    while True:
        age = progress.age_secs()
        if stacks_after_secs and progress.count() != printed_at:
            if age > stacks_after_secs:
                printed_at = progress.count()
                faulthandler.cancel_dump_traceback_later()
                ends.say(
                    f"No step for {age:.0f} s (--stacks_after_secs). The stacks of all threads:"
                )
                faulthandler.dump_traceback(file=2, all_threads=True)
            else:
                faulthandler.dump_traceback_later(stacks_after_secs - age + LATER_SECS, file=2)
        if stuck_after_secs:
            if age > stuck_after_secs:
                _leave(stuck_after_secs)
            timer.start(stuck_after_secs - age + LATER_SECS)
        time.sleep(min(_LONGEST_LOOK_SECS, *(limit / 10 for limit in limits)))


def _leave(stuck_after_secs: float) -> None:
    """Ends the process, and says which process of the run is behind."""
    peers, behind = Peers.current, ""
    with contextlib.suppress(Exception):  # Process 0 may be lost.
        if peers is not None:
            behind = f" The least progress was made by {peers.behind()}."
    hosts.leave(
        ExitCode.HOST_LOST,
        f"error: There was no step for --stuck_after_secs={stuck_after_secs:g}.{behind} Run the "
        "same command again to continue from the last checkpoint.",
    )
