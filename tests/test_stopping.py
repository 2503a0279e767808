"""Members that stop: which ones, what they keep, and that the others do not notice."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import dist_ens as de
from dist_ens.callbacks import EarlyStopping, SuccessiveHalving, stop_members
from dist_ens.checkpoint import read_members
from dist_ens.experiment.members import copy_members
from dist_ens.ground.errors import RunError, UserError
from dist_ens.processes.compile_cache import LongestCompilation
from dist_ens.training.runner import MetricsReader
from saving import assert_same
from test_hyper import DATA, sweep

TEST = {name: values[:32] for name, values in DATA.items()}
HYPER = {
    "learning_rate": de.hyper.log_uniform(1e-4, 1e-1),
    "decay": 0.001,
    "dropout": de.hyper.choice(0.0, 0.1),
}


def of_members(num_members=16, **options):
    layout = de.Layout.make(num_members, ensemble_axis=2, devices=jax.devices()[:2])
    options = {"execution": "loop", "layout": layout} | options
    return sweep(num_members, hyper=HYPER, **options)


def trained(ensemble, callbacks, steps=60, **options):
    options = {"eval_data": TEST, "eval_every": 5, "steps_per_call": 5, "progress": False} | options
    return de.fit(
        ensemble,
        DATA,
        steps=steps,
        batch_size=16,
        callbacks=callbacks,
        **options,
    )


@pytest.fixture
def at_once(monkeypatch):
    """Compiling seems to take no time, so that members leave as soon as they can."""
    monkeypatch.setattr(LongestCompilation, "_note", lambda self, event, secs, **_: None)
    monkeypatch.setattr("dist_ens.training.services._OTHER_SECS", 0.0)


class Everyone:
    stops_members = True

    def evaluated(self, step, scores):
        return stop_members(range(4)) if step == 20 else None


def halving():
    return SuccessiveHalving("nll", every=15, least=2)


def test_halving_stops_the_worse_half_again_and_again():
    result = trained(of_members(), [halving()])
    assert sorted(result.stopped.values()) == [15] * 8 + [30] * 4 + [45] * 2
    nll = {
        record["step"]: {k: record[f"test/nll/member_{k:02d}"] for k in range(16)}
        for record in result.history
        if "test/nll" in record
    }
    kept = [k for k in range(16) if result.stopped.get(k, 60) > 15]
    assert max(nll[15][k] for k in kept) <= min(nll[15][k] for k in {*range(16)} - {*kept})
    first, last = ({k: nll[step][k] for k in {*range(16)} - {*kept}} for step in (15, 30))
    assert first == last  # Those that have stopped rest.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"execution": "vmap"},
        {"model_axis": 2},
        pytest.param({"failure_policy": "skip"}, marks=pytest.mark.long),
    ],
    ids=lambda options: next(iter(options), "loop"),
)
def test_members_that_go_on_are_what_they_would_have_been(at_once, options):
    if "model_axis" in options:
        # Not made with the parameters: a process that imports this file forks without devices.
        devices = jax.devices()[:4]
        options = {"layout": de.Layout.make(16, ensemble_axis=2, devices=devices, **options)}
    ensemble = of_members(**options)
    never = trained(ensemble, [halving()], compact="never")
    seen = []

    def look(info):
        _, state, *_ = info
        assert info._replace(step=0).state is state is info.state
        seen.append(state.member_id.shape)
        seen.extend(rows.shape[1:] for rows in info.metrics.values())

    auto = trained(ensemble, [halving(), look], compact="auto")
    assert [*auto.num_computed.values()] == [16, 8, 4, 2]
    assert never.num_computed == {0: 16}
    assert auto.stopped == never.stopped
    assert {*seen} == {(16,)}
    assert [*auto.state.member_id] == [*range(16)]
    assert auto.state.stopping == ()
    if ensemble.execution == "loop":
        assert_same(auto.state, never.state)
        for found, expected in zip(auto.history, never.history, strict=True):
            # Of a member that has stopped, a training loss is that of its last update.
            scores = {k: v for k, v in expected.items() if k.startswith("test/")}
            assert scores == {k: found[k] for k in scores}
    else:
        for name, expected in never.state.params.items():
            np.testing.assert_allclose(auto.state.params[name], expected, rtol=1e-3, atol=1e-4)
    assert len(auto.scores.members) == 16


@pytest.fixture
def counts(monkeypatch):
    """Number of members that each call of the update has had."""
    found, dispatched = [], MetricsReader.dispatched

    def counted(self, previous, step, metrics):
        found.append(metrics["loss"].shape[1])
        return dispatched(self, previous, step, metrics)

    monkeypatch.setattr(MetricsReader, "dispatched", counted)
    return found


def test_no_member_leaves_where_that_takes_longer_than_it_spares(monkeypatch):
    monkeypatch.setattr("dist_ens.training.services._OTHER_SECS", 1e9)
    assert trained(of_members(), [halving()]).num_computed == {0: 16}


def test_fewer_members_are_updated_after_some_have_left(at_once, counts):
    trained(of_members(), [SuccessiveHalving("nll", keep=0.3, every=30)])
    # 5 of 16 go on, and two rows of the mesh need an even number of members.
    assert (set(counts[:6]), set(counts[6:])) == ({16}, {6})


def test_each_member_stops_by_its_own_score_and_keeps_its_best_parameters():
    stopping = EarlyStopping("nll", patience=2, of="members")
    result = trained(of_members(8), [stopping], steps=200)
    assert 0 < len(result.stopped) < 8
    course = [record for record in result.history if "test/nll" in record]
    for k in range(8):
        values = {r["step"]: r[f"test/nll/member_{k:02d}"] for r in course}
        best = min(values.values())
        assert result.scores.members[k]["nll"] == pytest.approx(best, rel=1e-5)
        if k in result.stopped:
            own = [values[step] for step in sorted(values) if step <= result.stopped[k]]
            assert min(own) == min(own[:-2])
    plain = trained(
        of_members(8), [EarlyStopping("nll", patience=2, of="members", restore_best=False)]
    )
    assert plain.scores.members != result.scores.members


@pytest.mark.parametrize("step", [15, pytest.param(30, marks=pytest.mark.long)])
def test_a_run_that_a_signal_ends_at_a_choice_makes_it_when_it_is_resumed(tmp_path, step):
    def interrupts(info):
        if info.step == step:
            signal.raise_signal(signal.SIGINT)

    whole = trained(of_members(), [halving()])
    folder = de.Checkpoints(tmp_path)
    assert trained(of_members(), [interrupts, halving()], checkpoints=folder).signal is not None
    resumed = trained(of_members(), [interrupts, halving()], checkpoints=folder)
    assert resumed.stopped == whole.stopped
    assert_same(resumed.state, whole.state)


def test_halving_compares_only_members_that_have_not_failed():
    hyper = HYPER | {"learning_rate": [3e38, 3e38, *np.geomspace(1e-4, 1e-2, 6)]}
    layout = de.Layout.make(8, devices=jax.devices()[:1])
    for policy in ("freeze", "drop"):
        ensemble = sweep(8, hyper=hyper, layout=layout, failure_policy=policy)
        begun = trained(ensemble, [], steps=5)
        result = trained(ensemble, [halving()], state=begun.state)
        chosen = {*range(2, 8)} - result.stopped.keys()
        assert len(chosen) == 2
        assert (result.stopped.keys() & {0, 1} == {0, 1}) is (policy == "drop")


def test_a_member_that_is_stopped_while_its_updates_fail_is_left_out_of_the_scores():
    hyper = HYPER | {"learning_rate": [1e30, *np.geomspace(1e-4, 1e-2, 3)]}
    layout = de.Layout.make(4, devices=jax.devices()[:1])
    ensemble = sweep(4, hyper=hyper, layout=layout, failure_policy="skip")
    result = trained(ensemble, [halving()], steps=30)  # Long before 100 skipped updates freeze it.
    assert 0 in result.stopped
    assert result.scores.left_out == [0]
    assert np.isfinite(result.scores.ensemble["nll"])


def test_all_members_that_fail_are_dropped():
    hyper = HYPER | {"learning_rate": [3e38] * 4}
    result = trained(sweep(4, hyper=hyper, failure_policy="drop"), [], steps=30, eval_every=None)
    assert result.all_failed
    assert result.stopped.keys() == {0, 1, 2, 3}


def test_members_stop_on_a_mesh_of_one_row():
    layout = de.Layout.make(2, ensemble_axis=1, devices=jax.devices()[:2])
    early = EarlyStopping("nll", patience=2, of="members")
    result = trained(of_members(2, layout=layout), [early])
    alone = trained(of_members(2, layout=de.Layout.make(2, devices=jax.devices()[:1])), [early])
    assert result.stopped == alone.stopped
    for name, expected in alone.state.params.items():
        np.testing.assert_allclose(result.state.params[name], expected, rtol=1e-3, atol=1e-4)


def test_copies_of_members_that_stopped_have_their_best_parameters(tmp_path):
    early = EarlyStopping("nll", patience=2, of="members")
    result = trained(of_members(4), [early], checkpoints=de.Checkpoints(tmp_path / "run"))
    copy_members([tmp_path / "run"], tmp_path / "copy")
    copied = de.load(tmp_path / "copy", ensemble=of_members(4))
    assert_same(copied.state.params, result.state.params)
    assert read_members(tmp_path / "run", 60).leaves.keys() == {
        name for name in read_members(tmp_path / "copy").leaves
    }


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [EarlyStopping("nll", patience=2, of="members"), EarlyStopping("nll")],
        lambda: [halving(), EarlyStopping("nll", patience=50)],
    ],
)
def test_callbacks_that_stop_members_and_the_run_go_together(at_once, callbacks):
    result = trained(of_members(8), callbacks())
    assert result.state.stopping == ()
    assert result.best_step is not None


def test_a_member_without_a_finite_score_is_not_given_back_untrained():
    hyper = HYPER | {"learning_rate": [1e-2, 3e38]}
    layout = de.Layout.make(2, devices=jax.devices()[:1])
    ensemble = sweep(2, hyper=hyper, layout=layout, execution="loop")
    result = trained(ensemble, [EarlyStopping("nll", patience=2, of="members")])
    assert not np.isfinite(result.state.params["first"][1]).all()
    assert np.isfinite(result.state.params["first"][0]).all()


def test_a_member_that_is_stopped_where_it_is_best_keeps_that():
    class AtOnce(Everyone):
        def evaluated(self, step, scores):
            return stop_members(range(4)) if step == 5 else None

    early = EarlyStopping("nll", patience=9, of="members")
    result = trained(of_members(4), [early, AtOnce()])
    plain = trained(of_members(4), [], steps=5)
    assert_same(result.state.params, plain.state.params)


def test_a_run_ends_when_all_its_members_have_stopped():
    result = trained(of_members(4), [Everyone()])
    assert (result.step, result.stopped_by) == (20, "Everyone")
    assert result.stopped == dict.fromkeys(range(4), 20)


def test_members_that_have_all_stopped_are_not_trained_when_the_run_is_resumed(tmp_path, capsys):
    callbacks = [Everyone(), SuccessiveHalving("nll", every=50)]
    first, again = (
        trained(of_members(4), callbacks, checkpoints=de.Checkpoints(tmp_path), progress=True)
        for _ in range(2)
    )
    # Which callback stopped them is not known any more.
    assert (again.step, again.stopped_by, again.stopped) == (20, None, first.stopped)
    assert_same(again.state, first.state)
    assert "all members have stopped by step 20 of 60" in capsys.readouterr().out


class Counts:
    """Keeps the steps that were evaluated and recorded, also in a run that is resumed."""

    def __init__(self):
        self.evaluations, self.records = [], []

    def evaluated(self, step, scores):
        self.evaluations.append(step)

    def write(self, step, record):
        self.records += [step] if any("nll" in name for name in record) else []

    def state(self):
        return [self.evaluations, self.records]

    def restore(self, state):
        self.evaluations, self.records = state


def raises():
    raise ValueError("once")


def evaluates_while_a_signal_comes():
    signal.raise_signal(signal.SIGINT)
    ensemble = of_members(4)
    de.evaluate(ensemble, ensemble.init(DATA), TEST)


@pytest.mark.parametrize("what", [raises, evaluates_while_a_signal_comes])
def test_an_evaluation_that_a_callback_ends_is_given_to_the_others_again(what, tmp_path):
    def ends(step, scores):
        if step == 15 and len(counts) == 1:
            what()

    whole, counts = trained(of_members(), [halving()]), []
    for told in ("raised ValueError: once" if what is raises else None, None):
        counts.append(Counts())
        callbacks = [counts[-1], halving(), types.SimpleNamespace(evaluated=ends)]
        with pytest.raises(RunError, match=told) if told else contextlib.nullcontext():
            resumed = trained(of_members(), callbacks, checkpoints=de.Checkpoints(tmp_path))
            assert (resumed.signal is None) is (len(counts) == 2)
    assert counts[-1].evaluations == counts[-1].records == list(range(5, 61, 5))
    assert resumed.stopped == whole.stopped
    assert_same(resumed.state, whole.state)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.long) for k in range(1, 10))]
)
def test_a_run_that_is_interrupted_around_a_compaction_ends_with_the_same_bits(
    at_once, tmp_path, seed
):
    def callbacks():
        return [halving(), EarlyStopping("nll", patience=4, of="members")]

    whole = trained(of_members(), callbacks())
    draw = random.Random(seed)
    for number, steps in enumerate(draw.sample(range(5, 60, 5), 2)):
        folder = de.Checkpoints(tmp_path / str(number), every_steps=5, every_secs=None)
        trained(of_members(), callbacks(), steps=steps, checkpoints=folder)
        resumed = trained(of_members(), callbacks(), checkpoints=folder)
        assert_same(resumed.state, whole.state)
        assert resumed.stopped == whole.stopped
        loaded = de.load(tmp_path / str(number), ensemble=of_members())
        assert_same(loaded.state.params, whole.state.params)


# Each line has the folder of a run, a step at which members are chosen, and the seconds from there
# (or from its beginning, for step 0) to a signal that ends it at once, as SIGKILL does.
SCRIPT = """
import os
import signal
import sys

