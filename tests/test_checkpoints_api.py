"""`Checkpoints`: when a run is saved, which run a folder holds, and what belongs to one host."""

import errno
import json
import sys
import threading

import jax
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.checkpoint import Checkpoints, StepRecord, notes_on_resuming, read_lineages
from dist_ens.checkpoint.lineage import Event
from dist_ens.checkpoint.manifest import Manifest
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError, UserError
from dist_ens.storage import Disk
from dist_ens.training.cadence import Cadence
from saving import begun, reader, shapes_of, snapshot, state_of, steps_in
from test_cluster import finish, free_port, start
from test_train import experiment
from two_savers import CALLS, RECORD


def record(**changes):
    return {**RECORD, **changes}


def save(checkpoints, scores, **fields):
    """Saves steps with the scores of each by its step, and returns those that are kept."""
    with checkpoints.open(RECORD, **fields) as opened:
        for step, found in scores.items():
            opened.save(snapshot(step, state_of(1.0), scores=found))
    return steps_in(checkpoints.folder)


# When a save is due


def calls(*parts):
    """Calls of the update as `(step after the call, seconds)`, from steps and seconds a step."""
    return [(step, secs) for steps, secs in parts for step in steps]


@pytest.mark.parametrize(
    ("every", "first_step", "hosts", "taken", "due", "readings"),
    [
        # Calls end at 5, 10, 15, 20, 23. Every 7 steps: 7 -> 10, 14 -> 15, 21 -> 23.
        ((7, None), 0, 1, calls(((0, 5, 10, 15, 20, 23), 1)), [10, 15, 23], 0),
        ((7, None), 14, 1, calls(((14, 20, 21), 1)), [21], 0),
        ((None, None), 0, 1, calls((range(100), 1)), [], 0),
        # The first call compiles for 50 s. Then a call takes 4 s: 12 s have passed at 4 and at 7.
        ((None, 10.0), 0, 1, [(0, 0), (1, 50), *calls((range(2, 8), 4))], [4, 7], 7),
        # A save by the step begins the seconds anew. A call takes 2 s: at step 10 it is 18 s since
        # the first call, then 20 s between saves. After step 20 a call takes 9 s: 27 s have passed
        # at step 23, and 9 s later, at 24, 9 s.
        ((10, 25.0), 0, 1, calls((range(1, 21), 2), (range(21, 25), 9)), [10, 20, 23], 24),
        # Several hosts read the clock rarely, and save as one would. The interval begins at step 1.
        # They read when 1, 2, 4, ..., 64 s have passed, at 2, 3, 5, 9, 17, 33, 65, and, as 36 s are
        # left, at 101. That is 9 readings. The next interval begins at 101, and is read as often.
        ((None, 100.0), 0, 2, calls((range(1, 202), 1)), [101, 201], 17),
        # A pace that was too fast postpones a save by less than the interval. At step 33, after
        # 32 s, the clock is read next at 65. From there a call takes 4 s: at 65 it is 160 s.
        ((None, 100.0), 0, 2, calls((range(1, 34), 1), (range(34, 70), 4)), [65], None),
        # A call that took no time says nothing about the pace. The clock is read again at 3, after
        # 90 s, and, as 10 s are left and a step took 45 s on average, at 4.
        ((None, 100.0), 0, 2, [(1, 0), (2, 0), *calls((range(3, 6), 90))], [4], None),
    ],
)
def test_a_save_is_due_by_steps_and_by_the_clock(
    monkeypatch, every, first_step, hosts, taken, due, readings
):
    now, read = 1000.0, []
    monkeypatch.setattr("dist_ens.processes.cluster.clock", lambda: read.append(now) or now)
    monkeypatch.setattr("jax.process_count", lambda: hosts)
    cadence, found = Cadence(*every, first_step), []
    for step, secs in taken:
        now += secs
        found += [step] if cadence.is_due(step) else []
    assert found == due
    assert readings in (None, len(read))


def test_a_run_from_a_config_is_saved_by_the_clock(tmp_path, monkeypatch):
    # Calls end at 4, 8, ..., 24, and each reading of the clock finds 10 s more. The interval
    # begins at 4, and 30 s have passed at 16; from there it is 20 s at the last step, 24.
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("dist_ens.processes.cluster.clock", lambda: next(now))
    cadence = {"every_steps": None, "every_secs": 30.0, "keep": 9}
    train(experiment(checkpoint=cadence), tmp_path)
    assert steps_in(tmp_path) == [16, 24]


