"""What a signal does to a training command, in real processes, wherever it arrives."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

import fast_xla
import test_hosts
from conftest import COMMAND_ENVIRONMENT
from dist_ens.checkpoint import read_newest
from dist_ens.config import Experiment
from dist_ens.data import Split, open_source
from dist_ens.experiment.train import train

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_SECS = 120
# The config says on the disk where the run is, and stays there for a while.
CONFIG = """
import pathlib, time
import jax, jax.numpy as jnp, numpy as np
from dist_ens.config import Experiment

HERE = pathlib.Path(__file__).parent
PHASE = "{phase}"

def reach(phase, secs=0):
    if phase == PHASE and not (HERE / "there").exists():
        (HERE / "there").touch()
        time.sleep(secs)

def get_config():
    reach("config", 600)
    return Experiment.from_dict(dict(
        num_members=2, steps=10**6, steps_per_call=1,
        data=dict(source="digits", global_batch_size=32, std=(16.0,)),
        model=dict(name="mlp", hidden_sizes=(8,)),
        optimizer=dict(name="sgd", learning_rate=1e-2),
        logging=dict(every_steps=5),
        evaluation=dict(every_steps=40),
        checkpoint=dict(every_steps=20),
    )).to_config_dict()

class Slow:
    def __call__(self, info):
        if info.step >= 25:
            reach("loop")
    def evaluated(self, step, scores):
        reach("evaluating", 1)
    def sync(self):
        reach("saving", 1)

def make_callbacks(spec):
    return [Slow()]

if PHASE == "compiling":
    # Hundreds of different operations take XLA a minute. JAX says when it hands them over.
    def lowered(event, secs, fun_name="", **_):
        if event.endswith("jaxpr_to_mlir_module_duration") and fun_name == "jit(update)":
            reach("compiling")

    jax.monitoring.register_event_duration_secs_listener(lowered)

    def make_member(spec):
        def init(key):
            return {{"w": jax.random.normal(key, (64, 10))}}
        def apply(params, inputs):
            x = inputs.reshape(len(inputs), 64)
            for k in range(600):
                x = jnp.sin(x * (k + 1.5)) + jnp.roll(x, k % 7, axis=1) @ jnp.ones((64, 64)) * k
            return x @ params["w"]
        return init, apply
"""


def started(tmp_path, phase, *arguments, before=()):
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(phase=phase))
    command = [
        *(*before, sys.executable, "-m", "launch.train", f"--config={config}"),
        *(f"--workdir={tmp_path / 'run'}", "--config.execution=loop", *arguments),
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=COMMAND_ENVIRONMENT | {"XLA_FLAGS": fast_xla.flags(1), "JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + LIMIT_SECS
    while not (tmp_path / "there").exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)
    return process


def ended(process, tmp_path, secs):
    """Returns the exit code and the log of a process that ends within some seconds."""
    try:
        code = process.wait(secs)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    return code, log


CODES = {signal.SIGTERM: 42, signal.SIGINT: 130, signal.SIGHUP: 42, signal.SIGUSR1: 42}


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        *((signal.SIGTERM, phase) for phase in ("config", "compiling", "evaluating", "saving")),
        *((signal.SIGINT, phase) for phase in ("compiling", "loop")),
        (signal.SIGHUP, "compiling"),
        (signal.SIGUSR1, "loop"),
    ],
)
def test_a_signal_saves_what_there_is(tmp_path, number, phase):
    process = started(tmp_path, phase)
    if phase == "compiling":
        time.sleep(0.5)  # From Python to XLA.
    process.send_signal(number)
    code, log = ended(process, tmp_path, 20)
    assert code == CODES[number], log
    step, _ = read_newest(tmp_path / "run")
    if phase in ("config", "compiling"):
        assert step == 0
        assert f"Ended by {number.name}. Nothing is lost." in log or "Interrupted." in log
    else:
        assert step == int(re.search(r"Stopped at step ([\d,]+)", log)[1].replace(",", ""))
        assert "Run the same command again to resume." in " ".join(log.split())


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        *((signal.SIGTERM, phase) for phase in ("compiling", "loop", "evaluating", "saving")),
        (signal.SIGINT, "loop"),
        (signal.SIGHUP, "loop"),
    ],
)
def test_a_signal_to_two_processes_stops_both_at_one_step(tmp_path, number, phase):
    (tmp_path / "config.py").write_text(CONFIG.format(phase=phase))
    both = test_hosts.started(tmp_path, 2, "--config.execution=loop")
    test_hosts.wait_for((tmp_path / "there").exists, lambda: test_hosts.log(tmp_path, 0))
    for process in both:
        process.send_signal(number)
    assert test_hosts.codes(both, tmp_path, limit_secs=30) == [CODES[number]] * 2
    told = test_hosts.log(tmp_path, 0)
    assert "Traceback" not in told + test_hosts.log(tmp_path, 1)
    step, _ = read_newest(tmp_path / "run")
    if phase == "compiling":
        assert step == 0
    else:
        assert step == int(re.search(r"Stopped at step ([\d,]+)", told)[1].replace(",", ""))


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGTERM, "loop"), (signal.SIGTERM, "saving"), (signal.SIGINT, "evaluating")],
)
def test_a_second_signal_ends_at_once(tmp_path, number, phase):
    process = started(tmp_path, phase)
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)
    code, _ = ended(process, tmp_path, 5)
    assert code == CODES[number]
    step, _ = read_newest(tmp_path / "run")  # It can be read, so the last checkpoint is whole.
    assert step >= (0 if phase == "saving" else 20)


def test_a_run_under_nohup_survives_the_end_of_its_terminal(tmp_path):
    process = started(tmp_path, "loop", before=["nohup"])
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, _ = ended(process, tmp_path, 20)
    assert code == 42


@dataclasses.dataclass(frozen=True)
class SignallingSplit:
    """A split that sends a signal to this process when its second batch is taken once more.

    Attributes:
        split: Examples.
        times: How often the batch was taken.
        at: The time that sends the signal; 0 for none.
    """

    split: Split
    times: list[int]
    at: int
    in_memory = False

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        if 100 in indices:
            self.times[0] += 1
            if self.times[0] == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
        return self.split.take(indices)


@pytest.mark.parametrize(("at", "step"), [(1, 6), (2, 12)])
def test_a_signal_stops_an_evaluation_which_the_resumed_run_makes_up_for(tmp_path, at, step):
    experiment = Experiment.from_dict(
        {
            "num_members": 2,
            "steps": 12,
            "steps_per_call": 3,
            "execution": "loop",
            "data": {"global_batch_size": 32, "std": (16.0,)},
            "model": {"name": "mlp", "hidden_sizes": (8,)},
            "evaluation": {"every_steps": 6, "global_batch_size": 100},
        }
    )
    digits = open_source(experiment.data)
    silent, source = (
        dataclasses.replace(digits, test=SignallingSplit(digits.test, [0], each))
        for each in (0, at)
    )
    whole = train(experiment, tmp_path / "whole", source=silent)
    stopped = train(experiment, tmp_path / "run", source=source)
    assert (stopped.signal, stopped.step, stopped.scores) == (signal.SIGTERM, step, None)
    resumed = train(experiment, tmp_path / "run", source=silent)
    assert resumed.scores.ensemble == whole.scores.ensemble
    lines = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("whole", "run")]
    assert [untimed(each) for each in lines] == [untimed(lines[0])] * 2


def untimed(lines):
    """Records of metrics without what depends on the clock."""
    records = [json.loads(line) for line in lines.splitlines()]
    return [{name: r[name] for name in r if "per_second" not in name} for r in records]
