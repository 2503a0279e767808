"""Scripts for Slurm under a real Slurm with two nodes, which runs on this machine."""

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import fast_xla
from commands import python
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.experiment.loaded import open_finished
from slurm_cluster import SlurmCluster, wait_for
from stand_ins import executable
from test_slurm_render import render

pytestmark = pytest.mark.slurm
TRAIN = (
    "train",
    f"--config={ROOT}/configs/digits.py",
    "--config.num_members=4",
    "--config.model.hidden_sizes=(16,)",
    "--config.steps=3000",
    "--config.execution=vmap",  # The choice of `auto` depends on timings.
    "--config.checkpoint.every_steps=500",
)
# A stand-in for Python and its command: the task `$1` of them ends with a code after a second. The
# others wait for SIGTERM and leave with 42, as a run does. A job that was requeued succeeds.
TASK = """#!/bin/bash
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
trap 'sleep 1; exit 42' TERM
touch started
[ "$SLURM_PROCID" = "{task}" ] && sleep 1 && exit {code}
for i in $(seq 600); do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_xla.flags(1)}
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), COMMAND_ENVIRONMENT | own) as cluster:
        yield cluster


def command(cluster, folder, *words):
    """The ended `dist-ens slurm submit` command, and its output."""
    return python("-m", "launch.slurm", "submit", *words, cwd=folder, **cluster.environment)


def submit(cluster, folder, words=("train", "--workdir=run"), python=None, **options):
    """Submits a job on two nodes with two processes each from a folder, and returns its id."""
    options = {"nodes": 2, "tasks_per_node": 2, "time": "20"} | options
    script = render(words, python or str(folder / "task"), **options)
    return cluster.run("sbatch", "--parsable", input=script, cwd=folder).strip()


def submit_training(cluster, folder):
    """Submits a run that is saved in a folder."""
    return submit(cluster, folder, (*TRAIN, f"--workdir={folder}/run"), sys.executable)


def submit_tasks(cluster, folder, task="", code=0, **options):
    """Submits stand-ins for a run, of which one ends with a code."""
    executable(folder / "task", TASK.format(task=task, code=code))
    return submit(cluster, folder, **options)


def wait_for_file(path):
    """Waits until a file has content, or a folder exists."""
    wait_for(lambda: path.is_dir() or (path.exists() and path.stat().st_size), path)


def log_of(folder, job):
    return (folder / f"dist_ens-{job}.log").read_text()


@pytest.fixture(scope="module")
def never_stopped(cluster, tmp_path_factory):
    """The folder of a run that was submitted and followed until its end, and that command."""
    folder = tmp_path_factory.mktemp("never_stopped")
    flags = ("--nodes=2", "--tasks_per_node=2", "--time=20")
    words = (*TRAIN, f"--workdir={folder}/run")
    return folder, command(cluster, folder, *flags, "--", *words)


def assert_ended_as(folder, never_stopped):
    """Both runs have the same state, bit for bit, and the same scores."""
    states = [open_finished(path / "run").state for path in (folder, never_stopped)]
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get((s.step, s.params, s.opt_state)) for s in states),
    )
    scores = [json.loads((p / "run/summary.json").read_text()) for p in (folder, never_stopped)]
    assert scores[0]["test"] == scores[1]["test"]


def test_a_submitted_job_trains_on_two_nodes_and_is_followed_to_its_end(never_stopped):
    _, ended = never_stopped
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 cpu devices, mesh 4 x 1" in ended.stdout.replace("\n", " ")
    assert "The ensemble's accuracy is" in ended.stdout
    assert ended.stderr.endswith("ended with exit code 0.\n")


def test_a_preempted_job_saves_and_is_requeued_and_ends_as_one_never_stopped(
    cluster, never_stopped, tmp_path
):
    job = submit_training(cluster, tmp_path)
    wait_for_file(tmp_path / "run/checkpoints/500")
    cluster.run("scancel", "--signal=TERM", job)
    assert cluster.wait_for_end(job)["JobState"] == "PENDING"
    stopped = log_of(tmp_path, job)
    step = stopped.split("Stopped at step ")[1].split()[0]
    assert "Exit code 42. The job is requeued: restart 1 of at most 100." in stopped
    cluster.start_again(job)
    assert cluster.wait_for_end(job, restarts=1)["JobState"] == "COMPLETED"
    assert f"resuming from step {step}" in log_of(tmp_path, job).replace("\n", " ")
    assert_ended_as(tmp_path, never_stopped[0])


def test_a_job_that_slurm_requeues_or_cancels_resumes_from_a_commit(
    cluster, never_stopped, tmp_path
):
    job = submit_training(cluster, tmp_path)
    wait_for_file(tmp_path / "run/checkpoints/500")
    cluster.run("scontrol", "requeue", job)
    cluster.start_again(job)
    wait_for_file(tmp_path / "run/checkpoints/1500")
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job, restarts=1)["JobState"] == "CANCELLED"
    assert "resuming from step" in log_of(tmp_path, job)
    job = submit_training(cluster, tmp_path)
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "resuming from step" in log_of(tmp_path, job)
    assert_ended_as(tmp_path, never_stopped[0])


def test_a_failing_run_is_a_failed_job_with_its_code(cluster, tmp_path):
    words = ("train", "--config=missing.py", "--workdir=run")
    ended = command(cluster, tmp_path, "--", *words)
    assert ended.returncode == 2
    assert "missing.py" in ended.stdout
    (log,) = tmp_path.glob("*.log")
    shown = cluster.described(log.stem.removeprefix("dist_ens-"))
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "2:0", "0")


def test_the_code_of_the_first_task_that_fails_decides(cluster, tmp_path):
    # srun ends the other three tasks with SIGTERM, so that they leave with 42.
    job = submit_tasks(cluster, tmp_path, task=1, code=1)
    shown = cluster.wait_for_end(job)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "1:0")
    job = submit_tasks(cluster, tmp_path, task=3, code=137)
    cluster.start_again(job)
    assert cluster.wait_for_end(job, restarts=1)["JobState"] == "COMPLETED"


def test_a_cancelled_job_that_leaves_with_42_stays_cancelled(cluster, tmp_path):
    job = submit_tasks(cluster, tmp_path)
    wait_for((tmp_path / "started").exists, tmp_path)
    cluster.run("scancel", job)
    wait_for_file(tmp_path / f"dist_ens-{job}.log")
    shown = cluster.wait_for_end(job)
    wait_for(lambda: "so the script does not requeue it" in log_of(tmp_path, job), job)
    assert cluster.described(job)["JobState"] == "CANCELLED"
    assert shown["Restarts"] == "0"


def test_a_job_saves_before_its_time_limit_and_continues(cluster, tmp_path):
    job = submit_tasks(cluster, tmp_path, time="1", grace_secs=45)
    assert cluster.wait_for_end(job)["JobState"] == "PENDING"
    assert "Exit code 42. The job is requeued" in log_of(tmp_path, job)
    cluster.run("scancel", job)


def test_a_job_that_another_one_preempts_saves_and_continues(cluster, tmp_path):
    job = submit_tasks(cluster, tmp_path, partition="low")
    wait_for((tmp_path / "started").exists, tmp_path)
    urgent = submit_tasks(cluster, tmp_path, partition="high", tasks_per_node=4)
    cluster.wait_for(urgent, "RUNNING")
    assert "Exit code 42. The job is requeued" in log_of(tmp_path, job)
    cluster.run("scancel", urgent)
    cluster.start_again(job)
    assert cluster.wait_for_end(job, restarts=1)["JobState"] == "COMPLETED"


def test_only_the_preempted_task_of_a_sweep_is_requeued(cluster, tmp_path):
    own = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 2}
    job = submit_tasks(cluster, tmp_path, configs=("a.py", "b.py", "c.py"), **own)
    for task in range(3):
        cluster.wait_for(f"{job}_{task}", "RUNNING")
    wait_for((tmp_path / "started").exists, tmp_path)
    time.sleep(1)
    # The last task of an array has the id of the array, too.
    cluster.run("scancel", "--signal=TERM", f"{job}_2")
    assert cluster.wait_for_end(f"{job}_2")["JobState"] == "PENDING"
    for task in range(2):
        shown = cluster.described(f"{job}_{task}")
        assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    cluster.run("scancel", job)


def test_a_command_in_an_allocation_without_srun_says_so(cluster, tmp_path):
    # salloc sets the job's variables, and not those of a step: as after ssh into an allocation.
    words = ("-m", "launch.train", *TRAIN[1:], "--config.steps=20", f"--workdir={tmp_path}/run")
    ended = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks-per-node=2", sys.executable, *words],
        env=cluster.environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "srun" in ended.stderr