from test_stopping import halving, of_members, trained

import dist_ens as de
from dist_ens.processes.compile_cache import LongestCompilation
from dist_ens.training import services

LongestCompilation._note = lambda self, event, secs, **_: None
services._OTHER_SECS = 0.0


class Ends:
    def evaluated(self, step, scores):
        if step == self.step:
            signal.setitimer(signal.ITIMER_REAL, self.secs)


for line in sys.stdin:
    if not (child := os.fork()):
        folder, step, secs = line.split()
        ends = Ends()
        ends.step, ends.secs = int(step), float(secs)
        ends.evaluated(0, None)
        checkpoints = de.Checkpoints(folder, every_steps=5, every_secs=None)
        trained(of_members(), [ends, halving()], checkpoints=checkpoints)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
NEVER = 1000


@pytest.mark.parametrize(
    "most_kills",
    [pytest.param(3, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.faults)],
)
def test_runs_killed_around_a_compaction_end_with_the_same_bits(at_once, tmp_path, most_kills):
    whole = trained(of_members(), [halving()])
    assert [*whole.num_computed.values()] == [16, 8, 4, 2]
    draw, num_kills, runs = random.Random(0), 0, 0
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", SCRIPT]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            command,
            env=environment,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as starter,
    ):

        def code_of(folder, step, secs):
            started = time.monotonic()
            print(tmp_path / str(folder), step, secs, file=starter.stdin)
            code = int(starter.stdout.readline())
            assert code in (0, -signal.SIGALRM), (tmp_path / "log").read_text()
            return code, time.monotonic() - started

        assert code_of("compiles", NEVER, 0)[0] == 0
        whole_secs = code_of("timed", NEVER, 0)[1]
        while num_kills < most_kills:
            step = draw.choice([0, 15, 30, 45])
            secs = draw.uniform(0.01, 0.3 if step else whole_secs)
            code, _ = code_of(runs, step, secs)
            num_kills += code != 0
            if code == 0 or num_kills == most_kills:
                assert code_of(runs, NEVER, 0)[0] == 0
                checkpoints = de.Checkpoints(tmp_path / str(runs))
                resumed = trained(of_members(), [halving()], checkpoints=checkpoints)
                assert_same(resumed.state, whole.state)
                assert resumed.stopped == whole.stopped
                runs += 1
        starter.stdin.close()


