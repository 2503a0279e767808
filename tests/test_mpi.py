"""Processes that mpirun of OpenMPI starts."""

import json
import pathlib
import sys

import pytest

from dist_ens.ground.errors import ExitCode
from test_cluster import finish, start

pytestmark = pytest.mark.mpi

MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def mpirun(log, *command):
    """The exit code of mpirun with two processes of a module of Python, and what both printed."""
    words = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, "-m", *map(str, command)]
    [code] = finish([start(words, log, **AS_ROOT)], [log])
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


def test_a_usage_error_ends_all_processes_with_its_code(tmp_path):
    command = ["launch.train", "--config=configs/digits.py", f"--workdir={tmp_path / 'run'}"]
    sizes = ["--config.layout.ensemble_axis=1", "--config.data.global_batch_size=7"]
    code, printed = mpirun(tmp_path / "log", *command, *sizes)
    assert code == ExitCode.IMPOSSIBLE_LAYOUT, printed
    assert "global_batch_size=7 and a data axis of 2" in printed
