"""The processes of a run, which watch each other while they work.

JAX ends the processes of a run when one of them is lost, by SIGABRT and a trace of C++ that names
no host. Each process therefore tells the others, through the coordination service of JAX in process
0, that it is alive, how far it is, and why it fails. All of them report the first failure.
"""

import contextlib
import dataclasses
import itertools
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar, NamedTuple

from dist_ens.ground.errors import ExitCode, RunError, UserError, first_line
from dist_ens.processes import progress

_BEATS, _FAILURES = "dist_ens/beats", "dist_ens/failures"
_LONGEST_BEAT_SECS = 1.0
_ENDED = "ended"  # The last beat of a process that has done its work.
# Time for process 0 to store a failure, and for the others to read it after their time-out.
_STORE_SECS, _READ_SECS = 2.0, 4.0
# Packages whose versions must be equal in all processes.
_COMPARED = ("dist-ens", "jax", "jaxlib", "numpy", "orbax-checkpoint")
# Parts of the messages of a collective operation that another process did not take part in.
_OF_COLLECTIVES = ("Gloo", "NCCL", "ncclRemoteError", "coordination", "Connection closed by peer")


@dataclasses.dataclass(frozen=True)
class Card:
    """The description of a process, which it sends to the others."""

    process_id: int
    host: str
    pid: int
    facts: Mapping[str, str]  # What is equal in all processes, such as versions.

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that all processes of a run share."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class Failure(NamedTuple):
    """The failure that ends a run, with the exit code of all processes."""

    process_id: int
    code: int
    message: str


Leave = Callable[[int, str], object]  # Prints a message, and ends this process with a code.


