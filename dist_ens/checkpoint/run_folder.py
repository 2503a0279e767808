"""The folder of a run, which one run at a time may write to."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

from dist_ens.ground.causes import explained
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.processes import cluster
from dist_ens.storage import Place, lock_of

# Time for a file of process 0 to be seen by all hosts, in seconds.
_SHARED_SECS = 10.0


@contextlib.contextmanager
def locked(
    run: Place, say: Callable[[str], None]
) -> Iterator[tuple[Callable[[], None], Callable[[], bool]]]:
    """Locks the folder of a run for this one. Every host must enter and leave this context.

    Process 0 locks it for all hosts. The first yielded function raises an `OSError` if the folder
    is not that of this run any more. Every host calls it before it writes. The second returns
    whether this host knows that another run has it, and is called often.
    """
    try:
        run.make()
    except OSError as error:
        why = explained(error)
        told = f"{quoted(run)} cannot be the folder of a run: {why.what}. {why.remedy}."
        raise UserError(told) from error
    token = cluster.bytes_of_main(os.urandom(8)).hex()
    lock = lock_of(run, f"host {socket.gethostname()}, pid {os.getpid()}", token)
    run.require_writable([lock.NAME])
    owner = lock.acquire(say) if cluster.is_main() else None
    if cluster.as_main_sees(owner is not None):
        raise UserError(
            f"Another run is training in {quoted(run)} ({owner or 'another process'}). Wait for "
            "it, stop it, or choose another folder."
        )
    try:
        # On a full disk process 0 may not see it either, which a save will say.
        if cluster.as_main_sees(lock.is_seen()):
            _require_shared(run, lock.is_seen)
            renew = lock.renew if cluster.is_main() else lock.check
            yield renew, lambda: lock.is_lost
        else:
            yield lambda: None, lambda: False
    finally:
        lock.release()


def _require_shared(run: Place, is_seen: Callable[[], bool]) -> None:
    """Raises a `UserError` on all hosts if one does not see what process 0 wrote."""
    # A shared disk may show a change only after some seconds.
    deadline = time.monotonic() + _SHARED_SECS
    while not (is_shared := is_seen()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if blind := cluster.hosts_with(not is_shared):
        raise UserError(
            f"{quoted(run)} is not shared: what process 0 wrote there is not seen by process "
            f"{blind[0]}. Choose a folder on a disk that all hosts share, or give a bucket."
        )