# Two hosts


@pytest.fixture(scope="module")
def seen_by_two(tmp_path_factory):
    """What two processes saw that saved in one folder, while this one held the lock of another."""
    folder = tmp_path_factory.mktemp("two_savers")
    logs = [folder / f"host_{i}.log" for i in range(2)]
    script = [sys.executable, "tests/two_savers.py", f"127.0.0.1:{free_port()}"]
    with Checkpoints(folder / "locked").open(RECORD):
        codes = finish([start([*script, str(i), str(folder)], logs[i]) for i in range(2)], logs)
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    return folder, [json.loads((folder / f"saw_{i}.json").read_text()) for i in range(2)]


def test_two_hosts_save_at_the_same_steps_and_read_the_clock_rarely(seen_by_two):
    saw = seen_by_two[1]
    assert all("Another run is training in" in s["refusal"] for s in saw)
    assert saw[0]["due"] == saw[1]["due"]
    # 800 calls of at least 4 ms take 3.2 s or more, and an interval is 1 s.
    assert saw[0]["due"]
    assert saw[0]["readings"] == saw[1]["readings"] < CALLS / 2


def test_two_hosts_each_get_the_bytes_that_they_saved_and_one_host_gets_none(seen_by_two):
    folder, saw = seen_by_two
    for i, seen in enumerate(saw):
        assert (seen["saved_step"], seen["absent"]) == (CALLS, None)
        assert seen["position"] == f"host {i} at step {CALLS}"
    saved = reader(folder / "run", CALLS)
    with pytest.raises(RunError, match=r"by 2 hosts, .* this run has 1 host\. Resume on as many"):
        saved.host_file("position")
    assert saved.host_file("position", is_shared=True) == f"host 0 at step {CALLS}".encode()
    assert saved.host_file("absent") is None


def test_two_hosts_resume_the_same_older_step_though_one_alone_sees_the_damage(seen_by_two):
    folder, saw = seen_by_two
    older = steps_in(folder / "run")[0]
    for i, seen in enumerate(saw):
        assert seen["resumed_step"] == older
        assert seen["resumed_position"] == f"host {i} at step {older}"
    [told], nothing = (s["said"] for s in saw)  # Process 0 reports.
    told_by_main = f"The checkpoint of step {CALLS} is damaged: process 1 found it. It is kept as "
    assert told.startswith(told_by_main)
    assert nothing == []
    assert (folder / "damaged" / "checkpoints" / f"{CALLS}.damaged").is_dir()


def test_two_hosts_return_the_state_of_the_best_evaluation_also_when_they_resume(seen_by_two):
    folder, saw = seen_by_two
    assert saw[0]["early_stopping"] == saw[1]["early_stopping"]
    (step, nll, total, of_steps), again = saw[0]["early_stopping"]
    assert of_steps[str(step)] == min(of_steps.values()) == pytest.approx(nll)
    assert 2 < step == max(map(int, of_steps)) - 6
    assert again == [step, nll, total, {}]
    assert steps_in(folder / "early_stopping") == [step, step + 6]


# What a folder holds


def test_a_folder_gives_back_what_was_saved_last(tmp_path):
    checkpoints, chosen = Checkpoints(tmp_path / "new" / "run"), record(execution="vmap")
    with checkpoints.open(RECORD) as opened:
        assert (opened.saved_step, opened.saved_record, opened.notes) == (0, None, [])
        opened.save(snapshot(3, state_of(3.0)))
        opened.save(snapshot(5, state_of(5.0), chosen, host_files={"at": b"\0five"}))
    with checkpoints.open(RECORD) as opened:
        assert (opened.saved_step, opened.saved_record) == (5, chosen)
        restored = opened.restore_state(shapes_of(state_of(0.0)))
        np.testing.assert_array_equal(restored["w"], np.full((4, 3), 5.0))
        assert opened.restore_host_file("at") == b"\0five"
        assert opened.restore_host_file("other") is None


