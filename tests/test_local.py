"""`dist-ens local` with real processes: as one process, and back after a loss or a preemption."""

import functools
import json
import os
import re
import signal
import sys
import time

import jax
import psutil
import pytest

import fast_xla
from commands import LIMIT_SECS, is_alive, start, wait_for
from dist_ens.checkpoint import saved_step, saved_steps
from dist_ens.experiment.loaded import open_finished
from dist_ens.ground.errors import ExitCode, UserError
from launch import local
from launch.local import device_variables
from test_cluster import start as start_process
from test_hosts import write_config

STEPS = 12


def begin(folder, name, num_processes, *flags, devices=1, config="config.py", rest=()):
    """A `dist-ens local` that trains in a folder, with its output in a file."""
    words = [
        *(f"--processes={num_processes}", f"--devices_per_process={devices}", *flags, "--"),
        *("train", f"--config={folder / config}", f"--workdir={folder / name}", *rest),
    ]
    command, log = [sys.executable, "-m", "launch.local", *words], folder / f"log_{name}"
    # The launcher replaces the number of devices.
    return start_process(command, log, COLUMNS="200", XLA_FLAGS=fast_xla.flags(3))


def finished(process, folder, name):
    """Exit code and output of a launcher that ends."""
    log = folder / f"log_{name}"
    try:
        wait_for(lambda: process.poll() is not None, log.read_text)
    finally:
        process.kill()
    return process.returncode, log.read_text()


def wait_for_fault(folder):
    wait_for((folder / "there").exists, (folder / "log_run").read_text)


def scores_of(folder, name):
    summary = json.loads((folder / name / "summary.json").read_text())
    return [summary[key] for key in ("test", "mean_member", "members")]


def children_of(process):
    return [child.pid for child in psutil.Process(process.pid).children()]


def end_of(folder, name):
    """The scores of a run, and the bits of every member's final parameters."""
    params = jax.device_get(open_finished(folder / name).state.params)
    return scores_of(folder, name), [leaf.tobytes() for leaf in jax.tree.leaves(params)]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """Scores and bits of a run of one process that is never stopped, by its number of steps."""
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def trained(steps):
        config = write_config(folder, "raising", 99, steps=steps)
        words = ["train", f"--config={config}", f"--workdir={folder / str(steps)}"]
        assert start(words, folder=folder, name="log", devices=4).codes() == [0]
        return end_of(folder, str(steps))

    return trained


# Members lie along the ensemble axis, whose execution `loop` gives the same bits on any devices.
@pytest.mark.parametrize(
    ("num_processes", "devices"),
    [
        pytest.param(2, 2, marks=pytest.mark.long),
        *(pytest.param(1, n, marks=pytest.mark.faults) for n in (1, 2, 4)),
        *(pytest.param(n, 1, marks=pytest.mark.faults) for n in (2, 4)),
    ],
)
def test_several_processes_train_the_same_members_as_one(num_processes, devices, of_one, tmp_path):
    write_config(tmp_path, "raising", 99, steps=STEPS)
    code, log = finished(begin(tmp_path, "run", num_processes, devices=devices), tmp_path, "run")
    assert code == 0, log
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mesh"] == {"ensemble": num_processes * devices, "data": 1}
    assert end_of(tmp_path, "run") == of_one(STEPS)


@pytest.mark.parametrize("fault", ["killed", pytest.param("preempted", marks=pytest.mark.faults)])
def test_a_process_that_ends_is_started_again_and_nothing_is_lost(fault, of_one, tmp_path):
    # The processes agree on a step that comes some steps after the signal.
    steps = STEPS if fault == "killed" else 100 * STEPS
    write_config(tmp_path, fault, 1, steps=steps)
    code, log = finished(begin(tmp_path, "run", 2), tmp_path, "run")
    assert code == 0, log
    reported = 137 if fault == "killed" else ExitCode.PREEMPTED.value
    assert re.search(rf"Process \d ended first, with exit code {reported}\b", log), log
    assert "Restart 1 of at most 10." in log
    assert end_of(tmp_path, "run") == of_one(steps)


# Two rows of four devices each, within a process and across both; and one row across both.
@pytest.mark.parametrize(
    ("rows", "model_axis"),
    [(1, 4), *(pytest.param(*each, marks=pytest.mark.faults) for each in ((2, 2), (1, 8)))],
)
def test_members_that_devices_share_have_the_same_bits_after_a_kill(rows, model_axis, tmp_path):
    axes = {"ensemble_axis": rows, "model_axis": model_axis}
    layout = [f"--config.layout.{name}={value}" for name, value in axes.items()]
    # Hidden sizes and batches that 8 devices divide.
    layout += ["--config.model.hidden_sizes=(16,)"]
    ends = []
    for name, at_fault in (("whole", 99), ("run", 1)):
        write_config(tmp_path, "killed", at_fault, steps=STEPS)
        launcher = begin(tmp_path, name, 2, devices=4, rest=layout)
        code, log = finished(launcher, tmp_path, name)
        assert code == 0, log
        assert ("Restart 1 of at most 10." in log) is (name == "run")
        ends.append(end_of(tmp_path, name))
    assert ends[0] == ends[1]


