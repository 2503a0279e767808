"""Starts several processes on this machine: dist-ens local --processes=2 -- train --config=FILE …

The processes are those of one run, as on several hosts. If one of them is preempted (exit code 42)
or killed, all are started again and resume from the newest checkpoint.
"""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from absl import flags

from dist_ens.cluster_environment import visible_gpus
from dist_ens.errors import UserError, counted
from dist_ens.exit_codes import RESTARTED, ExitCode, code_of_shell
from launch import cli, ends, signals
from launch.started_command import StartedCommand, shell_line

_PROCESSES = flags.DEFINE_integer("processes", 2, "Number of processes.", lower_bound=1)
_DEVICES_PER_PROCESS = flags.DEFINE_integer(
    "devices_per_process",
    None,
    "Number of devices of each process. Default: its share of the GPUs, or one CPU device.",
    lower_bound=1,
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 10, "Number of times that the processes are started again.", lower_bound=0
)
_GRACE_SECS = flags.DEFINE_float(
    "grace_secs",
    30.0,
    "Time for the processes to end after a signal, in seconds. Then they are killed.",
    lower_bound=0.0,
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the commands only.")
_COMMAND = StartedCommand()
# Time for the other processes to end by themselves, and tell why, after one has failed.
_FOLLOW_SECS = 5.0
_LOOK_SECS = 0.05
_LAST_OUTPUT_SECS = 2.0  # Time for the last output of a process to be printed.
_LAST_LINES = 20  # Number of lines of output in which the report of a failure finds its error.
_NUM_CPU_DEVICES = "--xla_force_host_platform_device_count"
_COLORS = (36, 33, 35, 32, 34, 31)  # Codes of a terminal for the output of each process.


class _Process:
    """A process of the run.

    Args:
        number: Its number.
        popen: The process.

    Attributes:
        code: Its exit code, as a shell gives it; None while it runs.
        last_lines: Last lines of its output.
        relay: Thread that prints its output.
    """

    def __init__(self, number: int, popen: subprocess.Popen[bytes]) -> None:
        self.number, self.popen = number, popen
        self.code: int | None = None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.relay = threading.Thread(target=self._relay, daemon=True)

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def _relay(self) -> None:
        """Prints each line behind the number of the process, in its color on a terminal."""
        prefix = f"[{self.number}] "
        if sys.stdout.isatty():
            prefix = f"\x1b[{_COLORS[self.number % len(_COLORS)]}m{prefix}\x1b[0m"
        for line in self.popen.stdout or ():
            text = line.decode(errors="replace").rstrip("\n")
            if text.strip():
                self.last_lines.append(text)
            print(f"{prefix}{text}", flush=True)

    def kill(self) -> None:
        """Kills the process and its children, such as those that read data."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.relay.join(_LAST_OUTPUT_SECS)


class _Attempt:
    """The processes of one attempt, from their start to the end of all of them.

    Args:
        arguments: Verb and flags of the command.
        asked: Signals to this launcher, which it passes on. More may come.
    """

    def __init__(self, arguments: Sequence[str], asked: Sequence[int]) -> None:
        self._asked, self._passed = asked, 0
        self._kill_at = float("inf")
        self.first: _Process | None = None  # First process that failed.
        self.processes: list[_Process] = []
        with signals.blocked():  # A process receives them as soon as it can act on them.
            for number, (command, variables) in enumerate(_planned(arguments)):
                # A session of its own: Ctrl-C reaches this launcher alone, which passes it on.
                popen = subprocess.Popen(
                    command,
                    env=os.environ | variables | {signals.LAUNCHER: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.processes.append(_Process(number, popen))
        for process in self.processes:
            process.relay.start()

    def wait(self) -> int:
        """Waits until all processes have ended, and returns the exit code of the first failure."""
        try:
            while any(process.code is None for process in self.processes):
                self._pass_on()
                self._look()
                if time.monotonic() > self._kill_at:
                    break
                time.sleep(_LOOK_SECS)
        finally:
            for process in self.processes:
                process.kill()  # Also what a process has left behind.
            self._look()
        return ExitCode.DONE if self.first is None or self.first.code is None else self.first.code

    def _pass_on(self) -> None:
        """Passes signals on, and sets the time at which the processes are killed."""
        for number in self._asked[self._passed :]:
            for process in self.processes:
                process.send(number)
            self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_SECS.value)
            self._passed += 1

    def _look(self) -> None:
        """Notes which processes have ended. After a failure the others must end soon, too."""
        for process in self.processes:
            if process.code is not None or process.popen.poll() is None:
                continue
            process.code = code_of_shell(process.popen.returncode)
            if process.code and self.first is None:
                self.first = process
                limit = _follow_secs(process.popen.returncode)
                self._kill_at = min(self._kill_at, time.monotonic() + limit)


def main() -> int:
    """Starts the processes, and starts them again while that helps; returns the exit code."""
    if _DRY_RUN.value:
        for command, variables in _planned(_COMMAND.arguments):
            settings = [f"{name}={value}" for name, value in variables.items()]
            print(shell_line(["env", *settings, *command]))
        return ExitCode.DONE
    asked: list[int] = []
    signals.take_over(lambda number, frame: asked.append(number))
    restarts = 0
    while True:
        attempt = _Attempt(_COMMAND.arguments, asked)
        code = attempt.wait()
        if attempt.first is not None:
            ends.say(_report(attempt.first))
        if code not in RESTARTED or asked:
            return code
        if restarts == _MAX_RESTARTS.value:
            ends.say(
                f"error: The processes were started again {counted(restarts, 'time')}, which is "
                f"--max_restarts={restarts}. Run the same command again to continue from the last "
                "checkpoint."
            )
            return code
        restarts += 1
        ends.say(f"Restart {restarts} of at most {_MAX_RESTARTS.value}.")


def process_commands(arguments: Sequence[str], num_processes: int, port: int) -> list[list[str]]:
    """Returns the command of each process.

    Args:
        arguments: Verb and flags of the command.
        num_processes: Number of processes.
        port: Port of this machine at which they meet.
    """
    verb, *rest = arguments
    command = [sys.executable, "-P", "-m", f"launch.{verb}", *rest]
    if num_processes == 1:
        return [command]
    together = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={num_processes}"]
    return [
        [*command, *together, f"--process_id={process_id}"] for process_id in range(num_processes)
    ]


def device_variables(
    environ: Mapping[str, str],
    gpus: Sequence[str],
    num_processes: int,
    devices_per_process: int | None,
) -> list[dict[str, str]]:
    """Returns the environment variables that give each process its devices.

    GPUs are dealt out in their order. Without GPUs, a process has simulated devices of the CPU.

    Args:
        environ: Environment of this launcher.
        gpus: Ids of the GPUs that this launcher sees.
        num_processes: Number of processes.
        devices_per_process: Number of devices of each process. Default: as many GPUs as there are
            for each, or one CPU device.

    Raises:
        UserError: If there are fewer GPUs than the processes take.
    """
    if gpus:
        each = devices_per_process or max(len(gpus) // num_processes, 1)
        if each * num_processes > len(gpus):
            raise UserError(
                f"{counted(num_processes, 'process')} with {counted(each, 'GPU')} each need "
                f"{each * num_processes} GPUs, and this machine shows {len(gpus)}. Use fewer "
                "--processes or --devices_per_process, or set JAX_PLATFORMS=cpu."
            )
        dealt = [gpus[i * each : (i + 1) * each] for i in range(num_processes)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in dealt]
    variables = {"JAX_NUM_CPU_DEVICES": str(devices_per_process or 1)}
    xla_flags = environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in xla_flags if not flag.startswith(_NUM_CPU_DEVICES)]
    # JAX refuses two numbers of devices.
    return [variables | ({"XLA_FLAGS": " ".join(kept)} if xla_flags else {})] * num_processes


def gpu_ids(environ: Mapping[str, str], num_gpus: int) -> list[str]:
    """Returns the ids of the GPUs that this launcher sees, as `CUDA_VISIBLE_DEVICES` lists them.

    Args:
        environ: Environment of this launcher.
        num_gpus: Number of GPUs that it sees.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(num_gpus)] if given is None else given.split(",")[:num_gpus]