def test_a_step_that_is_saved_is_not_saved_again(tmp_path):
    for value in (1.0, 2.0):  # At first in one run, then by one that resumes and does not restore.
        with begun(tmp_path) as opened:
            for again in (value, 3.0):
                opened.save(snapshot(7, state_of(again)))
    restored = reader(tmp_path, 7).state(shapes_of(state_of(0.0)))
    np.testing.assert_array_equal(restored["w"], np.full((4, 3), 1.0))


def test_an_event_after_a_save_has_begun_belongs_to_the_next_checkpoint(tmp_path):
    def fails():
        opened.add_event(0, Event(2, "failed"))
        return {}

    with begun(tmp_path) as opened:
        opened.save(snapshot(1, state_of(1.0), before=fails))
        opened.save(snapshot(2, state_of(2.0)))
    events = [read_lineages(tmp_path, step)[1][0].events for step in (1, 2)]
    assert events == [(), (Event(2, "failed"),)]


def save_then(end, folder, before=dict):
    with begun(folder) as opened:
        opened.save(snapshot(1, state_of(1.0), before=before))
        end()


def test_an_interruption_waits_for_no_save_and_the_next_run_waits_for_it(tmp_path):
    began, let_go = threading.Event(), threading.Event()

    def before():
        began.set()
        let_go.wait(60)
        return {}

    def interrupt():
        assert began.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_then(interrupt, tmp_path, before)
    threading.Timer(0.2, let_go.set).start()
    with begun(tmp_path) as opened:
        assert opened.saved_step == 1


def test_an_error_of_the_run_still_ends_its_save(tmp_path):
    with pytest.raises(ZeroDivisionError):
        save_then(lambda: 1 / 0, tmp_path)
    assert steps_in(tmp_path) == [1]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("every_secs", 0), ("every_secs", float("nan")), ("every_secs", "60")),
        *(("every_steps", 2.5), ("keep_every_steps", 0), ("keep", 0)),
        *(("resume", "always"), ("folder", "")),
    ],
)
def test_fields_that_cannot_be_used_are_refused_when_made(name, value):
    with pytest.raises(UserError, match=f"^{name}[ =]"):
        Checkpoints(**{"folder": "run", name: value})


# Which checkpoints are kept


def test_the_first_checkpoint_of_each_interval_is_kept_for_ever(tmp_path):
    # Of every 10 steps: 12 and 21; of the last two: 25 and 28.
    steps = {step: {} for step in (4, 8, 12, 15, 21, 25, 28)}
    assert save(Checkpoints(tmp_path, keep_every_steps=10), steps) == [12, 21, 25, 28]


@pytest.mark.parametrize(("direction", "best"), [("lower", 2), ("higher", 3)])
def test_the_checkpoint_with_the_best_score_is_kept_also_after_a_restart(tmp_path, direction, best):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best="score")
    first = {1: {"score": 0.5}, 2: {"score": 0.2}, 3: {"score": 0.9}, 4: {}}
    for part in (first, {5: {"score": 0.4}, 6: {"score": 0.4}}):
        kept = save(checkpoints, part, directions={"score": direction})
    assert kept == [best, 6]


def test_a_checkpoint_whose_scores_cannot_be_read_is_kept_until_they_can(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files")

    checkpoints = Checkpoints(tmp_path, keep=1, keep_best="score")
    save(checkpoints, {1: {"score": 0.2}}, directions={"score": "lower"})
    with checkpoints.open(RECORD, directions={"score": "lower"}) as opened:
        with monkeypatch.context() as patch:
            patch.setattr("dist_ens.checkpoint.opened.Manifest.read", refuse)
            opened.save(snapshot(2, state_of(1.0), scores={"score": 0.4}))
            opened.wait()
        assert steps_in(tmp_path) == [1, 2]
    assert save(checkpoints, {3: {"score": 0.3}}, directions={"score": "lower"}) == [1, 3]


@pytest.mark.parametrize(("direction", "best"), [("lower", {1, 4}), ("higher", {2, 3})])
def test_the_best_checkpoint_of_each_member_is_kept(tmp_path, direction, best):
    values = {1: (0.1, 0.7), 2: (0.6, 0.3), 3: (0.3, 0.9), 4: (0.5, 0.2), 5: (0.4, 0.4)}
    scores = {
        step: {f"score/member_{k:02d}": value for k, value in enumerate(of_members)}
        for step, of_members in values.items()
    }
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best_of_members="score")
    assert {*save(checkpoints, scores, directions={"score": direction})} == {*best, 5}


