"""What a signal does to a training command, in real processes, wherever it arrives."""

import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import time
from typing import NamedTuple

import pytest

from commands import python, start, together, wait_for
from dist_ens.checkpoint import saved_step, saved_steps
from dist_ens.experiment import Experiment, open_source
from dist_ens.experiment.train import train
from dist_ens.processes.stop_signal import COPY_SECS

SAVED_LIMIT_SECS, AT_ONCE_SECS = 30, 5
# Each process says on the disk that it is in the phase, and stays there for a while.
CONFIG = """
import dataclasses, os, pathlib, signal, time, zlib
import jax, jax.numpy as jnp, numpy as np
from dist_ens.checkpoint import saved_steps
from dist_ens.experiment import Experiment, open_source

HERE = pathlib.Path(__file__).parent
PHASE, STAY_SECS = "{phase}", {stay_secs}

def reach(phase, secs=STAY_SECS):
    file = HERE / f"there_{{os.getpid()}}"
    if phase == PHASE and not file.exists():
        file.touch()
        time.sleep(secs)

def get_config():
    reach("config", 600)
    return Experiment.from_dict(dict(
        num_members=2, steps=10**6, steps_per_call=1,
        data=dict(source="slow_digits", global_batch_size=32, std=(16.0,)),
        model=dict(name="mlp", hidden_sizes=(8,)),
        optimizer=dict(name="sgd", learning_rate=1e-2),
        logging=dict(every_steps=5),
        evaluation=dict(every_steps=40, global_batch_size=100),
        checkpoint=dict(every_steps=10**6 if PHASE == "last save" else 20),
    )).to_config_dict()

@dataclasses.dataclass(frozen=True)
class SlowSplit:
    split: object
    in_memory = False

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        # The examples are also checked, before the first step. The second batch is neither the
        # first of an evaluation nor its last.
        if Slow.steps and 100 in indices:
            reach("evaluating")
        return self.split.take(indices)

def make_source(data):
    digits = open_source(dataclasses.replace(data, source="digits"))
    return dataclasses.replace(digits, test=SlowSplit(digits.test))

class Slow:
    steps = saves = 0

    def __call__(self, info):
        Slow.steps += 1
        reach("first step")
        if PHASE == "loop" and info.step >= 25 and saved_steps(HERE / "run"):
            reach("loop")
        if PHASE == "last save" and info.step == 30 and jax.process_index() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def sync(self):
        self.saves += 1
        if self.saves == 2:
            reach("saving")
        reach("last save")

def make_callbacks(spec):
    return [Slow()]

if PHASE == "compiling":
    # Hundreds of different operations take XLA a minute. JAX says when it hands them over.
    def lowered(event, secs, fun_name="", **_):
        if event.endswith("jaxpr_to_mlir_module_duration") and fun_name == "jit(update)":
            reach("compiling", 0)

    jax.monitoring.register_event_duration_secs_listener(lowered)

    def make_member(spec):
        def init(key):
            return {{"w": jax.random.normal(key, (64, 10))}}
        def apply(params, inputs):
            x = inputs.reshape(len(inputs), 64)
            # Each run has a program of its own, which the compilation cache does not have.
            own = zlib.crc32(str(HERE).encode()) % 1000 / 1000
            for k in range(1500):
                product = jnp.roll(x, k % 7, axis=1) @ jnp.ones((64, 64))
                x = jnp.sin(x * (k + 1.5 + own)) + product * k
            return x @ params["w"]
        return init, apply
"""
# Phases, in the order in which a command passes them.
MEETING, FIRST_STEP = "before jax.distributed", "first step"
BEFORE_TRAINING = ("config", MEETING, "compiling")
PHASES = (*BEFORE_TRAINING, FIRST_STEP, "loop", "evaluating", "saving")
CODES = {signal.SIGTERM: 42, signal.SIGINT: 130, signal.SIGHUP: 42, signal.SIGUSR1: 42}


class Case(NamedTuple):
    """A signal to all processes of a run, in a phase. A second one comes when copies are over."""

    number: signal.Signals
    phase: str
    processes: int = 1
    times: int = 1

    def __str__(self):
        return f"{self.number.name}-{self.phase}-{self.processes}-{self.times}"


