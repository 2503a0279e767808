"""`dist-ens` commands in processes of their own, which take no time for imports."""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from forked import CLOSED, NOBODY

__all__ = ["CLOSED", "NOBODY", "Ended", "dist_ens"]

ROOT = pathlib.Path(__file__).parent.parent


class Ended(NamedTuple):
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


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
            "xla_flags": xla_flags,
            "folder": folder,
            "streams": [out, err],
        }
        parent = _parent()
        print(json.dumps(command), file=parent.stdin, flush=True)
        code = parent.stdout.readline()
        assert code, "the process that commands are forked from has ended"
        files = [pathlib.Path(folder) / name for name in ("out", "err")]
        printed = [path.read_text() if path.exists() else "" for path in files]
    return Ended(int(code), *printed)


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