def test_a_run_saves_the_score_of_each_member_by_its_id(tmp_path):
    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda p, x: x @ p["w"])
    data = {"inputs": np.ones((8, 3)), "labels": np.ones(8, int)}
    ensemble = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), num_members=2)
    checkpoints = Checkpoints(tmp_path, keep_best_of_members="nll")
    options = {"eval_data": data, "checkpoints": checkpoints, "progress": False}
    result = de.fit(ensemble, data, steps=4, **options)
    scores = Manifest.read(Disk(tmp_path / "checkpoints" / "4")).scores
    assert scores["nll/member_01"] == pytest.approx(result.scores.members[1]["nll"])
    assert "brier/member_01" not in scores


def test_a_score_that_the_run_does_not_have_is_refused_before_anything_is_written(tmp_path):
    directions = {"nll": "lower", "accuracy": "higher", "width": None}
    with pytest.raises(UserError, match="'acuracy', and this run has the scores accuracy, nll"):
        save(Checkpoints(tmp_path / "run", keep_best="acuracy"), {}, directions=directions)
    assert not (tmp_path / "run").exists()


# Which run may resume


def test_a_record_is_read_back_as_it_was_written():
    made = StepRecord.from_dict(record(execution="vmap", num_devices=2, steps_per_call=4))
    assert (made.methods, made.member_ids) == ((), tuple(range(8)))
    assert StepRecord.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"member": "CNN"}, "the member is 'MLP' there and 'CNN' here"),
        ({"optimizer": "sgd"}, "the optimizer is 'adam' there and 'sgd' here"),
        ({"loss": "gaussian"}, "the loss is 'categorical' there and 'gaussian' here"),
        ({"methods": ["mixup"]}, r"the methods is \(\) there and \('mixup',\) here"),
        ({"member_ids": [*range(1, 9)]}, r"member_ids is \(0, .*7\) there and \(1, .*8\) here"),
        ({"num_members": 1, "member_ids": [0]}, "num_members is 8 there and 1 here"),
        ({"seed": 1}, "the seed is 0 there and 1 here"),
        ({"batch": "other"}, "the batch is 'inputs float32.*' there and 'other' here"),
        ({"fingerprint": "1" * 64}, r"hyperparameter was changed \(.* 0{12} there and 1{12} here"),
    ],
)
def test_another_run_is_refused_by_both_values_and_resumed_anyway(changes, told):
    with pytest.raises(UserError, match=f"holds another run: .*{told}.*resume='anyway'"):
        notes_on_resuming(record(**changes), RECORD, "runs/a")
    [note] = notes_on_resuming(record(**changes), RECORD, "runs/a", "anyway")
    assert note.startswith("Resuming another run, as resume='anyway' says: ")


def test_differences_that_make_no_other_run_are_said_or_passed_over():
    saved = record(versions={"jax": "0.9.0", "flax": "0.12"}, fingerprint="1" * 64)
    [note] = notes_on_resuming(RECORD, saved, "runs/a")
    told = "The saved run was made with flax 0.12 (here absent), jax 0.9.0 (here 0."
    assert note.startswith(told)
    for here, there in (
        (record(fingerprint=None), RECORD),
        (RECORD, record(fingerprint=None)),
        (record(execution="vmap", num_devices=1), record(execution="loop", num_devices=4)),
    ):
        assert notes_on_resuming(here, there, "runs/a") == []


def test_neither_door_resumes_the_run_of_the_other(tmp_path):
    by_config, by_python = tmp_path / "config", tmp_path / "python"
    train(experiment(steps=4), by_config)
    for whatever in ("same", "anyway"):
        with pytest.raises(UserError, match="started from a config. Resume it with `dist-ens tr"):
            save(Checkpoints(by_config, resume=whatever), {})
    save(Checkpoints(by_python), {1: {}})
    sentence = r"started in Python, of the member 'MLP'\. Resume it in Python with fit\("
    with pytest.raises(UserError, match=sentence):
        train(experiment(steps=4), by_python)
    with pytest.raises(UserError, match="was made in Python: member MLP, .* Give them again, as"):
        open_finished(by_python)
