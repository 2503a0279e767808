"""Processes that mpirun of OpenMPI starts."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.exit_codes import ExitCode

pytestmark = pytest.mark.mpi

MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")
LIMIT_SECS = 300


def mpirun(log, *command, of_each=(), processes=2):
    """Exit code of mpirun and what all processes printed.

    Args:
        log: File for the output. A pipe could be kept open by a process that is left over.
        command: Module of Python with its arguments.
        of_each: Variables of every process that mpirun would set otherwise, as NAME=VALUE.
        processes: How many processes to start.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    start = [MPIRUN, "--oversubscribe", "-n", str(processes), "env", *of_each]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*start, sys.executable, "-m", *map(str, command)],
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


@pytest.mark.parametrize(
    "of_each",
    [
        pytest.param((), id="on one machine"),
        # The processes then find process 0 as on two machines: by mpi4py.
        pytest.param(("OMPI_COMM_WORLD_LOCAL_SIZE=1",), id="as on two machines"),
    ],
)
def test_two_processes_find_each_other_and_train_digits(tmp_path, of_each):
    workdir = tmp_path / "run"
    command = ["launch.train", "--config=configs/digits.py", f"--workdir={workdir}"]
    code, printed = mpirun(tmp_path / "log", *command, "--config.steps=100", of_each=of_each)
    assert code == 0, printed
    summary = json.loads((workdir / "summary.json").read_text())
    # A process on a CPU has one device, and the 8 members divide over both.
    assert summary["mesh"] == {"ensemble": 2, "data": 1}
    assert summary["test"]["accuracy"] > 0.9


def test_doctor_tells_what_mpirun_started(tmp_path):
    code, printed = mpirun(tmp_path / "log", "launch.doctor", f"--workdir={tmp_path}")
    assert code == 0, printed
    for told in (
        "openmpi: process 0 of 2",
        "2 (OMPI_COMM_WORLD_SIZE)",
        "(PMIX_NAMESPACE); process 0 listens on",
        "2 devices (cpu) over 2 processes; here 1",
        "all processes read what process 0 writes",
    ):
        assert told in printed


def test_a_usage_error_ends_all_processes_with_its_code(tmp_path):
    command = ["launch.train", "--config=configs/digits.py", f"--workdir={tmp_path / 'run'}"]
    sizes = ["--config.layout.ensemble_axis=1", "--config.data.global_batch_size=7"]
    code, printed = mpirun(tmp_path / "log", *command, *sizes)
    assert code == ExitCode.IMPOSSIBLE_LAYOUT, printed
    assert "global_batch_size=7 and a data axis of 2" in printed