def free_port() -> int:
    """Returns a port of this machine that no process uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _planned(arguments: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the command of each process, and its environment variables."""
    commands = process_commands(arguments, _PROCESSES.value, free_port())
    variables = device_variables(
        os.environ,
        gpu_ids(os.environ, visible_gpus(os.environ)),
        _PROCESSES.value,
        _DEVICES_PER_PROCESS.value,
    )
    return list(zip(commands, variables, strict=True))


def _follow_secs(returncode: int) -> float:
    """Returns the time for the other processes to end after the first one, in seconds.

    Args:
        returncode: Exit code of the first one, or the negative number of the signal that killed it.
    """
    if returncode < 0:  # It told the others nothing, so they would go on until the heartbeats end.
        return 0.0
    is_saving = returncode in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    return _GRACE_SECS.value if is_saving else _FOLLOW_SECS


def _report(first: _Process) -> str:
    """Returns the report of the first failure of an attempt."""
    code = first.code or 0
    killed = code > 128 and code - 128 in [*signal.Signals]
    why = f" ({signal.Signals(code - 128).name})" if killed else ""
    errors = [line for line in first.last_lines if line.startswith("error: ")]
    what = f" It said: {errors[-1].removeprefix('error: ')}" if errors else ""
    return f"Process {first.number} ended first, with exit code {code}{why}.{what}"


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
