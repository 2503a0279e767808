"""Rows of a run that do not wait for each other: a row is killed, and the others go on."""

import json
import os
import random
import signal
import time

import jax
import numpy as np
import psutil
import pytest

from commands import dist_ens, is_alive, start, wait_for
from dist_ens.experiment.loaded import open_finished
from test_local import begin, end_of, finished

# Each step takes some time, so that processes on few cores do not take them from each other.
CONFIG = """
import pathlib, time
from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).parent

class Notes:
    def begin(self, run):
        self._file = open(HERE / f"steps_of_{'_'.join(map(str, run.member_ids))}", "a", buffering=1)

    def __call__(self, info):
        time.sleep(SLEEP)
        print(info.step, file=self._file)

def get_config():
    return ConfigDict(dict(
        num_members=ROWS, steps=STEPS, steps_per_call=1, execution="loop",
        data=dict(source="digits", global_batch_size=32, std=(16.0,)),
        model=dict(name="mlp", hidden_sizes=(8,)),
        optimizer=dict(name="sgd", learning_rate=1e-2),
        checkpoint=dict(every_steps=50),
    ))

def make_callbacks(experiment):
    return [Notes()]
"""


def write_config(folder, members, steps, sleep=0.0):
    text = CONFIG.replace("ROWS", str(members)).replace("STEPS", str(steps))
    (folder / "config.py").write_text(text.replace("SLEEP", str(sleep)))


def steps_taken(folder, row):
    file = folder / f"steps_of_{row}"
    return [*map(int, file.read_text().split())] if file.exists() else []


def process_of_row(launcher, row):
    """Process id of a row of one process; None while it is started again."""
    for child in psutil.Process(launcher.pid).children():
        try:
            if f"--row={row}" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return child.pid
        except psutil.NoSuchProcess:
            continue
    return None


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), lambda: f"{pid} is alive")


@pytest.mark.parametrize(
    ("rows", "steps", "kills", "secs"),
    [(2, 200, 1, 0), pytest.param(8, 10_000, 10, 20, marks=pytest.mark.faults)],
)
def test_rows_go_on_while_another_is_killed(rows, steps, kills, secs, tmp_path):
    write_config(tmp_path, rows, steps, sleep=0.03 if secs else 0.01)
    flags, drawn = [f"--rows={rows}"], random.Random(0)
    launcher = begin(tmp_path, "run", rows, *flags)
    killed, meanwhile = set(), []
    try:
        # After 60 steps there is a checkpoint of step 50 to resume from.
        wait_for(
            lambda: all(len(steps_taken(tmp_path, row)) > 60 for row in range(rows)),
            (tmp_path / "log_run").read_text,
        )
        for _ in range(kills):
            row = drawn.randrange(rows)
            kill(process_of_row(launcher, row))
            killed.add(row)
            before = [len(steps_taken(tmp_path, row)) for row in range(rows)]
            while len(steps_taken(tmp_path, row)) == before[row]:
                assert launcher.poll() is None, (tmp_path / "log_run").read_text()
                time.sleep(0.02)
            after = [len(steps_taken(tmp_path, row)) for row in range(rows)]
            meanwhile += [after[k] - before[k] for k in range(rows) if k != row]
            time.sleep(secs)
    finally:
        code, log = finished(launcher, tmp_path, "run")
    assert code == 0, log
    assert min(meanwhile) > 0  # They went on before the row was back.
    assert log.count("Restart ") == kills
    for row in range(rows):
        taken = steps_taken(tmp_path, row)
        assert sorted({*taken}) == list(range(1, steps + 1))
        assert (len(taken) == steps) is (row not in killed)  # Only killed rows repeat steps.
    write_config(tmp_path, rows, steps)
    words = ["train", f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'alone'}"]
    alone = start(words, folder=tmp_path, name="log_alone", devices=rows)
    assert alone.codes(limit_secs=steps / 10) == [0]
    assert end_of(tmp_path, "run") == end_of(tmp_path, "alone")


@pytest.mark.long
def test_rows_are_joined_when_all_have_ended(tmp_path):
    write_config(tmp_path, 2, 4)
    train = ["train", f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path}", "--rows=2"]
    assert dist_ens(*train, "--row=0").returncode == 0
    assert "Row 1 has no checkpoint in" in dist_ens(*train).stderr
    assert dist_ens(*train, "--row=1", "--config.steps=6").returncode == 0
    six = [*train, "--config.steps=6"]
    assert "has not ended: it is at step 4 of 6." in dist_ens(*six).stderr
    assert dist_ens(*six, "--row=0").returncode == 0
    assert "holds another run: seed is 0 there and 1" in dist_ens(*six, "--config.seed=1").stderr
    ended = dist_ens(*six)
    assert ended.returncode == 0, ended.stderr
    assert "The members of 2 rows are one run now." in ended.stdout
    assert "which no row trains alone" in dist_ens(*six, "--row=0").stderr
    history = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    assert [record["step"] for record in history] == [4, 6, 6]
    losses = [history[1][f"train/loss/member_0{k}"] for k in (0, 1)]
    assert history[1]["train/loss"] == pytest.approx(sum(losses) / 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert history[2]["test/nll"] == summary["test"]["nll"]
    assert (summary["execution"], summary["steps"]) == ("loop", 6)
    assert summary["member_examples_per_second"] > 0
    params = jax.tree.leaves(open_finished(tmp_path).state.params)
    assert {leaf.shape[0] for leaf in params} == {2}


@pytest.mark.long
def test_a_row_that_a_callback_ends_is_joined_with_the_others(tmp_path):
    write_config(tmp_path, 2, 6)
    config = tmp_path / "config.py"
    stops = "return 'STOP' if info.step == 4 and self._first else None".replace(
        "'STOP'", "dist_ens.callbacks.STOP"
    )
    text = config.read_text().replace("import pathlib, time", "import pathlib, time, dist_ens")
    text = text.replace(
        "def begin(self, run):",
        "def begin(self, run):\n        self._first = run.member_ids == [0]",
    )
    config.write_text(text.replace("print(info.step, file=self._file)", stops))
    train = ["train", f"--config={config}", f"--workdir={tmp_path}", "--rows=2"]
    for more in (["--row=0"], ["--row=1"], []):
        ended = dist_ens(*train, *more)
        assert ended.returncode == 0, ended.stderr
    assert open_finished(tmp_path).step == 6
    for row in range(2):
        alone = open_finished(tmp_path / "rows" / f"{row}_of_2")
        assert alone.step == (4, 6)[row]
        of_run = open_finished(tmp_path, member_ids=[row]).state.params
        jax.tree.map(np.testing.assert_array_equal, of_run, alone.state.params)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--row=0"], "Give --rows=NUMBER too"),
        (["--row=2", "--rows=2"], "Row 2 of 2 rows cannot have its share of 4 members"),
        (["--row=0", "--rows=3"], "Row 0 of 3 rows cannot have its share of 4 members"),
    ],
)
def test_rows_that_do_not_divide_the_members_are_told(flags, told, tmp_path):
    write_config(tmp_path, 4, 4)
    train = ["train", f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path}"]
    ended = dist_ens(*train, *flags)
    assert ended.returncode in (2, 3), ended.stderr
    assert told in ended.stderr
