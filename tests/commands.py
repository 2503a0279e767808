"""`dist-ens` commands in processes of their own, which take no time for imports."""

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

import psutil

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from forked import CLOSED, NOBODY

__all__ = ["CLOSED", "NOBODY", "Ended", "Running", "dist_ens", "start"]

ROOT = pathlib.Path(__file__).parent.parent


class Ended(NamedTuple):
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """Commands that run at the same time.

    Args:
        commands: Commands as `forked.py` reads them.

    Attributes:
        pids: Ids of their processes.
    """

    def __init__(self, commands):
        print(json.dumps(commands), file=_parent().stdin, flush=True)
        self.pids = self._told()

    def kill(self, which):
        """Kills some of the processes, given by their places in `pids`."""
        for place in which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[place], signal.SIGKILL)

    def is_running(self):
        """Whether the first process has not ended."""
        return psutil.pid_exists(self.pids[0])

    def codes(self):
        """Exit codes of the processes, when all have ended."""
        return self._told()

    def _told(self):
        line = _parent().stdout.readline()
        assert line, "the process that commands are forked from has ended"
        return json.loads(line)


def start(*each, folder, name, devices=1, xla_flags=None, environ=(), cwd=ROOT):
    """Starts commands at the same time, before others are started.

    Args:
        each: Words after `dist-ens` of each command.
        folder: Folder of the files of their output, `NAME_out_0`, `NAME_err_0`, `NAME_out_1`, ….
        name: Name of these files.
        devices: CPUs to simulate in each.
        xla_flags: Their `XLA_FLAGS`; by default those with which they compile fast.
        environ: Other variables that are changed.
        cwd: Folder in which they run.
    """
    xla_flags = fast_xla.flags(devices) if xla_flags is None else xla_flags
    return Running(
        [
            {
                "words": [*map(str, words)],
                "environ": {"XLA_FLAGS": xla_flags, **dict(environ)},
                "folder": str(folder),
                "cwd": str(cwd),
                "streams": [f"{name}_{stream}_{place}" for stream in ("out", "err")],
            }
            for place, words in enumerate(each)
        ]
    )


def dist_ens(*words, devices=1, xla_flags=None, out="out", err="err"):
    """A finished `dist-ens` command, forked from a process that has imported what it needs.

    Args:
        words: After `dist-ens`.
        devices: CPUs to simulate.
        xla_flags: Its `XLA_FLAGS`; without any it compiles as a user's does, by default fast.
        out: Where its standard output goes: a path in place of the file that is read, `CLOSED`, or
            `NOBODY` for a pipe whose reader is gone. What went elsewhere is returned as "".
        err: Where its standard error goes; likewise.
    """
    xla_flags = fast_xla.flags(devices) if xla_flags is None else xla_flags
    with tempfile.TemporaryDirectory() as folder:
        command = {
            "words": [*map(str, words)],
            "environ": {"XLA_FLAGS": xla_flags},
            "folder": folder,
            "cwd": str(ROOT),
            "streams": [out, err],
        }
        [code] = Running([command]).codes()
        files = [pathlib.Path(folder) / name for name in ("out", "err")]
        printed = [path.read_text() if path.exists() else "" for path in files]
    return Ended(code, *printed)


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