class Peers:
    """The other processes of a run, of which one is lost if it is silent for `timeout_secs`."""

    # The peers of this process; None if it is alone.
    current: ClassVar["Peers | None"] = None

    def __init__(
        self, client: Any, cards: Sequence[Card], process_id: int, timeout_secs: float, leave: Leave
    ) -> None:
        self._client, self._cards, self._process_id = client, tuple(cards), process_id
        self._timeout_secs, self._leave = timeout_secs, leave
        self._beat_secs = min(_LONGEST_BEAT_SECS, timeout_secs / 5)
        self._holdings: Sequence[str] = ()
        self._has_ended = self._has_failed = False
        self._stopped = threading.Event()
        self._answered = time.monotonic()  # When process 0 answered last.
        self._heard: dict[int, tuple[str, float]] = {}

    def begin(self) -> None:
        """Starts to tell the others that this process is alive, and to watch them."""
        Peers.current = self
        self._talking = threading.Thread(target=self._talk, name="peers", daemon=True)
        self._talking.start()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def hold(self, holdings: Sequence[str]) -> None:
        """Stores what each process holds, such as "members 0 to 3, data column 0"."""
        self._holdings = holdings

    def describe(self, process_id: int) -> str:
        """Returns a process with its host and what it holds."""
        card = str(self._cards[process_id])
        return f"{card[:-1]}, {self._holdings[process_id]})" if self._holdings else card

    def agree(self, values: Mapping[str, object], timeout_secs: float) -> None:
        """Raises a `UserError` if a process has other values. All must call this, once."""
        number, count = self._process_id, len(self._cards)
        received = exchanged(self._client, "agreed", number, count, values, timeout_secs)
        first = next(received)
        for i, other in enumerate(received, start=1):
            check_equal(first, other, self.describe(0), self.describe(i))

    def fail(self, code: int, message: str) -> None:
        """Tells the others that this process fails. They end, too, with the same exit code."""
        self._has_failed = True
        failure = Failure(self._process_id, int(code), message)
        # Process 0 may be lost, and would never answer.
        storing = threading.Thread(target=self._record, args=(failure,), daemon=True)
        storing.start()
        storing.join(_STORE_SECS)

    def end(self) -> None:
        """Tells the others that this process has done its work. Failures still end it."""
        self._has_ended = True
        Peers.current = None
        with contextlib.suppress(Exception):  # Process 0 may have been lost.
            self._client.key_value_set(f"{_BEATS}/{self._process_id}", _ENDED, allow_overwrite=True)

    def stop(self) -> None:
        """Ends the thread that uses JAX's client, so that Python can take itself down."""
        self._stopped.set()
        self._talking.join(self._timeout_secs)

    def wait_for_cause(self) -> None:
        """Waits until this process is ended because of another, after an error that follows."""
        time.sleep(self._timeout_secs + _READ_SECS)

    def behind(self) -> str:
        """Returns the processes that have made the least progress, with what they hold."""
        beats = self._beats().items()
        counts = {i: int(beat.partition(" ")[0]) for i, beat in beats if beat != _ENDED}
        counts[self._process_id] = progress.count()  # Its beat may be older.
        slowest = min(counts.values())
        return " and ".join(self.describe(i) for i in sorted(counts) if counts[i] == slowest)

    def text_of_abort(self) -> str:
        """Returns the message for the case that JAX ends this process."""
        if self._process_id == 0:
            return "JAX has ended this process, because a process of the run was lost."
        return (
            f"The connection to {self.describe(0)} is lost: it has ended, or its host cannot be "
            "reached. Run the same command again to continue from the last checkpoint."
        )

    def _record(self, failure: Failure) -> None:
        with contextlib.suppress(Exception):  # Another process failed first, or process 0 is lost.
            self._client.key_value_set(f"{_FAILURES}/first", json.dumps(failure._asdict()))

    def _beats(self) -> dict[int, str]:
        found = self._client.key_value_dir_get(_BEATS)
        return {int(key.rpartition("/")[2]): beat for key, beat in found}

    def _talk(self) -> None:
        """Sends beats and looks for failures, until the process ends."""
        for number in itertools.count():
            if self._stopped.wait(self._beat_secs):
                return
            # Each beat differs from the one before.
            beat = _ENDED if self._has_ended else f"{progress.count()} {number}"
            with contextlib.suppress(Exception):  # Process 0 is lost; `_watch` notices it.
                self._client.key_value_set(
                    f"{_BEATS}/{self._process_id}", beat, allow_overwrite=True
                )
                if self._process_id == 0:
                    self._look_for_silence()
                for _, text in self._client.key_value_dir_get(_FAILURES):
                    self._follow(Failure(**json.loads(text)))
                self._answered = time.monotonic()

    def _look_for_silence(self) -> None:
        """Records as a failure that a process has not sent a beat for the time-out."""
        now, beats = time.monotonic(), self._beats()
        for i in range(1, len(self._cards)):
            beat = beats.get(i, "")
            before, since = self._heard.get(i, (None, now))
            self._heard[i] = (beat, now if beat != before else since)
            if beat != _ENDED and now - self._heard[i][1] > self._timeout_secs:
                message = (
                    f"{self._capital(i)} has been silent for {self._timeout_secs:g} s: it has "
                    "ended, or its host cannot be reached. Run the same command again to continue "
                    "from the last checkpoint."
                )
                self._record(Failure(i, ExitCode.HOST_LOST, message))

    def _follow(self, failure: Failure) -> None:
        """Ends this process because of the first failure of the run."""
        if self._has_failed:
            return
        who = self._capital(failure.process_id)
        if failure.code == ExitCode.HOST_LOST:
            message = f"error: {failure.message}"
        elif failure.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            message = f"{who} was stopped: {failure.message}"
        else:
            message = f"error: {who} has failed: {failure.message}"
        self._leave(failure.code, message)

    def _watch(self) -> None:
        while not self._has_ended:
            time.sleep(self._beat_secs)
            if time.monotonic() - self._answered > self._timeout_secs:
                self._leave(ExitCode.HOST_LOST, f"error: {self.text_of_abort()}")

    def _capital(self, process_id: int) -> str:
        described = self.describe(process_id)
        return described[0].upper() + described[1:]


def is_of_collective(error: BaseException) -> bool:
    """Returns whether an error says that another process did not take part in an operation."""
    return any(part in str(error) for part in _OF_COLLECTIVES)


def exchanged(
    client: Any, name: str, process_id: int, num_processes: int, value: object, timeout_secs: float
) -> Iterator[Any]:
    """Sends a value of JSON to all processes, and yields those of all in order. Use a name once."""
    client.key_value_set(f"dist_ens/{name}/{process_id}", json.dumps(value))
    for i in range(num_processes):
        try:
            text = client.blocking_key_value_get(f"dist_ens/{name}/{i}", int(timeout_secs * 1000))
        except Exception as error:  # JAX has no special error for it.
            raise RunError(
                f"Nothing came from process {i} within --start_timeout_secs={timeout_secs:g}: "
                f"{first_line(error)} Look at its output.",
                exit_code=ExitCode.HOST_LOST,
            ) from error
        yield json.loads(text)


def check_equal(
    first: Mapping[str, object], other: Mapping[str, object], of_first: str, of_other: str
) -> None:
    """Raises a `UserError` if two processes have different values of the same name."""
    for name in sorted({*first, *other}):
        if (here := first.get(name)) != (there := other.get(name)):
            raise UserError(
                f"The processes of a run differ in {name}: {here} in {of_first} and {there} in "
                f"{of_other}. Start the same command with the same versions and files on all hosts."
            )
