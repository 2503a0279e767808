"""`dist-ens` commands in processes of their own, which take no time for imports."""

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import psutil

import fast_xla
from conftest import COMMAND_ENVIRONMENT, ROOT
from forked import CLOSED, LIMIT_SECS, NOBODY

__all__ = ["CLOSED", "NOBODY", "dist_ens", "process", "python", "start"]


class Ended(NamedTuple):
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """Commands that run at the same time; `pids` are the ids of their processes.

    Args:
        commands: Commands as `forked.py` reads them.
    """

    def __init__(self, commands):
        print(json.dumps(commands), file=_parent().stdin, flush=True)
        self.pids = self._told()

    def send(self, number, which=None):
        """Sends a signal to processes, given by their places in `pids`; without places to all."""
        for place in range(len(self.pids)) if which is None else which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[place], number)

    def kill(self, which=None):
        """Kills processes."""
        self.send(signal.SIGKILL, which)

    def is_running(self, place=0):
        """Whether a process has not ended."""
        return is_alive(self.pids[place])

    def codes(self, limit_secs=LIMIT_SECS):
        """Exit codes of the processes, when all have ended; after a time they are killed."""
        places = range(len(self.pids))
        try:
            wait_for(lambda: not any(map(self.is_running, places)), lambda: self.pids, limit_secs)
        finally:
            self.kill([place for place in places if self.is_running(place)])
            ended = self._told()
        return ended

    def _told(self):
        line = _parent().stdout.readline()
        assert line, "the process that commands are forked from has ended"
        return json.loads(line)


def is_alive(pid):
    """Whether a process runs, or is stopped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, what, limit_secs=LIMIT_SECS):
    """Waits until a condition holds; `what` returns a text for the error."""
    deadline = time.monotonic() + limit_secs
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def together(num_processes):
    """Flags of the processes of a run that meet on this machine, for each of them."""
    both = [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={num_processes}"]
    return [[*both, f"--process_id={i}"] for i in range(num_processes)]


def start(
    *each, folder, name, devices=1, xla_flags=None, environ=(), cwd=ROOT, in_one=False, ignored=()
):
    """Starts commands at the same time, before others are started.

    Args:
        each: Words after `dist-ens` of each command.
        folder: Folder of the files of their output, `NAME_out_0`, `NAME_err_0`, `NAME_out_1`, ….
        name: Name of these files.
        devices: CPUs to simulate in each.
        xla_flags: Their `XLA_FLAGS`; by default those with which they compile fast.
        environ: Other variables that are changed.
        cwd: Folder in which they run.
        in_one: Whether both outputs of a command go to one file, `NAME_0`.
        ignored: Signals that they ignore, as after `nohup`.
    """
    parts = ("", "") if in_one else ("_out", "_err")
    streams = [[f"{name}{part}_{place}" for part in parts] for place in range(len(each))]
    options = (folder, devices, xla_flags, environ, cwd, ignored)
    return Running([_command(*both, *options) for both in zip(each, streams, strict=True)])


def _command(words, streams, folder, devices, xla_flags, environ, cwd=ROOT, ignored=()):
    """A command as `forked.py` reads it."""
    xla_flags = fast_xla.flags(devices) if xla_flags is None else xla_flags
    return {
        "words": [*map(str, words)],
        "environ": {"XLA_FLAGS": xla_flags, **dict(environ)},
        "folder": str(folder),
        "cwd": str(cwd),
        "streams": streams,
        "ignored": [*map(int, ignored)],
    }


def dist_ens(*words, devices=1, xla_flags=None, out="out", err="err", environ=()):
    """A finished `dist-ens` command, with the options of `start`, and its output.

    With `xla_flags=""` it compiles as a user's does. Output that goes to another path, to `CLOSED`
    or to `NOBODY`, a pipe whose reader is gone, is returned as "".
    """
    with tempfile.TemporaryDirectory() as folder:
        command = _command(words, [out, err], folder, devices, xla_flags, environ)
        [code] = Running([command]).codes()
        files = [pathlib.Path(folder) / name for name in ("out", "err")]
        printed = [path.read_text() if path.exists() else "" for path in files]
    return Ended(code, *printed)


def process(*command, cwd=ROOT, umask=-1, **variables):
    """A finished process in a folder, and its output. Variables that are None are left out."""
    variables = COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        umask=umask,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        errors="backslashreplace",
        timeout=LIMIT_SECS,
    )


def python(*words, **options):
    """A finished process of Python, and its output."""
    return process(sys.executable, *words, **options)


@functools.cache
def _parent():
    """The process that commands are forked from; it ends with this one."""
    # Huge pages are spoken of already, so that no command starts anew to ask for them.
    variables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, pathlib.Path(__file__).with_name("forked.py")],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT | variables | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
