"""Loggers to TensorBoard, W&B and MLflow, whose runs are read back by their own libraries."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import optax
import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dist_ens as de
from commands import dist_ens, start
from dist_ens.callbacks import MLflow, TensorBoard, WandB, logger
from dist_ens.callbacks.logger import Logger
from dist_ens.experiment.loggers import loggers_below
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.errors import UserError
from dist_ens.processes import cluster
from dist_ens.storage import place_of
from test_bad_input import CLASSES, DATA, apply, classifier, fit, init
from test_signals import untimed

SAVED, KILLED, STEPS = 20, 30, 40
OFFLINE = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
    "WANDB_PROJECT": "digits",
}
TRAIN = [
    *("train", "--config.num_members=4", f"--config.steps={STEPS}", "--config.execution=loop"),
    *("--config.steps_per_call=2", "--config.logging.every_steps=2"),
    *(f"--config.checkpoint.every_steps={SAVED}", "--config.evaluation.every_steps=10"),
    "--config.model.hidden_sizes=(8,)",
]
ALL = "--config.logging.loggers=('tensorboard','wandb','mlflow')"
CONFIG = """
import os, pathlib, runpy, signal, time
import psutil

get_config = runpy.run_path("configs/digits.py")["get_config"]
"""
# Step 20 is saved, and the tools have stored steps after it.
KILLS = f"""
class Kill:
    def begin(self, run):
        self.first_step = run.first_step

    def __call__(self, info):
        if info.step == {KILLED} and not self.first_step:
            while not [*pathlib.Path(os.environ["RUN"]).glob("checkpoints/*{SAVED}*/manifest*")]:
                time.sleep(0.05)
            time.sleep(1)
            os.kill(os.getpid(), {signal.SIGKILL:d})

make_callbacks = lambda spec: [Kill()]
"""
# The disk is full, the process that writes the files of W&B and the database of MLflow are gone.
BREAKS = """
def breaks(info):
    if info.step == 22:
        time.sleep(1)
        for fd in pathlib.Path("/proc/self/fd").iterdir():
            if "tfevents" in str(fd.resolve()):
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(fd.name))
        [child] = [c for c in psutil.Process().children() if c.name() == "wandb-core"]
        child.kill()
        (pathlib.Path(os.environ["RUN"]) / "mlruns/mlflow.db").unlink()

make_callbacks = lambda spec: [breaks]
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


def words(folder, own, workdir, *more):
    """Words of a command that trains a config with own callbacks."""
    (folder / "own.py").write_text(CONFIG + own)
    return [*TRAIN, f"--config={folder / 'own.py'}", f"--workdir={workdir}", *more]


