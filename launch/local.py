"""Starts several processes on this machine: dist-ens local --processes=2 -- train --config=FILE …

The processes are those of one run, as on several hosts. If one of them is preempted (exit code 42)
or killed, all are started again and resume from the newest checkpoint.

With --rows=2 the processes are divided into two rows that train a part of the members each and do
not wait for each other. Only the row of a process that is lost is started again. When all rows are
done, one process with all devices puts the members into one run and scores the ensemble.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from absl import flags

from dist_ens.ground.commands import command_line
from dist_ens.ground.errors import RESTARTED, ExitCode, UserError, code_of_shell, counted
from dist_ens.processes.cluster_environment import visible_gpus
from launch import cli, signals, stdio
from launch.started_command import StartedCommand

_PROCESSES = flags.DEFINE_integer("processes", 2, "Number of processes.", lower_bound=1)
_DEVICES_PER_PROCESS = flags.DEFINE_integer(
    "devices_per_process", None, "Default: a share of the GPUs, or one CPU device.", lower_bound=1
)
_ROWS = flags.DEFINE_integer(
    "rows", None, "Number of rows that do not wait for each other.", lower_bound=1
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    10,
    "Number of times that the processes, or those of a row, are started again.",
    lower_bound=0,
)
_GRACE_SECS = flags.DEFINE_float(
    "grace_secs", 30.0, "Seconds between a signal and the kill of a process.", lower_bound=0.0
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the commands only.")
_COMMAND = StartedCommand()
_FOLLOW_SECS = 5.0  # Time for the other processes to end by themselves after one has failed.
_LOOK_SECS = 0.05
_LAST_SECS = 2.0  # Time for the children of a process to end, and for its output to be printed.
_LAST_LINES = 20  # Number of lines of output in which the report of a failure finds its error.
_NUM_CPU_DEVICES = "--xla_force_host_platform_device_count"
_COLORS = (36, 33, 35, 32, 34, 31)  # Codes of a terminal for the output of each process.


class _Process:
    """A process of the run."""

    def __init__(self, number: int, command: list[str], variables: Mapping[str, str]) -> None:
        self.number = number
        self.code: int | None = None
        # A session of its own: Ctrl-C reaches this launcher alone, which passes it on.
        self._popen = subprocess.Popen(
            command,
            env={**os.environ, **variables, signals.LAUNCHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._relay = threading.Thread(target=self._print_output, daemon=True)
        self._relay.start()

    def send(self, number: int) -> None:
        """Sends a signal to the process, if it runs."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def has_just_ended(self) -> bool:
        """Returns whether the process has ended since the last call, and notes its exit code."""
        if self.code is not None or self._popen.poll() is None:
            return False
        self.code = code_of_shell(self._popen.returncode)
        return True

    def secs_for_others(self) -> float:
        """Returns the time for the other processes to end after this one has failed, in seconds."""
        if self._popen.returncode < 0:  # Killed. It told the others nothing, so they would go on.
            return 0.0
        is_saving = self.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        return _GRACE_SECS.value if is_saving else _FOLLOW_SECS

    def report(self) -> str:
        """Returns the report of the failure of this process."""
        code = self._popen.returncode
        why = f" ({signal.Signals(-code).name})" if code < 0 else ""
        errors = [line for line in self._last_lines if line.startswith("error: ")]
        what = f" It said: {errors[-1].removeprefix('error: ')}" if errors else ""
        return f"Process {self.number} ended first, with exit code {self.code}{why}.{what}"

    def end_children(self) -> None:
        """Ends the children of the process, such as those that read data, by SIGTERM and SIGKILL.

        A helper process of Python ignores SIGTERM, and removes their shared memory at their end.
        """
        self._popen.wait()
        until = time.monotonic() + _LAST_SECS
        with contextlib.suppress(ProcessLookupError):  # The group is empty.
            os.killpg(self._popen.pid, signal.SIGTERM)
            while time.monotonic() < until:
                time.sleep(_LOOK_SECS)
                os.killpg(self._popen.pid, 0)
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._relay.join(_LAST_SECS)

    def _print_output(self) -> None:
        """Prints each line behind the number of the process, in its color on a terminal."""
        prefix = f"[{self.number}] "
        if sys.stdout.isatty():
            prefix = f"\x1b[{_COLORS[self.number % len(_COLORS)]}m{prefix}\x1b[0m"
        for line in self._popen.stdout or ():
            text = line.decode(errors="replace").rstrip("\n")
            if text.strip():
                self._last_lines.append(text)
            print(f"{prefix}{text}", flush=True)


def _attempt(received: Sequence[int], row: int | None) -> _Process | None:
    """Runs the processes until all have ended, and returns the one that failed first."""
    with signals.blocked():  # A process receives them as soon as it can act on them.
        processes = [_Process(*planned) for planned in _planned(row)]
    try:
        first = _first_failure(processes, received)
    finally:
        for process in processes:
            process.send(signal.SIGKILL)
        for process in processes:
            process.end_children()
    killed = [process for process in processes if process.has_just_ended() and process.code]
    return first or next(iter(killed), None)