class Restarts:
    """Gives the members that have failed their parameters of the beginning again, at step 20."""

    def __call__(self, info):
        record = info.state.failures
        again = info.state._replace(failures=record._replace(is_frozen=record.is_frozen & False))
        return again if info.step == 20 else None


def test_what_is_dropped_or_stopped_depends_on_the_steps_alone(at_once, tmp_path):
    hyper = HYPER | {"learning_rate": [1e-2, 3e38, *np.geomspace(1e-4, 1e-2, 6)]}
    layout = de.Layout.make(8, devices=jax.devices()[:1])
    ensemble = sweep(8, hyper=hyper, layout=layout, failure_policy="drop", execution="loop")
    whole = trained(ensemble, [halving()])
    assert [*whole.num_computed.values()][:2] == [8, 7]
    never = trained(ensemble, [halving()], compact="never")
    folder = de.Checkpoints(tmp_path, every_steps=5, every_secs=None)
    trained(ensemble, [halving()], steps=25, checkpoints=folder)
    resumed = trained(ensemble, [halving()], checkpoints=folder)
    assert [each.member_id for each in whole.failed_members] == whole.scores.left_out[:1] == [1]
    # Of the 7 members that are left, 4 go on.
    assert sorted(whole.stopped.values())[1:4] == [15] * 3
    for other in (never, resumed):
        assert other.stopped == whole.stopped
        assert_same(other.state, whole.state)
    with pytest.raises(UserError, match=r"Restarts restarts the members \[1\], which the policy"):
        trained(ensemble, [Restarts()])


class Unknown:
    stops_members = True

    def evaluated(self, step, scores):
        return stop_members([99])


class Silent:
    def evaluated(self, step, scores):
        return stop_members([0])


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (
            SuccessiveHalving("variance", every=30, direction="lower"),
            "by 'variance', which is NaN for each of the 4 that are left at step 30",
        ),
        (Unknown(), r"The callback Unknown stops the members \[99\], and the run has"),
        (Silent(), "has no attribute that says so. Give its class the line stops_members = True"),
        (SuccessiveHalving("nll", every=13), "chooses every 13 steps, and fit evaluates every 5"),
        (SuccessiveHalving("rmse", every=30), "SuccessiveHalving waits for 'rmse', and the scores"),
        (EarlyStopping("rmse", of="members"), "EarlyStopping waits for 'rmse', and the scores"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_wrong_stops_are_told_in_a_sentence(callback, told):
    with pytest.raises(UserError, match=told):
        trained(of_members(4), [callback])