def of_tensorboard(folder):
    """The steps and values of each series."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def records_of_wandb(folder):
    """The records in the files of W&B, in the order of the files."""
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file]
        lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        yield from map(json.loads, lines.splitlines())


def of_wandb(folder):
    found = {}
    for record in records_of_wandb(folder):
        if record["type"] == "history":
            for name, value in record["history"]["item"].items():
                found.setdefault(name, []).append((record["history"]["step"]["num"], value))
    return {name: rows for name, rows in found.items() if not name.startswith("_")}


def client_of(folder):
    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlruns/mlflow.db")


def runs_of_mlflow(folder, experiment="Default"):
    client = client_of(folder)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def of_mlflow(folder, experiment="Default"):
    [run] = runs_of_mlflow(folder, experiment)
    client = client_of(folder)
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


TOOLS = {
    "tensorboard": lambda folder: of_tensorboard(folder / "tensorboard"),
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


def told_in(caplog):
    """The warnings that a tool has failed."""
    return [m for m in caplog.messages if "logs nothing more" in m]


def expected(records, members=False):
    """The series that a tool should hold, computed from the records of a run."""
    found = {}
    for record in records:
        values = {name: value for name, value in record.items() if name != "step"}
        parts = {}
        for name, value in values.items():
            if "/member_" in name:
                parts.setdefault(name.partition("/member_")[0], []).append(value)
        for base, each in parts.items():
            values |= {
                f"{base}/median": np.median(each),
                f"{base}/p05": np.percentile(each, 5),
                f"{base}/p95": np.percentile(each, 95),
            }
        for name, value in values.items():
            if members or "/member_" not in name:
                found.setdefault(name, []).append((record["step"], value))
    return found


def assert_same(found, series):
    assert found.keys() == series.keys()
    for name, rows in series.items():
        assert [step for step, _ in found[name]] == [step for step, _ in rows], name
        values = [value for _, value in rows]
        np.testing.assert_allclose([value for _, value in found[name]], values, rtol=1e-6)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder of a run with all loggers that was killed and resumed, and what they held then."""
    folder = tmp_path_factory.mktemp("resumed")
    run = folder / "run"
    command = words(folder, KILLS, run, ALL)
    (run / "mlruns").mkdir(parents=True)
    client_of(run).search_experiments()  # It takes seconds to make a database.
    environ = [*OFFLINE.items(), ("RUN", str(run))]
    [code] = start(command, folder=folder, name="killed", environ=environ).codes()
    assert code == -signal.SIGKILL
    held = {name: read(run) for name, read in TOOLS.items()}
    ended = dist_ens(*command, environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert f"resuming from step {SAVED}" in " ".join(ended.stdout.split())
    assert "logs nothing more" not in ended.stderr
    return run, held


@pytest.mark.parametrize("tool", TOOLS)
def test_a_run_that_was_killed_and_resumed_has_each_step_once(resumed, tool):
    run, held = resumed
    # Otherwise no step could come twice.
    assert max(step for step, _ in held[tool]["train/loss"]) > SAVED
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = TOOLS[tool](run)
    assert_same(found, expected(records))
    assert [step for step, _ in found["train/loss"]] == [*range(2, STEPS + 1, 2)]
    assert [step for step, _ in found["test/nll/median"]] == [*range(10, STEPS + 1, 10)]


def test_a_config_gives_its_settings_to_the_tools(resumed):
    run, _ = resumed
    [found] = runs_of_mlflow(run)
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optimizer/name"] == "adam"
    assert found.data.params["num_members"] == "4"
    [first, second] = [each["run"] for each in records_of_wandb(run) if each["type"] == "run"]
    assert first["run_id"] == second["run_id"]
    assert second["config"]["update"]["optimizer/name"] == "adam"
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    [text, _] = events.Tensors("settings/text_summary")
    assert '"optimizer/name": "adam"' in text.tensor_proto.string_val[0].decode()


def test_tools_that_fail_in_the_middle_are_told_once_and_change_no_bit(tmp_path, resumed):
    run = tmp_path / "run"
    (run / "mlruns").mkdir(parents=True)
    shutil.copy(resumed[0] / "mlruns/mlflow.db", run / "mlruns")
    ended = dist_ens(
        *words(tmp_path, BREAKS, run, ALL), environ=[*OFFLINE.items(), ("RUN", str(run))]
    )
    assert ended.returncode == 0, ended.stderr
    told = re.findall(
        r"(\w+) logs nothing more, and the run continues without it: (.+)", ended.stderr
    )
    assert sorted(name for name, _ in told) == ["MLflow", "TensorBoard", "WandB"], ended.stderr
    assert dict(told)["TensorBoard"] == "no space left on device."
    assert dict(told)["MLflow"] == "attempt to write a readonly database."
    assert untimed((run / "metrics.jsonl").read_text()) == untimed(
        (resumed[0] / "metrics.jsonl").read_text()
    )
    # What was logged before is still there.
    assert [step for step, _ in of_tensorboard(run / "tensorboard")["train/loss"]][:5] == [
        *(2, 4, 6, 8, 10)
    ]


def test_a_tool_that_cannot_begin_is_told_once_and_changes_no_bit(tmp_path, caplog):
    (file := tmp_path / "file").write_text("")
    loggers = [
        TensorBoard(file),
        WandB(folder=file),
        MLflow(tracking_uri=f"sqlite:///{file}/mlflow.db"),
    ]
    alone = fit(classifier(), log_every=1)
    found = fit(classifier(), log_every=1, callbacks=loggers)
    np.testing.assert_array_equal(alone.state.params["w"], found.state.params["w"])
    told = told_in(caplog)
    assert {message.split()[0] for message in told} == {"TensorBoard", "WandB", "MLflow"}
    assert len(told) == 3
    assert all(re.fullmatch(r"[^.\n]+: [^\n]+\.", message) for message in told), told


def test_a_server_that_does_not_answer_keeps_no_run_waiting(caplog, monkeypatch):
    monkeypatch.setattr(logger, "_END_SECS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # No warnings into later tests.
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert fit(classifier(), callbacks=[MLflow(tracking_uri=uri)]).step == 8
    [told] = told_in(caplog)
    assert told.startswith("MLflow logs nothing more, and the run continues without it: no answer")


def test_a_run_that_an_exception_ends_has_failed(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def breaks(info):
        if info.step == 4:
            raise RuntimeError("broken")

    try:
        fit(classifier(), callbacks=[MLflow(tracking_uri=uri), breaks], steps_per_call=1)
    except RuntimeError:  # A sound run within it has not failed.
        fit(classifier(), callbacks=[MLflow(tracking_uri=uri)])
    found = MlflowClient(uri).search_runs(["0"])
    assert [run.info.status for run in found] == ["FINISHED", "FAILED"]


class _Hangs(Logger):
    """A logger whose tool does not answer its first record until it is told to."""

    def __init__(self):
        super().__init__(members=False)
        self.answers, self.seen = threading.Event(), []

    def open(self, run):
        self.run = len(self.seen)
        self.seen.append([])

    def log(self, step, record):
        self.seen[self.run].append(step)
        self.answers.wait(60)

    def end(self, failed):
        self.seen[self.run].append("end")


def test_a_tool_that_hung_in_one_run_logs_nothing_of_it_into_the_next(monkeypatch):
    monkeypatch.setattr(logger, "_END_SECS", 0.5)
    hangs = _Hangs()
    fit(classifier(), callbacks=[hangs], log_every=1)
    first = hangs.seen[0].copy()
    hangs.answers.set()
    fit(classifier(), callbacks=[hangs], log_every=1)
    assert len(first) == 1
    assert hangs.seen[1] == [*range(1, 9), "end"]


def test_a_tool_that_hangs_delays_one_save(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "_SAVE_SECS", 1.0)
    hangs = threading.Event()
    hung = MLflow(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(hung, "open", lambda run: None)
    monkeypatch.setattr(hung, "log", lambda step, record: hangs.wait(60))
    monkeypatch.setattr(hung, "flush", lambda: None)
    monkeypatch.setattr(hung, "end", lambda failed: None)
    waited = []

    def sync():
        begun = time.perf_counter()
        Logger.sync(hung)
        waited.append(time.perf_counter() - begun)
        if len(waited) == 5:  # The tool answers from now on.
            hangs.set()

    monkeypatch.setattr(hung, "sync", sync)
    saved = de.Checkpoints(tmp_path / "run", every_steps=1, every_secs=None)
    fit(classifier(), log_every=1, callbacks=[hung], checkpoints=saved, steps_per_call=1)
    assert len(waited) >= 8
    assert 0.9 < sum(waited) < 4  # Five saves that each wait would take 5.


def test_members_are_series_of_their_own_on_request_and_loggers_may_change(tmp_path, resumed):
    run, _ = resumed
    uri = f"sqlite:///{run}/mlruns/mlflow.db"
    loggers = [
        TensorBoard(tmp_path / "tensorboard", members=True),
        WandB("own", folder=tmp_path, members=True),
        MLflow(experiment="own", tracking_uri=uri, members=True),
    ]
    ensemble = de.Ensemble(
        (init, apply),
        lambda hyper: optax.sgd(hyper["learning_rate"]),
        de.losses.categorical(CLASSES),
        num_members=2,
        hyper={"learning_rate": [0.5, 0.25]},
    )
    options = {"log_every": 2, "eval_data": DATA, "steps_per_call": 1}
    saved = de.Checkpoints(tmp_path / "run", every_steps=4)
    result = fit(ensemble, steps=6, callbacks=loggers, checkpoints=saved, **options)
    series = expected(result.history, members=True)
    assert [step for step, _ in series["train/loss/member_01"]] == [2, 4, 6]
    assert_same(of_tensorboard(tmp_path / "tensorboard"), series)
    assert_same(of_wandb(tmp_path), series)
    assert_same(of_mlflow(run, "own"), series)
    [found] = runs_of_mlflow(run, "own")
    assert found.data.params["hyper/learning_rate/member_01"] == "0.25"
    assert found.data.params["num_members"] == "2"
    assert fit(ensemble, steps=8, callbacks=[], checkpoints=saved, **options).step == 8


def test_a_logger_of_two_runs_makes_two_runs_of_a_tool(resumed):
    run, _ = resumed
    logger = MLflow(experiment="two", tracking_uri=f"sqlite:///{run}/mlruns/mlflow.db")
    for _ in range(2):
        fit(classifier(), callbacks=[logger], log_every=8)
    assert [each.data.metrics.keys() >= {"train/loss"} for each in runs_of_mlflow(run, "two")] == [
        *(True, True)
    ]


def test_only_process_0_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "is_main", lambda: False)
    fit(classifier(), callbacks=[TensorBoard(tmp_path / "logs")])
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (lambda: TensorBoard("logs"), "tensorboardX"),
        (WandB, "wandb"),
        (MLflow, "mlflow"),
        (MLflow, "sqlalchemy"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, make, module):
    for name in [module, *(each for each in sys.modules if each.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"not installed. Install it with .*'dist-ens\[loggers\]'"):
        make()


def test_the_loggers_of_a_config_are_known_and_log_below_a_folder_on_a_disk():
    with pytest.raises(UserError, match=r"logging.loggers.*'tensorbord'"):
        Experiment.from_dict({"steps": 1, "logging": {"loggers": ["tensorbord"]}})
    experiment = Experiment.from_dict({"steps": 1, "logging": {"loggers": ["mlflow"]}})
    with pytest.raises(UserError, match=r"must be on a disk: got s3://bucket/run"):
        loggers_below(place_of("s3://bucket/run", "workdir"), experiment)
