"""Processes that mpirun of OpenMPI starts."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.ground.errors import ExitCode

pytestmark = pytest.mark.mpi

MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")
LIMIT_SECS = 300


def mpirun(log, *command):
    """The exit code of mpirun with two processes of a module of Python, and what both printed."""
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, "-m", *map(str, command)]
    with log.open("w") as file:  # A pipe could be kept open by a process that is left over.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=COMMAND_ENVIRONMENT | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT_SECS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return code, log.read_text()


def test_two_processes_find_each_other_and_train_digits(tmp_path):
    workdir = tmp_path / "run"
    command = ["launch.train", "--config=configs/digits.py", f"--workdir={workdir}"]
    code, printed = mpirun(tmp_path / "log", *command, "--config.steps=100")
    assert code == 0, printed
    summary = json.loads((workdir / "summary.json").read_text())
    # A process on a CPU has one device, and the 8 members divide over both.
    assert summary["mesh"] == {"ensemble": 2, "data": 1}
    assert summary["test"]["accuracy"] > 0.9


def test_doctor_tells_what_mpirun_started(tmp_path):
    code, printed = mpirun(tmp_path / "log", "launch.doctor", f"--workdir={tmp_path}")
    assert code == 0, printed
    for told in ("2, with equal versions", "2 devices (cpu), 1 of them here", "shared by all"):
        assert told in printed


def test_a_usage_error_ends_all_processes_with_its_code(tmp_path):
    command = ["launch.train", "--config=configs/digits.py", f"--workdir={tmp_path / 'run'}"]
    sizes = ["--config.layout.ensemble_axis=1", "--config.data.global_batch_size=7"]
    code, printed = mpirun(tmp_path / "log", *command, *sizes)
    assert code == ExitCode.IMPOSSIBLE_LAYOUT, printed
    assert "global_batch_size=7 and a data axis of 2" in printed
