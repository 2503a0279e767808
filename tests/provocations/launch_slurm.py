"""How the messages of `dist-ens slurm` are provoked."""

import contextlib
import importlib
import subprocess
import sys

from launch.slurm_script import Job, render
from provocations.launch import _own_flags

_COMMAND = ("train", "--workdir=runs/digits")


@contextlib.contextmanager
def _slurm():
    """Imports the command, whose flags are those of other commands, too."""
    with _own_flags():
        sys.modules.pop("launch.slurm", None)
        try:
            yield importlib.import_module("launch.slurm")
        finally:
            del sys.modules["launch.slurm"]


def _rendered(*command, **fields):
    render(Job(command or _COMMAND, python="python", **fields))


def an_action_of_slurm_that_is_unknown():
    with _slurm() as slurm:
        slurm._CommandLine().prepare(["dist-ens", "sumbit", "--nodes=2", "--", "train"])


def more_processes_than_gpus():
    _rendered(gpus_per_node=2, tasks_per_node=4)


def a_name_of_a_job_with_a_line_break():
    _rendered(name="digits\n#SBATCH --partition=gpu")


def a_config_beside_those_of_a_sweep():
    _rendered("train", "--config=a.py", "--workdir=runs/a", configs=("a.py", "b.py"))


def two_configs_of_one_name():
    _rendered(configs=("mnist/a.py", "digits/a.py"))


def a_sweep_without_a_workdir():
    _rendered("train", configs=("a.py", "b.py"))


def a_job_that_slurm_refuses(monkeypatch):
    refused = subprocess.CompletedProcess([], 1, "", "sbatch: error: invalid partition gpu\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    with _slurm() as slurm:
        slurm._submitted("#!/bin/bash\n")


def a_job_that_slurm_ends():
    with _slurm() as slurm:
        slurm._ended_code("7", "CANCELLED", 0)
