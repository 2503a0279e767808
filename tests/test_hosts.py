"""Real processes of one run, of which one is lost, fails, or never comes."""

import re
import signal
import time

import pytest

from commands import start, together, wait_for
from dist_ens.ground.errors import ExitCode

HEARTBEAT_SECS, STUCK_SECS = 6, 30
# One process has a fault after step 6.
CONFIG = """
import os, pathlib, signal, time
import jax
from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).parent

class Fault:
    def __call__(self, info):
        if info.step == 6 and jax.process_index() == PROCESS and not (HERE / "there").exists():
            (HERE / "there").touch()
            FAULT

def get_config():
    return ConfigDict(dict(
        num_members=4, steps=STEPS, steps_per_call=1, execution="loop",
        data=dict(source="digits", global_batch_size=32, std=(16.0,)),
        model=dict(name="mlp", hidden_sizes=(8,)),
        optimizer=dict(name="sgd", learning_rate=1e-2),
        checkpoint=dict(every_steps=4),
        logging=dict(every_steps=2),
    ))

def make_callbacks(experiment):
    return [Fault()]
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raising": "raise LookupError('no such row')",
    "stuck": "time.sleep(600)",
    "preempted": "os.kill(os.getpid(), signal.SIGTERM)",
    "waiting": "pass",
    "beating": "from dist_ens.processes.peers import Peers; Peers.current._beat_secs = 2e-4",
}


def write_config(folder, fault, process_id, steps=10**6):
    text = CONFIG.replace("PROCESS", str(process_id)).replace("STEPS", str(steps))
    (folder / "config.py").write_text(text.replace("FAULT", FAULTS[fault]))
    return folder / "config.py"


def started(folder, flags, *others, devices=1):
    """The processes of a run, each with flags of its own, with their outputs in `log_0`, ….

    Of two values of a flag the last one counts.
    """
    words = ["train", f"--config={folder / 'config.py'}", f"--workdir={folder / 'run'}"]
    words += [f"--heartbeat_timeout_secs={HEARTBEAT_SECS}", *others]
    each, environ = [[*words, *own] for own in flags], {"COLUMNS": "200"}
    return start(*each, folder=folder, name="log", devices=devices, environ=environ, in_one=True)


def log(folder, process_id):
    return (folder / f"log_{process_id}").read_text()


@pytest.mark.parametrize(
    ("fault", "num_processes", "at_fault"),
    [
        ("killed", 2, 0),
        pytest.param("stopped", 2, 1, marks=pytest.mark.long),
        ("raising", 2, 1),
        *(pytest.param("killed", *each, marks=pytest.mark.long) for each in ((2, 1), (4, 3))),
        pytest.param("stopped", 2, 0, marks=pytest.mark.long),
        pytest.param("raising", 4, 0, marks=pytest.mark.long),
        pytest.param("stuck", 2, 1, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_lost_ends_the_others_which_name_its_host_and_members(
    fault, num_processes, at_fault, tmp_path
):
    write_config(tmp_path, fault, at_fault)
    watched = [f"--stuck_after_secs={STUCK_SECS}"] if fault == "stuck" else []
    run = started(tmp_path, together(num_processes), *watched)
    others = [i for i in range(num_processes) if i != at_fault]
    try:
        wait_for((tmp_path / "there").exists, lambda: log(tmp_path, 0))
        since = time.monotonic()
        wait_for(lambda: not any(map(run.is_running, others)), lambda: log(tmp_path, others[0]))
        took = time.monotonic() - since
    finally:
        run.kill([at_fault])
        codes = run.codes(limit_secs=30)
    expected = ExitCode.FAULT if fault == "raising" else ExitCode.HOST_LOST
    assert [codes[i] for i in others] == [expected] * len(others), log(tmp_path, others[0])
    assert took < (STUCK_SECS if fault == "stuck" else HEARTBEAT_SECS) + 5
    per_process = 4 // num_processes
    first = at_fault * per_process
    members = f"members {first} to {first + 1}" if per_process == 2 else f"members {first}"
    named = rf"[pP]rocess {at_fault} \(host [^ ]+, pid {run.pids[at_fault]}, {members}, data"
    for i in others:
        told = " ".join(log(tmp_path, i).split())
        assert re.search(named, told), told
        if fault == "raising":
            assert "has failed: The callback Fault raised LookupError at step 6: no such" in told
        if fault != "killed" or at_fault != 0:  # JAX prints its own trace first.
            assert "Check failure stack trace" not in told
        assert "Traceback" not in told


def test_processes_that_wait_for_another_in_vain_say_who_they_are(tmp_path):
    write_config(tmp_path, "raising", 9)
    *waiting, _ = together(3)
    run = started(tmp_path, waiting, "--start_timeout_secs=2")
    assert run.codes() == [ExitCode.HOST_LOST] * 2
    for i in (0, 1):
        told = f"error: Process {i} of 3 has not met the others at 127.0.0.1:"
        assert told in log(tmp_path, i)
        assert "DEADLINE_EXCEEDED" in log(tmp_path, i)  # JAX's own message stands before it.
        assert "Traceback" not in log(tmp_path, i)


def test_a_process_whose_work_is_done_ends_well_while_it_sends_beats(tmp_path):
    write_config(tmp_path, "beating", 1, steps=8)
    run = started(tmp_path, together(2))
    assert run.codes() == [0, 0], log(tmp_path, 0) + log(tmp_path, 1)


@pytest.mark.parametrize(
    ("flag", "values", "told"),
    [
        ("config.seed", (1, 2), r"differ in seed: 1 in process 0 \(host "),
        ("num_processes", (2, 3), "differ in --num_processes: 2 in process 0"),
        pytest.param(
            "workdir", "ab", "is not shared: what process 0 wrote ", marks=pytest.mark.long
        ),
    ],
)
def test_hosts_that_differ_are_told_before_training(flag, values, told, tmp_path):
    write_config(tmp_path, "raising", 9)
    values = [tmp_path / value for value in values] if flag == "workdir" else values
    both = [[*own, f"--{flag}={value}"] for own, value in zip(together(2), values, strict=True)]
    assert started(tmp_path, both).codes() == [ExitCode.USAGE] * 2
    for i in range(2):
        assert re.search(told, " ".join(log(tmp_path, i).split()))
    assert not (tmp_path / "run").exists()


def test_a_signal_to_one_host_before_the_first_step_ends_all_with_its_code(tmp_path):
    config = write_config(tmp_path, "waiting", 9)
    begin = "def get_config():\n"
    reached = f"{begin}    (HERE / 'there').touch() if jax.process_index() else time.sleep(600)\n"
    config.write_text(config.read_text().replace(begin, reached))
    run = started(tmp_path, together(2))
    wait_for((tmp_path / "there").exists, lambda: log(tmp_path, 1))
    run.send(signal.SIGTERM, [1])
    since = time.monotonic()
    assert run.codes() == [ExitCode.PREEMPTED] * 2
    assert time.monotonic() - since < 10
    assert "Process 1 (host " in log(tmp_path, 0)
    assert "was stopped: Ended by SIGTERM. Nothing is lost." in log(tmp_path, 0)


# The data is slow on process 1: longer than Gloo waits for a new connection.
SLOW_DATA = """
import dataclasses
from dist_ens.data import ArraySplit
from dist_ens.experiment import open_source

class SlowSplit(ArraySplit):
    in_memory = False  # So that the hosts read the examples of each step.
    slept = []

    def take(self, indices):
        if indices.ndim == 2 and jax.process_index() == 1 and not self.slept:
            self.slept.append(time.sleep(40))
        return super().take(indices)

def make_source(data):
    digits = open_source(data)
    train = SlowSplit(digits.train.inputs, digits.train.labels)
    return dataclasses.replace(digits, train=train)
"""


@pytest.mark.faults
def test_a_host_may_be_forty_seconds_late_for_the_first_step(tmp_path):
    config = write_config(tmp_path, "waiting", 9, steps=4)
    config.write_text(config.read_text() + SLOW_DATA)
    # The hosts have other connections for their first agreements if each has several devices.
    run = started(tmp_path, together(2), devices=2)
    assert run.codes() == [0, 0], log(tmp_path, 0) + log(tmp_path, 1)
