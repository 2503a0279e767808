"""`Lease`: the right to write to a folder in a bucket, which one process has at a time."""

import contextlib
import datetime
import errno
import json
import threading
import time
from collections.abc import Callable

from dist_ens.storage.place import ABSENT, Place

# A lease that has not been renewed for so long is taken over.
SECS = 30.0
_LOST = "another run has taken it over, which writes there now"
_RENEWALS = 4  # Number of renewals in that time.
_HELD: dict[str, "Lease"] = {}  # Leases of this process, by the addresses of their folders.


def require_held(address: str) -> None:
    """Raises an `OSError` if an address is in a folder whose lease this process has lost."""
    for folder, held in [*_HELD.items()]:
        if f"{address}/".startswith(f"{folder}/"):
            held.require()


class Lease:
    """A file that its owner writes anew every few seconds, so that others see that it lives.

    Nobody compares clocks of two machines. Whoever wants a lease looks at it for `SECS` seconds on
    a clock of its own, and takes it over if it stays the same. A process that was stopped so long
    renews it before it writes again.

    Attributes:
        is_lost: Whether another process has taken it over.
    """

    NAME = ".lease"

    def __init__(self, place: Place, owner: str, token: str) -> None:
        self._place, self._owner, self._token = place, owner, token
        self._tag, self._count = ABSENT, 0
        self._using, self._has_ended = threading.Lock(), threading.Event()
        self.is_lost, self._renewed = False, 0.0

    def acquire(self, say: Callable[[str], None]) -> str | None:
        """Takes the lease, and returns None; or returns the living owner, as a clause."""
        seen, since = None, 0.0
        while True:
            content, self._tag = self._place.read_tagged(self.NAME)
            if seen is None and self._tag != ABSENT:
                owner = _values_in(content).get("described", "another process")
                say(f"{self._place} is used by {owner}. Waiting {SECS:g} s to see whether it runs.")
                seen, since = self._tag, _now()
            if self._tag == ABSENT or (self._tag == seen and _now() - since > SECS):
                if self._write():
                    _HELD[self._place.address] = self
                    threading.Thread(target=self._renew_often, daemon=True).start()
                    return None
            elif self._tag != seen:
                return _values_in(content).get("described", "another process")
            time.sleep(SECS / 4 / _RENEWALS)

    def renew(self) -> None:
        """Writes the lease anew; an `OSError` says that another process has it."""
        with self._using:
            if self.is_lost or not self._write():
                self.is_lost = True
                raise OSError(errno.EBUSY, _LOST)

    def require(self) -> None:
        """Renews a lease that may be lost; an `OSError` says that another process has it."""
        if self.is_lost or _now() - self._renewed > SECS / 2:
            self.renew()

    def is_seen(self) -> bool:
        """Returns whether the token of the owner can be read."""
        with contextlib.suppress(OSError):
            return _values_in(self._place.read(self.NAME)).get("token") == self._token
        return False

    def check(self) -> None:
        """Raises an `OSError` on any host if another process has the lease."""
        content, _ = self._place.read_tagged(self.NAME)
        if _values_in(content).get("token") != self._token:
            raise OSError(errno.EBUSY, _LOST)

    def release(self) -> None:
        """Gives the lease back, unless another process has it."""
        self._has_ended.set()
        _HELD.pop(self._place.address, None)
        with self._using, contextlib.suppress(OSError):
            if not self.is_lost and self.is_seen():
                self._place.remove(self.NAME)

    def _write(self) -> bool:
        self._count += 1
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        owner = f"{self._owner}, renewed at {now}"
        values = {"described": owner, "token": self._token, "count": self._count}
        content, asked = json.dumps(values).encode(), _now()
        tag = self._place.write_if(self.NAME, content, self._tag)
        if tag is None:
            # An earlier write may have arrived although its answer did not.
            there, seen = self._place.read_tagged(self.NAME)
            # Nobody takes one over so soon, so somebody deleted it.
            is_deleted = seen == ABSENT and asked - self._renewed < SECS
            if is_deleted or _values_in(there).get("token") == self._token:
                tag = self._place.write_if(self.NAME, content, seen)
        if tag is not None:
            self._tag, self._renewed = tag, asked
        return tag is not None

    def _renew_often(self) -> None:
        while not self._has_ended.wait(SECS / _RENEWALS):
            with contextlib.suppress(OSError):  # The next save tells of it.
                self.renew()


def _now() -> float:
    """Returns the seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _values_in(content: bytes) -> dict[str, str]:
    """Returns what a lease says: its owner, as a clause, and the token; empty if it is damaged."""
    try:
        return json.loads(content)
    except ValueError:
        return {}