EVERY_CASE = [
    pytest.param(Case(number, phase, processes, times), marks=pytest.mark.faults)
    for processes, phase, number, times in itertools.product(
        (1, 2), PHASES, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), (1, 2)
    )
    if processes == 2 or phase != MEETING  # A process that is alone meets nobody.
]
LONG_CASES = [
    *(Case(signal.SIGINT, "evaluating", processes) for processes in (1, 2)),
    *(Case(signal.SIGTERM, "compiling", processes) for processes in (1, 2)),
    *(Case(signal.SIGINT, "compiling"), Case(signal.SIGINT, MEETING, 2)),
    *(Case(signal.SIGTERM, "saving", 2), Case(signal.SIGTERM, "saving", times=2)),
    *(Case(signal.SIGUSR1, "loop"), Case(signal.SIGHUP, "loop", 2)),
]
CASES = [
    *(Case(signal.SIGTERM, phase) for phase in ("config", "saving")),
    *(Case(signal.SIGHUP, "loop"), Case(signal.SIGINT, "loop", times=2)),
    Case(signal.SIGTERM, MEETING, 2),
    *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES),
    *EVERY_CASE,
]


def newest_in(run):
    """Returns the newest step, which can be read; 0 if there is none."""
    return saved_step(run).step if saved_steps(run) else 0


def started(folder, phase, num_processes=1, *, stay_secs=1.0, ignored=()):
    """The processes of a run, all of them in a phase."""
    (folder / "config.py").write_text(CONFIG.format(phase=phase, stay_secs=stay_secs))
    flags = together(num_processes) if num_processes > 1 else [[]]
    come = flags[:1] if phase == MEETING else flags  # The other one never comes.
    words = ["train", f"--config={folder / 'config.py'}", f"--workdir={folder / 'run'}"]
    run = start(
        *([*words, "--config.execution=loop", *own] for own in come),
        **dict(folder=folder, name="log", in_one=True, environ={"COLUMNS": "200"}),
        ignored=ignored,
    )

    def are_there():
        assert all(map(run.is_running, range(len(come)))), logs(folder)
        if phase == MEETING:
            with socket.socket() as other:
                port = int(flags[0][0].rpartition(":")[2])
                return other.connect_ex(("127.0.0.1", port)) == 0
        return len(list(folder.glob("there_*"))) == len(come)

    try:
        wait_for(are_there, lambda: logs(folder))
    except BaseException:
        run.kill()
        run.codes()
        raise
    if phase == "compiling":
        time.sleep(0.5)  # From Python to XLA.
    return run


def logs(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("log_*")))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_signal_saves_what_there_is_and_a_second_ends_at_once(case, tmp_path):
    stay_secs = 60.0 if case.times == 2 else 1.0
    run = started(tmp_path, case.phase, case.processes, stay_secs=stay_secs)
    run.send(case.number)
    limit_secs, kept = SAVED_LIMIT_SECS, None
    time.sleep(1.2 * COPY_SECS if case.times == 2 else 0)
    if case.times == 2 and any(map(run.is_running, range(len(run.pids)))):
        kept = newest_in(tmp_path / "run")
        limit_secs = AT_ONCE_SECS
        run.send(case.number)
    assert run.codes(limit_secs) == [CODES[case.number]] * len(run.pids), logs(tmp_path)
    told = " ".join(logs(tmp_path).split())
    assert "Traceback" not in told
    step = newest_in(tmp_path / "run")  # It can be read, so the last checkpoint is whole.
    if case.phase in BEFORE_TRAINING:
        assert step == 0
        assert f"Ended by {case.number.name}. " in told or "Interrupted." in told
    elif case.times == 2:
        assert step == kept
        assert (step > 0) == (case.phase != FIRST_STEP)
    else:
        assert step == int(re.search(r"Stopped at step ([\d,]+)", told)[1].replace(",", "")) > 0
        assert "Run the same command again to resume." in told


def assert_saved_where_it_stopped(run, folder):
    assert run.codes(SAVED_LIMIT_SECS) == [42] * len(run.pids), logs(folder)
    stopped = re.search(r"Stopped at step ([\d,]+)", (folder / "log_0").read_text())
    step = newest_in(folder / "run")
    assert step == int(stopped[1].replace(",", ""))


