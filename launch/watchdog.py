"""A watchdog for a process that is alive but stuck, which no other process notices."""

import contextlib
import faulthandler
import threading
import time

from dist_ens import progress
from dist_ens.exit_codes import ExitCode
from dist_ens.peers import Peers
from launch import ends, hosts

_LONGEST_LOOK_SECS = 1.0


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
    while True:
        time.sleep(min(_LONGEST_LOOK_SECS, *(limit / 10 for limit in limits)))
        age = progress.age_secs()
        if stacks_after_secs and age > stacks_after_secs and progress.count() != printed_at:
            printed_at = progress.count()
            ends.say(f"No step for {age:.0f} s (--stacks_after_secs). The stacks of all threads:")
            faulthandler.dump_traceback(file=2, all_threads=True)
        if stuck_after_secs and age > stuck_after_secs:
            _leave(stuck_after_secs)


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
