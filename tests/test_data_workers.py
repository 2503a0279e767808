"""Worker processes of Grain: one that is killed loses nothing, and none outlives a trainer."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from test_hosts import wait_for
from test_local import begin, is_alive

pytestmark = pytest.mark.faults
ROOT = pathlib.Path(__file__).parent.parent
LIMIT_SECS = 5
SEGMENTS = pathlib.Path("/dev/shm")
# Batches of a megabyte come from two processes, through shared memory.
READING = """
import os, pathlib
import grain, numpy as np
from dist_ens.processes.data_workers import end_with_trainer

HERE = pathlib.Path(__file__).parent

def example(i):
    return {"inputs": np.full(4096, i % 7, np.float32), "labels": np.int32(i % 3)}

def batches():
    rows = grain.MapDataset.range(1000).map(example).repeat().to_iter_dataset()
    options = grain.MultiprocessingOptions(num_workers=2)
    return iter(rows.batch(64).mp_prefetch(options, worker_init_fn=end_with_trainer))

class Notes:
    def __call__(self, info):
        if info.step >= 5:
            (HERE / f"there_{os.getpid()}").touch()
"""
IN_PYTHON = (
    READING
    + """
import signal, sys
import psutil

class KillsAWorker:
    def __call__(self, info):
        if info.step == 20 and not (HERE / "killed").exists():
            (HERE / "killed").touch()
            for child in psutil.Process().children(recursive=True):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()

def main():
    import dist_ens as de, jax, optax
    from absl import flags

    flags.FLAGS(["train"])  # Grain's workers read them.
    name, steps, callback = sys.argv[1], int(sys.argv[2]), globals()[sys.argv[3]]()
    member = de.models.mlp((4096,), 3, hidden_sizes=(8,))
    ensemble = de.Ensemble(member, optax.adam(0.1), de.losses.categorical(3), num_members=2)
    result = de.fit(
        ensemble, batches(), steps=steps, steps_per_call=1, callbacks=[callback],
        checkpoints=de.Checkpoints(HERE / name, every_steps=5), progress=False,
    )
    np.savez(HERE / f"{name}.npz", *jax.tree.leaves(result.state.params))

if __name__ == "__main__":
    main()
"""
)
OF_LOCAL = (
    READING.replace(", worker_init_fn=end_with_trainer", "")
    + """
from ml_collections import ConfigDict

class Reads(Notes):
    def begin(self, run):
        self.batches = batches()

    def __call__(self, info):
        next(self.batches)
        super().__call__(info)

def get_config():
    return ConfigDict(dict(
        num_members=2, steps=10**6, steps_per_call=1, execution="loop",
        data=dict(source="digits", global_batch_size=32, std=(16.0,)),
        model=dict(name="mlp", hidden_sizes=(8,)),
    ))

def make_callbacks(spec):
    return [Reads()]
"""
)


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def check_nothing_is_left(left, segments):
    """Checks that processes and segments of shared memory disappear in time."""
    wait_for(
        lambda: not any(map(is_alive, left)) and {*SEGMENTS.iterdir()} <= segments,
        lambda: f"{[*filter(is_alive, left)]} { ({*SEGMENTS.iterdir()} - segments) }",
        LIMIT_SECS,
    )


def trainer_in(folder):
    """The id of the trainer that has taken some steps."""
    wait_for(lambda: [*folder.glob("there_*")], lambda: (folder / "log_run").read_text())
    [there] = folder.glob("there_*")
    return int(there.name.removeprefix("there_"))


def end(*pids):
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def trainer(folder, *arguments):
    """A trainer in Python, with its output in a file."""
    (folder / "train.py").write_text(IN_PYTHON)
    with (folder / "log_run").open("w") as log:
        return subprocess.Popen(
            [sys.executable, folder / "train.py", *arguments],
            env=COMMAND_ENVIRONMENT
            | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_xla.flags(1)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_the_workers_of_a_trainer_end_with_it(tmp_path):
    segments = {*SEGMENTS.iterdir()}
    process = trainer(tmp_path, "run", "1000000", "Notes")
    left = []
    try:
        assert trainer_in(tmp_path) == process.pid
        left = descendants(process.pid)
        assert len(left) >= 3  # Two workers, and Python's own process for shared memory.
        assert {*SEGMENTS.iterdir()} - segments
        process.kill()
        process.wait()
        check_nothing_is_left(left, segments)
    finally:
        end(process.pid, *left)


def test_a_run_whose_worker_is_killed_ends_and_goes_on_where_it_was(tmp_path):
    for name, code in (("run", 1), ("run", 0), ("whole", 0)):
        ended = trainer(tmp_path, name, "60", "KillsAWorker").wait(300)
        told = (tmp_path / "log_run").read_text()
        assert ended == code, told
        assert ("exit code -9" in told) == bool(code)
    run, whole = (np.load(tmp_path / f"{name}.npz") for name in ("run", "whole"))
    assert [array.tobytes() for array in run.values()] == [a.tobytes() for a in whole.values()]


@pytest.mark.parametrize("what", ["trainer", "launcher"])
def test_the_workers_of_a_process_of_local_end_with_it(what, tmp_path):
    (tmp_path / "config.py").write_text(OF_LOCAL)
    segments = {*SEGMENTS.iterdir()}
    launcher = begin(tmp_path, "run", 1, "--max_restarts=0")
    left = []
    try:
        pid = trainer_in(tmp_path)
        left = [pid, *descendants(pid)]
        assert len(left) >= 4
        os.kill(pid if what == "trainer" else launcher.pid, signal.SIGKILL)
        launcher.wait()
        # Without its launcher, the trainer saves first.
        wait_for(lambda: not is_alive(pid), lambda: (tmp_path / "log_run").read_text())
        check_nothing_is_left(left, segments)
    finally:
        end(launcher.pid, *left)
