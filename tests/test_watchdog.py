"""A process that is stuck in a call of C that holds the GIL, so that no Python code can run."""

import signal
import subprocess
import sys
import time

import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT

STACKS_SECS, STUCK_SECS, LATER_SECS = 1.0, 2.0, 1.0
# `PyDLL` keeps the GIL during a call, as an extension may that forgets to release it.
STUCK = f"""
import ctypes, sys, time
from dist_ens.processes import progress, watchdog

watchdog.LATER_SECS = {LATER_SECS}
watchdog.begin({STACKS_SECS}, {STUCK_SECS}, print)
for _ in range(50):  # 5 seconds, longer than all time-outs.
    time.sleep(0.1)
    progress.made()
print(flush=True)
ctypes.PyDLL(None).sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has the timer")
def test_a_call_that_holds_the_gil_ends_after_its_stack_is_printed():
    environ = COMMAND_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", STUCK], env=environ, text=True, **streams)
    process.stdout.readline()
    began = time.monotonic()
    _, told = process.communicate(timeout=50)
    took = time.monotonic() - began
    # 137, after which a launcher starts the run again.
    assert process.returncode == -signal.SIGKILL
    assert "Thread 0x" in told
    assert 'File "<string>", line 11 in <module>' in told
    assert STUCK_SECS < took < STUCK_SECS + LATER_SECS + 3