@pytest.mark.long
def test_an_error_is_not_tried_again(tmp_path):
    write_config(tmp_path, "raising", 1, steps=STEPS)
    code, log = finished(begin(tmp_path, "run", 2), tmp_path, "run")
    assert code == ExitCode.FAULT
    assert re.search(r"Process 1 ended first, with exit code 1\. It said: .*LookupError", log)
    assert "Restart" not in log


@pytest.mark.long
def test_restarts_end(tmp_path):
    write_config(tmp_path, "killed", 1, steps=STEPS)
    process = begin(tmp_path, "run", 2, "--max_restarts=0")
    wait_for_fault(tmp_path)
    since = time.monotonic()
    code, log = finished(process, tmp_path, "run")
    assert code == 137
    # The other process cannot know of it, so nothing is gained by waiting for its end.
    assert time.monotonic() - since < local._FOLLOW_SECS
    assert "The processes were started again 0 times, which is --max_restarts=0." in log


@pytest.mark.parametrize(
    ("num_processes", "is_alone"),
    [
        (2, False),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, True), (1, False))),
    ],
)
def test_a_signal_counts_once_and_the_run_is_saved(num_processes, is_alone, tmp_path):
    write_config(tmp_path, "waiting", 0)
    process = begin(tmp_path, "run", num_processes)
    wait_for_fault(tmp_path)
    children = children_of(process)
    assert len(children) == num_processes
    # systemd and Slurm send the signal to all processes.
    for pid in (process.pid,) if is_alone else (process.pid, *children):
        os.kill(pid, signal.SIGTERM)
    code, log = finished(process, tmp_path, "run")
    assert code == ExitCode.PREEMPTED, log
    assert "it is saved in" in log
    assert "Restart" not in log
    assert not any(map(is_alive, children))
    step = int(re.search(r"Stopped at step ([\d,]+)", log)[1].replace(",", ""))
    assert saved_step(tmp_path / "run").step == step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_while_the_processes_start_is_not_lost(number, code, tmp_path):
    write_config(tmp_path, "waiting", 0)
    process = begin(tmp_path, "run", 2)
    wait_for(lambda: len(children_of(process)) == 2, (tmp_path / "log_run").read_text)
    process.send_signal(number)  # The processes have not loaded Python yet.
    ended, log = finished(process, tmp_path, "run")
    assert ended == code, log
    assert "Traceback" not in log


@pytest.mark.long
def test_processes_that_do_not_end_in_time_are_killed_which_is_no_success(tmp_path):
    write_config(tmp_path, "stuck", 1)
    process = begin(tmp_path, "run", 2, "--grace_secs=1")
    wait_for_fault(tmp_path)
    children = children_of(process)
    process.send_signal(signal.SIGTERM)
    code, log = finished(process, tmp_path, "run")
    assert code == 137, log
    assert not any(map(is_alive, children))


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died"
)
def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    write_config(tmp_path, "waiting", 0)
    process = begin(tmp_path, "run", 2)
    # The loop does not wait for a save, so the first one may end some steps after its own.
    wait_for(lambda: saved_steps(tmp_path / "run"), (tmp_path / "log_run").read_text)
    children = children_of(process)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, children)), lambda: str(children), LIMIT_SECS)
    assert saved_step(tmp_path / "run").step >= 4  # What was saved can be read.


def test_gpus_are_dealt_out_in_their_order():
    def visible(listed, num_gpus):
        variables = device_variables(listed, num_gpus, 2, None)
        return [each["CUDA_VISIBLE_DEVICES"] for each in variables]

    assert visible({}, 4) == ["0,1", "2,3"]
    assert visible({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4) == ["4,5", "6,7"]
    assert visible({"CUDA_VISIBLE_DEVICES": "2,3,-1,4"}, 2) == ["2", "3"]
    with pytest.raises(UserError, match="2 processes with 1 GPU each need 2 GPUs"):
        visible({}, 1)
    assert device_variables({}, 0, 2, 4) == [{"JAX_NUM_CPU_DEVICES": "4"}] * 2
    of_user = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=x"}
    assert device_variables(of_user, 0, 1, 4) == [
        {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": "--xla_dump_to=x"}
    ]
