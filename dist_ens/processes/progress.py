"""The progress of this process, by which a watchdog notices that it is stuck."""

import time

_count = 0
_since = time.monotonic()


def made() -> None:
    """Notes that the run has gone on, as by a step or a batch that was scored."""
    global _count, _since
    _count += 1
    _since = time.monotonic()


def count() -> int:
    """Returns how often progress was noted."""
    return _count


def age_secs() -> float:
    """Returns the seconds since progress was noted last, or since this module was imported."""
    return time.monotonic() - _since
