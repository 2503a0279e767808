"""The end of a command that runs on several hosts, with a message that names the host at fault."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import jax

from dist_ens.ground.errors import ExitCode, first_line
from dist_ens.processes import cluster
from dist_ens.processes.peers import Card, Peers, is_of_collective
from launch import stdio

# Time for the other processes to read from process 0 why the run ends.
_GRACE_SECS = 3.0

_peers: Peers | None = None
_is_leaving = threading.Lock()
_leaving: tuple[int, int] | None = None  # The thread that ends this process, and its exit code.


def begin(cards: Sequence[Card], heartbeat_timeout_secs: float) -> None:
    """Starts to watch the other processes of the run, given the card of each."""
    global _peers
    if len(cards) < 2:
        return
    number = jax.process_index()
    _peers = Peers(cluster.client(), cards, number, heartbeat_timeout_secs, leave)
    _peers.begin()


def catch_abort() -> None:
    """Makes a message of the abort by which JAX ends the processes of a run.

    Call it after absl has installed its own handler, which prints the stacks of all threads.
    """
    if _peers is not None:
        cluster.end_at_abort(_peers.text_of_abort)


def end(code: int) -> NoReturn:
    """Ends this process, which has done its work, when the others have done theirs, too."""
    if _peers is not None:
        _peers.end()
        atexit._run_exitfuncs()  # JAX waits for the other processes here.
        _peers.stop()
    sys.exit(code)


def are_several() -> bool:
    """Returns whether this process is one of several that watch each other."""
    return _peers is not None


def leave(code: int, message: str) -> NoReturn:
    """Prints a message, tells the other processes, and ends this one at once.

    Only the first call in a process has an effect. So its first error is reported, not a later one.
    """
    global _leaving
    if _leaving is not None and _leaving[0] == threading.get_ident():
        os._exit(_leaving[1])  # A signal came while this thread was leaving.
    _is_leaving.acquire()  # Never released: another thread waits here until the process ends.
    _leaving = threading.get_ident(), code
    try:
        stdio.say(message)
        if _peers is not None:
            _peers.fail(code, message.removeprefix("error: "))
        sys.stdout.flush()
        if _peers is not None and cluster.is_main():
            time.sleep(_GRACE_SECS)  # The end of process 0 ends the service that the others ask.
    finally:
        os._exit(code)


def wait_if_of_another(error: Exception) -> None:
    """Waits for the end of this process, if its error says that another process was lost.

    The error of a collective operation comes long before the processes know which of them was lost.
    """
    if _peers is not None and is_of_collective(error):
        _peers.wait_for_cause()
        leave(
            ExitCode.HOST_LOST,
            f"error: An operation of all processes failed, and no process is known to be lost: "
            f"{first_line(error)} Run the same command again to continue from the last checkpoint.",
        )