def _first_failure(processes: Sequence[_Process], received: Sequence[int]) -> _Process | None:
    """Waits until all processes have ended or must be killed, and returns the first that failed."""
    first, passed, kill_at = None, 0, float("inf")
    while any(process.code is None for process in processes) and time.monotonic() <= kill_at:
        for number in received[passed:]:
            for process in processes:
                process.send(number)
            kill_at = min(kill_at, time.monotonic() + _GRACE_SECS.value)
            passed += 1
        for process in processes:
            if process.has_just_ended() and process.code and first is None:
                first = process
                kill_at = min(kill_at, time.monotonic() + process.secs_for_others())
        time.sleep(_LOOK_SECS)
    return first


def main() -> int:
    """Starts the processes, and starts them again while that helps; returns the exit code."""
    rows = range(_ROWS.value or 0)
    if rows and _COMMAND.arguments[0] != "train":
        raise UserError(f"--rows is for train, not for {_COMMAND.arguments[0]}. Leave it out.")
    if rows and _PROCESSES.value % len(rows):
        raise UserError(
            f"--processes={_PROCESSES.value} is no multiple of --rows={len(rows)}. Use a multiple."
        )
    if _DRY_RUN.value:
        for _, command, variables in itertools.chain(*map(_planned, (*rows, None))):
            settings = [f"{name}={value}" for name, value in variables.items()]
            print(command_line("env", *settings, *command))
        return ExitCode.DONE
    received: list[int] = []
    signals.take_over(lambda number, frame: received.append(number))
    with concurrent.futures.ThreadPoolExecutor(len(rows) or 1) as threads:
        codes = [*threads.map(lambda row: _until_done(received, row), rows)]
    failed = next((code for code in codes if code != ExitCode.DONE), None)
    return _until_done(received, None) if failed is None else failed


def _until_done(received: Sequence[int], row: int | None) -> int:
    """Runs the processes of a row, or all, again while that helps, and returns the exit code."""
    restarts = 0
    while first := _attempt(received, row):
        stdio.say(first.report())
        code = first.code or 0
        if code not in RESTARTED or received:
            return code
        if restarts == _MAX_RESTARTS.value:
            stdio.say(
                f"error: The processes were started again {counted(restarts, 'time')}, which is "
                f"--max_restarts={restarts}. Run the same command again to continue from the last "
                "checkpoint."
            )
            return code
        restarts += 1
        of_row = "" if row is None else f" of row {row}"
        stdio.say(f"Restart {restarts}{of_row} of at most {_MAX_RESTARTS.value}.")
    return ExitCode.DONE


def device_variables(
    environ: Mapping[str, str], num_gpus: int, num_processes: int, devices_per_process: int | None
) -> list[dict[str, str]]:
    """Returns the environment variables that give each process its devices.

    GPUs are dealt out in their order. Without GPUs, a process has simulated devices of the CPU.
    """
    if num_gpus:
        given = environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(i) for i in range(num_gpus)] if given is None else given.split(",")[:num_gpus]
        each = devices_per_process or max(num_gpus // num_processes, 1)
        if each * num_processes > num_gpus:
            raise UserError(
                f"{counted(num_processes, 'process')} with {counted(each, 'GPU')} each need "
                f"{each * num_processes} GPUs, and this machine shows {num_gpus}."
            )
        starts = range(0, each * num_processes, each)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i : i + each])} for i in starts]
    variables = {"JAX_NUM_CPU_DEVICES": str(devices_per_process or 1)}
    if xla_flags := environ.get("XLA_FLAGS", "").split():  # JAX refuses two numbers of devices.
        kept = [flag for flag in xla_flags if not flag.startswith(_NUM_CPU_DEVICES)]
        variables["XLA_FLAGS"] = " ".join(kept)
    return [variables] * num_processes


def _planned(row: int | None) -> list[tuple[int, list[str], dict[str, str]]]:
    """Returns number, command and environment variables of the processes of a row, or of all."""
    verb, *rest = _COMMAND.arguments
    command = [sys.executable, "-P", "-m", f"launch.{verb}", *rest]
    count, first, num_gpus = _PROCESSES.value, 0, visible_gpus(os.environ)
    devices = _DEVICES_PER_PROCESS.value or max(num_gpus // count, 1)
    if _ROWS.value is not None:
        command.append(f"--rows={_ROWS.value}")
    if _ROWS.value is not None and row is None:  # One process with all devices joins the rows.
        devices, count = devices * count, 1
    variables = device_variables(os.environ, num_gpus, count, devices)
    if _ROWS.value is not None and row is not None:
        command.append(f"--row={row}")
        count //= _ROWS.value
        first = row * count
        variables = variables[first : first + count]
    if count == 1:
        return [(first, command, variables[0])]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command += [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={count}"]
    return [(first + i, [*command, f"--process_id={i}"], each) for i, each in enumerate(variables)]


run = cli.command(main, _COMMAND.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