@pytest.mark.parametrize(
    ("num_processes", "copy"),
    [(1, signal.SIGHUP), pytest.param(2, signal.SIGTERM, marks=pytest.mark.long)],
)
def test_a_copy_of_a_signal_does_not_keep_a_run_from_saving(num_processes, copy, tmp_path):
    # A service manager and the launcher send the same signal, and systemd also SIGHUP.
    run = started(tmp_path, "loop", num_processes)
    for number in (signal.SIGTERM, copy):
        run.send(number)
        time.sleep(0.1)
    assert_saved_where_it_stopped(run, tmp_path)


@pytest.mark.long
def test_a_host_that_is_signalled_after_another_saves_with_it(tmp_path):
    run = started(tmp_path, "last save", 2, stay_secs=2)  # Process 0 has signalled itself.
    run.send(signal.SIGTERM, [1])
    assert_saved_where_it_stopped(run, tmp_path)


# Python has put the default handlers back when it removes the objects of a module.
LAST = """
import os, signal, sys
from launch import signals
signals.begin()
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):
        for number in (1, 2, 10, 15): kill(pid, number)
        write(1, b'last')
last = Last()
sys.exit(43)
"""
AT_EXIT = """
import atexit, signal
from launch import cli
atexit.register(signal.raise_signal, signal.SIGINT)
cli.run(lambda: 0, joins_cluster=lambda: False)
"""


@pytest.mark.parametrize(("code", "expected"), [(LAST, (43, "last", "")), (AT_EXIT, (130, "", ""))])
def test_a_signal_after_the_work_of_a_command_keeps_its_exit_code(code, expected):
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == expected


def test_a_run_under_nohup_survives_the_end_of_its_terminal(tmp_path):
    run = started(tmp_path, "loop", ignored=[signal.SIGHUP])
    run.send(signal.SIGHUP)
    time.sleep(1)
    assert run.is_running()
    run.send(signal.SIGTERM)
    assert run.codes(SAVED_LIMIT_SECS) == [42]


class SignallingSplit:
    """A split that signals this process when its second batch is taken for the `at`-th time."""

    in_memory = False

    def __init__(self, split, at):
        self.split, self.at, self.times = split, at, 0

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        if 100 in indices:
            self.times += 1
            if self.times == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
        return self.split.take(indices)


@pytest.mark.parametrize(
    ("at", "step", "validation"),
    # With a validation split, the test split is scored at the end only.
    [(1, 6, 0), pytest.param(2, 12, 0, marks=pytest.mark.long), (1, 12, 0.2)],
)
def test_a_signal_stops_an_evaluation_which_the_resumed_run_makes_up_for(
    tmp_path, at, step, validation
):
    experiment = Experiment.from_dict(
        dict(
            **dict(num_members=2, steps=12, steps_per_call=3, execution="loop"),
            data=dict(global_batch_size=32, std=(16.0,), validation=validation),
            model=dict(name="mlp", hidden_sizes=(8,)),
            evaluation=dict(every_steps=6, global_batch_size=100),
        )
    )
    digits = open_source(experiment.data)
    silent, source = (
        dataclasses.replace(digits, test=SignallingSplit(digits.test, each)) for each in (0, at)
    )
    whole = train(experiment, tmp_path / "whole", source=silent)
    stopped = train(experiment, tmp_path / "run", source=source)
    assert (stopped.signal, stopped.step, stopped.scores) == (signal.SIGTERM, step, None)
    resumed = train(experiment, tmp_path / "run", source=silent)
    assert resumed.scores.ensemble == whole.scores.ensemble
    lines = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("whole", "run")]
    assert untimed(lines[0]) == untimed(lines[1])
    # The command again, after the end, changes nothing.
    train(experiment, tmp_path / "run", source=silent)
    assert untimed((tmp_path / "run/metrics.jsonl").read_text()) == untimed(lines[0])


def untimed(lines):
    """Records of metrics without what depends on the clock."""
    records = [json.loads(line) for line in lines.splitlines()]
    return [{name: r[name] for name in r if "per_second" not in name} for r in records]
