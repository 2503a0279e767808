"""The first signal to a process, and whether a later one is a second signal or a copy of it.

A service manager and a terminal may signal a launcher and its processes at once, and the launcher
passes the signal on. Such a process receives the signal twice, within some milliseconds. systemd
sends SIGHUP right after SIGTERM if its unit says so.
"""

import time

# A signal within this time of the first one is a copy. Two deliveries of one signal are closer, and
# a person who wants the end at once can send another signal after it.
COPY_SECS = 1.0


class FirstSignal:
    """The time of the first signal to a process."""

    def __init__(self) -> None:
        self._secs: float | None = None

    def is_second(self) -> bool:
        """Returns whether a signal that comes now is a second signal, and not the first or a copy.

        Call it at each signal. Several threads may call it for the same signal.
        """
        now = time.monotonic()
        if self._secs is None:
            self._secs = now
        return now - self._secs >= COPY_SECS
