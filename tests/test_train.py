"""Training: what a workdir holds, resuming, and that nothing is compiled or transferred twice."""

import errno
import functools
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commands import wait_for
from dist_ens.callbacks import STOP, JsonLines, RunInfo, json_lines
from dist_ens.checkpoint import Checkpoints, read_members
from dist_ens.checkpoint.manifest import Manifest
from dist_ens.experiment import DataConfig, Experiment, OwnParts, open_source
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ExitCode, RunError, SaveError, UserError
from dist_ens.layout import Layout
from dist_ens.losses import softmax_cross_entropy
from dist_ens.report.files import read_metrics
from dist_ens.sampling import Order
from dist_ens.storage import Disk
from dist_ens.training.runner import MetricsReader
from saving import assert_same, reader, rewrite, save, shapes_of, steps_in


def experiment(**changes):
    values = {
        "num_members": 4,
        "steps": 24,
        "steps_per_call": 4,
        "execution": "vmap",
        "data": {"global_batch_size": 32, "std": (16.0,)},
        "model": {"name": "mlp", "hidden_sizes": (16,)},
        "optimizer": {"name": "adam", "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 8},
        "evaluation": {"global_batch_size": 100},
        "logging": {"every_steps": 8},
    }
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return Experiment.from_dict(values)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_scores_its_metrics_and_its_checkpoints(tmp_path):
    trained = train(experiment(evaluation={"every_steps": 8}), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["num_members"]) == (24, 4)
    assert summary["mesh"] == {"ensemble": 4, "data": 2}
    assert summary["seconds"] > 0
    assert summary["member_examples_per_second"] > 0
    assert summary["test"] == trained.scores.ensemble
    assert set(summary["test"]) >= {"accuracy", "nll", "brier", "ece", "aurc", "disagreement"}
    for scores, name in (("test", "nll"), ("mean_member", "accuracy")):
        low, high = summary[f"{scores}_interval"][name]
        assert low < summary[scores][name] < high
    assert [m["member_id"] for m in summary["members"]] == [0, 1, 2, 3]
    assert summary["test"]["nll"] < np.mean([m["nll"] for m in summary["members"]])
    training = [line for line in lines(tmp_path) if "train/loss" in line]
    tests = [line for line in lines(tmp_path) if "test/nll" in line]
    assert [line["step"] for line in training] == [8, 16, 24]
    assert [line["step"] for line in tests] == [8, 16, 24]
    assert tests[-1]["test/nll"] == summary["test"]["nll"]
    assert tests[-1]["test/nll/member_03"] == summary["members"][3]["nll"]
    of_members = [training[0][f"train/loss/member_0{i}"] for i in range(4)]
    assert training[0]["train/loss"] == pytest.approx(np.mean(of_members))
    assert steps_in(tmp_path) == [16, 24]


def test_evaluation_and_saving_come_at_the_first_call_boundary_at_or_after_their_step(tmp_path):
    # Calls end at 5, 10, 15, 20, 23. Every 7 steps: 7 -> 10, 14 -> 15, 21 -> 23.
    asked = {"evaluation": {"every_steps": 7}, "checkpoint": {"every_steps": 7, "keep": 9}}
    train(experiment(steps=23, steps_per_call=5, **asked), tmp_path)
    assert [line["step"] for line in lines(tmp_path) if "test/nll" in line] == [10, 15, 23]
    assert steps_in(tmp_path) == [10, 15, 23]


def test_epochs_end_and_are_evaluated_at_the_step_that_sees_their_last_example(tmp_path):
    # A fold leaves 1437 - 288 = 1149 examples: 2.298 batches of 500 are an epoch. Two epochs are
    # 4.596 steps. So 1.5 epochs are 3.447 steps, and 3 are 6.894.
    changes = {
        "steps": None,
        "steps_per_call": 1,
        "data": {"global_batch_size": 500, "std": (16.0,), "examples": "kfold", "num_folds": 5},
        "evaluation": {"every_epoch": True},
    }
    ended = [train(experiment(epochs=epochs, **changes), tmp_path).step for epochs in (1.5, 3.0)]
    assert ended == [4, 7]
    assert [line["step"] for line in lines(tmp_path) if "test/nll" in line] == [3, 4, 5, 7]


@pytest.mark.slow
def test_a_run_that_goes_on_ends_as_one_never_stopped(tmp_path):
    def run(steps, name):  # a network with a state of its own and keys
        model = {"name": "mlp_bn_dropout", "hidden_sizes": (16,), "dropout_rate": 0.5}
        optimizer = {"schedule": "linear", "schedule_steps": 20}  # which `steps` does not change
        changes = {"model": model, "optimizer": optimizer, "evaluation": {"every_steps": 8}}
        return train(experiment(steps=steps, **changes), tmp_path / name)

    whole = run(24, "whole")
    for steps in (10, 17, 24):  # none of the first two at the end of a whole call
        resumed = run(steps, "parts")
    assert resumed.step == 24
    assert_same(whole.state, resumed.state)
    assert resumed.scores == whole.scores
    names = {"step", "train/loss", "train/loss/member_02", "test/nll"}
    common, parts = (
        [{name: line[name] for name in names & line.keys()} for line in lines(tmp_path / folder)]
        for folder in ("whole", "parts")
    )
    # The parts' lines of steps 10 and 17, where they ended, are their own.
    assert [line for line in parts if line in common] == common


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, trained once for all that only read it."""
    workdir = tmp_path_factory.mktemp("finished")
    train(experiment(), workdir)
    return workdir


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "manifest.json"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(finished, tmp_path, name):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "checkpoints" / "24" / name).write_bytes(b"")
    with pytest.raises(RunError, match=r"checkpoints/24 is damaged.* Give step=16 \(--step=16 on"):
        open_finished(run)
    assert open_finished(run, step=16).step == 16


READ_BY_ORBAX = """
import sys
import numpy, orbax.checkpoint
state = orbax.checkpoint.StandardCheckpointer().restore(sys.argv[1])
assert all(isinstance(leaf, numpy.ndarray) for leaf in state.values())
numpy.savez(sys.argv[2], **state)
"""


def test_orbax_alone_reads_a_checkpoint_where_devices_are_fewer(finished, tmp_path):
    assert open_finished(finished).ensemble.layout.mesh.size > 1
    saved, read = finished / "checkpoints" / "24" / "state", tmp_path / "state.npz"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = [sys.executable, "-c", READ_BY_ORBAX, saved, read]
    subprocess.run(words, env=environment, check=True)
    members = read_members(finished).leaves
    with np.load(read) as arrays:
        assert members.keys() == {*arrays}
        for name, leaf in members.items():
            np.testing.assert_array_equal(arrays[name], leaf)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_is_restored_as_the_kind_that_it_was(tmp_path, impl):
    layout = Layout.make(4)
    state = layout.put({"key": jax.random.split(jax.random.key(1, impl=impl), 4)}, "members")
    save(tmp_path, state)
    restored = reader(tmp_path, 1).state(shapes_of(state))
    assert shapes_of(restored) == shapes_of(state)
    assert_same(restored, state)


def test_the_seed_says_networks_and_order_and_shuffle_whether_there_is_an_order(tmp_path):
    optimizer = {"name": "sgd", "learning_rate": 1e-30}  # networks that stand still
    examples, weights = open_source(DataConfig()).train, []
    for seed, shuffle in [(0, True), (1, True), (0, False)]:
        workdir = tmp_path / f"{seed} {shuffle}"
        of_run = experiment(steps=4, seed=seed, optimizer=optimizer, data={"shuffle": shuffle})
        run = train(of_run, workdir)
        weights.append(np.asarray(jax.tree.leaves(run.state.params)[-1]))
        # What they lose in the only call says which examples it held.
        order = Order(1437, 32, shuffle)
        batch = examples.take(order.indices(order.cursor(seed, range(4)), np.arange(32)).ravel())
        logits = run.ensemble.apply(run.state, batch["inputs"])
        losses = jax.vmap(softmax_cross_entropy, (0, None))(logits, batch["labels"])
        assert lines(workdir)[0]["train/loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert not np.array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])


def test_a_finished_run_is_scored_again_and_keeps_its_pace(finished):
    files = [finished / "summary.json", finished / "metrics.jsonl"]
    before = [file.read_bytes() for file in files]
    assert train(experiment(), finished).step == 24
    assert [file.read_bytes() for file in files] == before


def test_a_run_goes_on_with_another_layout_and_execution(finished, tmp_path):
    train(experiment(steps=8), tmp_path)
    moved = train(experiment(layout={"ensemble_axis": 1}, execution="unroll"), tmp_path)
    assert moved.ensemble.layout.data_axis == 8
    found, expected = jax.device_get((moved.state.params, open_finished(finished).state.params))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(assert_close, found, expected)


def compilations(records):
    """Messages of XLA having compiled an update."""
    return [r for r in records if "Finished XLA compilation of jit(update)" in r.getMessage()]


def test_the_update_compiles_once_and_once_more_for_a_shorter_last_call(tmp_path, caplog):
    # 1437 examples are no multiple of 32, nor the 360 test examples of 100.
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train(experiment(steps=26, evaluation={"every_steps": 8}), tmp_path)
    assert len(compilations(caplog.records)) == 2


def test_a_workdir_in_which_a_run_is_training_is_refused(tmp_path, monkeypatch):
    with Checkpoints(tmp_path).open({}), monkeypatch.context() as patch:
        # What the folder holds may change until the other run ends, so nothing of it is read.
        patch.setattr("dist_ens.checkpoint.checkpoints.OpenCheckpoints", None)
        with pytest.raises(UserError, match="^Another run is training in .*Wait for it, stop it"):
            train(experiment(), tmp_path)
    assert train(experiment(steps=4), tmp_path).step == 4


def steps_of(folder):
    return [record["step"] for record in read_metrics(Disk(folder))]


def test_metrics_that_cannot_be_written_stay_in_memory_and_are_told_once(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(json_lines, "_EVERY_SECS", 0.01)
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.begin(RunInfo(None, [0], 0, 8, 8))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(Disk, "write", side_effect=full):
        writer.write(1, {"train/loss": 0.5})
        wait_for(lambda: "stay in memory" in caplog.text, lambda: caplog.text)
        writer.write(2, {"train/loss": 0.5})
        time.sleep(0.1)
        with pytest.raises(SaveError, match=r"^The metrics could not be written .*: no space left"):
            writer.sync()
    [told] = [message for message in caplog.messages if "metrics" in message]
    assert told.endswith(
        "metrics.jsonl: no space left on device. They stay in memory, and the next record tries "
        "again. Free some space there."
    )
    writer.write(3, {"train/loss": 0.5})
    wait_for(lambda: steps_of(tmp_path) == [1, 2, 3], lambda: steps_of(tmp_path))
    writer.write(4, {"train/loss": 0.5})
    writer._has_ended.set()
    with mock.patch.object(Disk, "write", side_effect=full), pytest.raises(SaveError) as raised:
        writer.close()
    assert raised.value.exit_code == ExitCode.DISK_FULL


def test_metrics_are_in_parts_while_a_run_lasts_and_in_one_file_at_its_end(tmp_path, monkeypatch):
    path, parts = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.parts"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 9}\n')
    for first in (2, 4):  # The first one is killed.
        writer = JsonLines(path)
        writer.begin(RunInfo(None, [0], first, 8, 8))
        assert steps_of(tmp_path) == [*range(1, first + 1)]
        for step in range(first + 1, 7):
            writer.write(step, {})
            if step > 3:
                writer.sync()
        assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
        writer._has_ended.set()
    assert sorted(part.name for part in parts.iterdir()) == ["4", "5"]
    writer._put_together()
    parts.mkdir()
    (parts / "4").write_text('{"step": 5}\n')  # A kill came before it was deleted.
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    (parts / "4").unlink()
    path.unlink()  # What a run has written before is not missed.
    writer.write(7, {})
    writer.close()
    assert (steps_of(tmp_path), parts.exists()) == ([7], False)
    assert path.read_text() == '{"step": 7}\n'


def test_a_run_does_not_wait_for_the_server_of_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_EVERY_SECS", 0.01)
    writer, goes_on, written = JsonLines(tmp_path / "metrics.jsonl"), threading.Event(), Disk.write
    writer.begin(RunInfo(None, [0], 0, 8, 8))

    def waiting(self, name, content):
        assert goes_on.wait(60)
        written(self, name, content)

    with mock.patch.object(Disk, "write", waiting):
        for step in range(1, 6):
            writer.write(step, {})
            time.sleep(0.02)
        goes_on.set()
        writer.close()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_the_first_call_has_ended_before_the_second_is_dispatched(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reader = MetricsReader(1, 0, lambda *_: None, dict)
    for step, secs in ((0, 50), (10, 3)):
        now[0] += secs  # which the call takes before it returns, as in waves
        reader.dispatched(step, step + 10, {"loss": jnp.zeros((10, 1))})
    reader.catch_up()
    assert reader.steps_per_second() == 10 / 3


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_before_there_is_anything_to_lose_is_obeyed_at_once(tmp_path, monkeypatch):
    interrupt = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr("dist_ens.training.data.feed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(experiment(), tmp_path)


@pytest.mark.usefixtures("interruptible")
def test_a_run_that_is_stopped_saves_its_last_call_and_what_that_left(tmp_path, monkeypatch):
    class Stops(MetricsReader):
        def dispatched(self, previous_step, step, metrics):
            super().dispatched(previous_step, step, metrics)
            if step == 16:
                signal.raise_signal(signal.SIGINT)

        def catch_up(self, last_step=math.inf):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.3)  # the run has left its loop by then
            super().catch_up(last_step)

    monkeypatch.setattr("dist_ens.training.runner.MetricsReader", Stops)
    trained = train(experiment(steps=10**6, logging={"every_steps": 1}), tmp_path)
    assert (trained.step, trained.signal) == (16, signal.SIGINT)
    assert (tmp_path / "checkpoints" / "16").is_dir()
    assert lines(tmp_path)[-1]["step"] == 16


def test_nothing_is_transferred_unasked_between_calls(tmp_path, monkeypatch):
    def dispatched(self, previous_step, step, metrics):
        metrics["loss"] + np.ones((4, 4), np.float32)

    monkeypatch.setattr(MetricsReader, "dispatched", dispatched)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(experiment(), tmp_path)


def test_a_run_that_its_scores_end_has_one_line_of_them_for_each_step(tmp_path):
    seen = []

    class EndsAt16:
        def evaluated(self, step, scores):
            seen.append(step)
            return STOP if step == 16 else None

    asked = experiment(evaluation={"every_steps": 8})
    trained = train(asked, tmp_path, parts=OwnParts(callbacks=[EndsAt16()]))
    assert (trained.step, trained.signal) == (16, None)
    assert trained.scores.intervals is not None
    assert seen == [8, 16]
    assert [line["step"] for line in lines(tmp_path) if "test/nll" in line] == [8, 16]
    assert (tmp_path / "checkpoints" / "16").is_dir()


def test_every_callback_is_closed_where_one_of_them_fails(tmp_path):
    closed = []

    class Closes:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            raise OSError(self.name)

    parts = OwnParts(callbacks=[Closes("first"), Closes("last")])
    with pytest.raises(RunError, match=r"^The callback .*Closes.close raised OSError: last"):
        train(experiment(steps=4), tmp_path, parts=parts)
    assert closed == ["first", "last"]


# Nothing is written for what does not fit


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"num_members": 8}, "num_members is 4 there and 8 here"),
        ({"model": {"hidden_sizes": (17,)}}, r"hidden_sizes is \(16,\) there and \(17,\) here"),
        ({"steps": 8}, "The run has 24 steps already, and 8 are asked for"),
    ],
)
def test_another_experiment_is_refused_and_nothing_is_lost(finished, changes, sentence):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=sentence):
        train(experiment(**changes), finished)
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"global_batch_size": 33}}, "global_batch_size=33 and a data axis of 2"),
        ({"model": {"name": "lenet5"}}, "model.hidden_sizes is not an option of lenet5"),
        ({"loss": {"mixup": -1.0}}, "The alpha of mixup must be positive"),
    ],
)
def test_nothing_is_written_for_an_experiment_that_does_not_fit(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        train(experiment(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_record_of_another_version_is_told_in_a_sentence(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    values = json.loads(json.dumps(Manifest.read(Disk(run / "checkpoints" / "24")).run))
    values["experiment"]["loss"] = "categorical"  # as it once was
    rewrite(run / "checkpoints" / "24", run=values)
    with pytest.raises(RunError, match="cannot be read: loss is .* a section.* with that version"):
        train(experiment(steps=32), run)
