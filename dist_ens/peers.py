"""The processes of a run, which watch each other while they work.

JAX ends the processes of a run when one of them is lost, by SIGABRT and a trace of C++ that names
no host. Each process therefore tells the others, through the coordination service of JAX in process
0, that it is alive, how far it is, and why it fails. All of them report the first failure.
"""

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from dist_ens import progress
from dist_ens.errors import RunError, UserError, first_line
from dist_ens.exit_codes import ExitCode
from dist_ens.meeting import Card

_BEATS, _FAILURES, _AGREED = "dist_ens/beats", "dist_ens/failures", "dist_ens/agreed"
_LONGEST_BEAT_SECS = 1.0
_TELLING_SECS = 2.0
_ENDED = "ended"  # The last beat of a process that has done its work.
# Time for the others to be told after the time-out of the heartbeats.
_TOLD_SECS = 4.0
# Parts of the messages of a collective operation that another process did not take part in.
_OF_COLLECTIVES = ("Gloo", "NCCL", "ncclRemoteError", "coordination", "Connection closed by peer")


class CoordinationClient(Protocol):
    """The client of the coordination service of `jax.distributed`, as far as it is used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Stores a value for all processes. Without `allow_overwrite` only the first one counts."""

    def key_value_delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns all keys below a key, with their values."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Returns a value, for which it waits."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure that ends a run.

    Attributes:
        process_id: Number of the process that failed, or was lost.
        code: Exit code of all processes.
        message: Sentences that say what happened.
    """

    process_id: int
    code: int
    message: str


class Peers:
    """The other processes of a run.

    Args:
        client: Client of the coordination service of `jax.distributed`.
        cards: Card of each process, in the order of their numbers.
        process_id: Number of this process.
        heartbeat_timeout_secs: Time after which a silent process is lost, in seconds.
        leave: Function that prints a message and ends this process with an exit code.

    Attributes:
        current: The peers of this process; None if it is alone.
    """

    current: ClassVar["Peers | None"] = None

    def __init__(
        self,
        client: CoordinationClient,
        cards: Sequence[Card],
        process_id: int,
        *,
        heartbeat_timeout_secs: float,
        leave: Callable[[int, str], object],
    ) -> None:
        self._client, self._cards, self._process_id = client, tuple(cards), process_id
        self._timeout_secs, self._leave = heartbeat_timeout_secs, leave
        self._beat_secs = min(_LONGEST_BEAT_SECS, heartbeat_timeout_secs / 5)
        self._holdings: Sequence[str] = ()
        self._has_ended = self._has_failed = False
        self._answered = time.monotonic()  # When process 0 answered last.
        self._looked = time.monotonic()  # When process 0 looked for silent processes last.
        self._heard: dict[int, tuple[str, float]] = {}

    def begin(self) -> None:
        """Starts to tell the others that this process is alive, and to watch them."""
        Peers.current = self
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="peers", daemon=True).start()

    def hold(self, holdings: Sequence[str]) -> None:
        """Stores which part of the run each process holds, for messages.

        Args:
            holdings: One text per process, such as "members 0 to 3, data column 0".
        """
        self._holdings = holdings

    def describe(self, process_id: int) -> str:
        """Returns a process with its host and what it holds.

        Args:
            process_id: Number of the process.
        """
        card = self._cards[process_id]
        holds = f", {self._holdings[process_id]}" if self._holdings else ""
        return f"process {process_id} (host {card.host}, pid {card.pid}{holds})"

    def agree(self, values: Mapping[str, object], timeout_secs: float) -> None:
        """Checks that every process has the same values. Every process must call this, once.

        Args:
            values: Values of this process by their names, in types that JSON can hold.
            timeout_secs: Time to wait for the other processes, in seconds.

        Raises:
            UserError: If a process has another value than process 0.
            RunError: If a process does not call this in time.
        """
        self._client.key_value_set(f"{_AGREED}/{self._process_id}", json.dumps(values))
        first, *others = (
            json.loads(value_of(self._client, f"{_AGREED}/{i}", self.describe(i), timeout_secs))
            for i in range(len(self._cards))
        )
        for i, other in enumerate(others, start=1):
            for name in sorted({*first, *other}):
                here, there = first.get(name), other.get(name)
                if here != there:
                    raise UserError(
                        f"The processes of a run have different values of {name}: {here!r} in "
                        f"{self.describe(0)} and {there!r} in {self.describe(i)}. Start the same "
                        "command with the same files on all hosts."
                    )

    def fail(self, code: int, message: str) -> None:
        """Tells the others that this process fails. They end, too, with the same exit code.

        Args:
            code: Exit code of this process, not 0.
            message: Sentences that say what happened.
        """
        self._has_failed = True
        failure = Failure(self._process_id, int(code), message)
        # Process 0 may be lost, and would never answer.
        telling = threading.Thread(target=self._record, args=(failure,), daemon=True)
        telling.start()
        telling.join(_TELLING_SECS)

    def end(self) -> None:
        """Tells the others that this process has done its work. They no longer wait for it.

        It goes on to look for failures of the others, which it ends with, too.
        """
        self._has_ended = True
        Peers.current = None
        with contextlib.suppress(Exception):  # Process 0 may have been lost.
            self._client.key_value_set(self._key_of_beat, _ENDED, allow_overwrite=True)

    def wait_for_cause(self) -> None:
        """Waits until this process is ended because of another, for as long as that may take.

        Call it after an error of a collective operation, which is only a consequence.
        """
        time.sleep(self._timeout_secs + _TOLD_SECS)

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

    @property
    def _key_of_beat(self) -> str:
        return f"{_BEATS}/{self._process_id}"

    def _record(self, failure: Failure) -> None:
        """Stores a failure for all processes, unless another one came first."""
        with contextlib.suppress(Exception):  # Another process failed first, or process 0 is lost.
            self._client.key_value_set(f"{_FAILURES}/first", json.dumps(vars(failure)))

    def _beats(self) -> dict[int, str]:
        """Returns the last beat of each process that has sent one."""
        found = self._client.key_value_dir_get(_BEATS)
        return {int(key.rpartition("/")[2]): beat for key, beat in found}

    def _talk(self) -> None:
        """Sends beats and looks for failures, until the process ends."""
        for number in itertools.count():
            time.sleep(self._beat_secs)
            # Each beat differs from the one before.
            beat = _ENDED if self._has_ended else f"{progress.count()} {number}"
            with contextlib.suppress(Exception):  # Process 0 is lost; `_watch` notices it.
                self._client.key_value_set(self._key_of_beat, beat, allow_overwrite=True)
                if self._process_id == 0:
                    self._look_for_silence()
                for _, text in self._client.key_value_dir_get(_FAILURES):
                    self._follow(Failure(**json.loads(text)))
                self._answered = time.monotonic()

    def _look_for_silence(self) -> None:
        """Records as a failure that a process has not sent a beat for the time-out."""
        now = time.monotonic()
        if now - self._looked > self._timeout_secs / 2:  # This process itself was stopped.
            self._heard.clear()
        self._looked = now
        beats = self._beats()
        for i in range(1, len(self._cards)):
            beat = beats.get(i, "")
            if beat == _ENDED:
                self._heard.pop(i, None)
                continue
            before, since = self._heard.get(i, (None, now))
            self._heard[i] = (beat, now if beat != before else since)
        silent = [i for i, (_, since) in self._heard.items() if now - since > self._timeout_secs]
        for i in silent:
            message = (
                f"{self._capital(i)} has been silent for {self._timeout_secs:g} s: it has ended, "
                "or its host cannot be reached. Run the same command again to continue from the "
                "last checkpoint."
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
        """Ends this process if process 0 does not answer for the time-out."""
        woken = time.monotonic()
        while not self._has_ended:
            time.sleep(self._beat_secs)
            now = time.monotonic()
            if now - woken > self._timeout_secs / 2:  # This process itself was stopped.
                self._answered = now
            woken = now
            if now - self._answered > self._timeout_secs:
                self._leave(ExitCode.HOST_LOST, f"error: {self.text_of_abort()}")

    def _capital(self, process_id: int) -> str:
        described = self.describe(process_id)
        return described[0].upper() + described[1:]


def is_of_collective(error: BaseException) -> bool:
    """Returns whether an error says that another process did not take part in an operation.

    Args:
        error: Error of this process.
    """
    return any(part in str(error) for part in _OF_COLLECTIVES)


def value_of(client: CoordinationClient, name: str, sender: str, timeout_secs: float) -> str:
    """Returns a value that another process sends through the coordination service.

    Args:
        client: Client of the coordination service of `jax.distributed`.
        name: Name of the value.
        sender: The process that sends it, for the message.
        timeout_secs: Time to wait, in seconds.

    Raises:
        RunError: If the value does not come in time.
    """
    try:
        return client.blocking_key_value_get(name, int(timeout_secs * 1000))
    except Exception as error:  # JAX has no special error for it.
        raise RunError(
            f"Nothing came from {sender} within --start_timeout_secs={timeout_secs:g}: "
            f"{first_line(error)} Look at its output.",
            exit_code=ExitCode.HOST_LOST,
        ) from error
