"""A member whose update fails, and the others, which do not notice."""

import json
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import dist_ens
from conftest import COMMAND_ENVIRONMENT
from dist_ens.checkpoint import read_lineages
from dist_ens.ensemble.failure_policy import POLICIES
from dist_ens.ensemble.failures import (
    CAUSES,
    HISTORY,
    FailedMember,
    _are_finite_in_one,
    _are_sums_finite,
    _cause_of,
    no_failures,
)
from dist_ens.experiment import Experiment, OwnParts
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ExitCode, RunError
from dist_ens.layout import copied_off_devices
from dist_ens.processes.compile_cache import LongestCompilation
from dist_ens.training.failure_response import finite_members
from failing import (
    FAILING,
    MEMBERS,
    OPTIMIZERS,
    OTHERS,
    ensemble,
    fit,
    members_equal,
    parts,
    trained,
)
from marked import long
from saving import steps_in

# Policies after which a run goes on, with checked updates.
LASTING = tuple(name for name in POLICIES if name not in ("continue", "raise"))
SCRIPT = pathlib.Path(__file__).with_name("failing_bits.py")
WATCHED = de.FailurePolicy(policy="skip", loss_threshold=10)
EXECUTIONS = ("loop", "map", "unroll", "vmap", "chunk:2")


def record_of(state):
    return jax.tree.map(lambda leaf: leaf[FAILING], jax.device_get(state.failures))


def is_finite(state):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parts(state)))


def saved_in(folder, **options):
    """Checkpoints after every step, of which the newest is kept."""
    return de.Checkpoints(folder, **{"every_steps": 1, "every_secs": None, "keep": 1} | options)


@pytest.mark.parametrize("execution", [pytest.param("loop", marks=pytest.mark.faults), "vmap"])
def test_a_failed_update_is_skipped_and_the_others_have_the_bits_of_a_run_without_it(execution):
    with_fault = trained(ensemble("skip", execution), [5], steps_per_call=5)
    without = trained(ensemble("skip", execution), steps_per_call=5)
    assert members_equal(with_fault.state, without.state, OTHERS)
    assert not members_equal(with_fault.state, without.state, [FAILING])
    assert is_finite(with_fault.state)
    record = record_of(with_fault.state)
    assert (record.num_failures, record.first_step, record.last_step) == (1, 5, 5)
    # 9 of 10 updates were taken: by the network's own count, and by Adam's.
    assert with_fault.state.model_state["seen"][FAILING] == 9
    assert with_fault.state.opt_state[0].count.tolist() == [10, 10, 10, 9, 10, 10, 10, 10]
    assert with_fault.state.step.tolist() == [10] * MEMBERS
    if execution == "vmap":  # A skipped update leaves the bits of the state before it.
        before, after = (trained(ensemble("skip"), [5], steps=steps).state for steps in (4, 5))
        assert members_equal(before, after, [FAILING])


@pytest.mark.parametrize("policy", ["skip", "freeze"])
def test_a_member_whose_last_update_was_skipped_has_not_diverged(policy):
    told = []
    trained(ensemble(policy), [4], steps=4, say=told.append)
    found = [sentence for sentence in told if "diverged" in sentence]
    assert len(found) == (policy == "freeze"), told
    assert any("not taken: 1 of member 3." in sentence for sentence in told)


def scored():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(16, 6)).astype(np.float32)
    inputs[:, 4] = 0
    return {"inputs": inputs, "labels": random.integers(0, 3, 16)}


@pytest.mark.parametrize("policy", ["freeze", pytest.param("drop", marks=pytest.mark.faults)])
def test_a_frozen_member_keeps_its_last_finite_state_and_is_left_out_of_the_scores(policy):
    frozen = trained(ensemble(policy), [5], eval_data=scored())
    assert members_equal(frozen.state, trained(ensemble(policy), steps=4).state, [FAILING])
    assert members_equal(frozen.state, trained(ensemble(policy)).state, OTHERS)
    assert frozen.scores.left_out == [FAILING]
    # The mean member is the mean of the other seven, also of the losses of a loss function.
    with_own = trained(ensemble(policy, own=True), [5], eval_data=scored())
    for name, scores in (("nll", frozen.scores), ("loss", with_own.scores)):
        of_others = [scores.members[position][name] for position in OTHERS]
        assert scores.mean_member[name] == pytest.approx(np.mean(of_others))
    seven = de.select_members(frozen.state, OTHERS)
    made = ensemble(None)
    alone = de.evaluate(made, made.with_record(seven), scored())
    assert frozen.scores.ensemble["nll"] == pytest.approx(alone.ensemble["nll"], rel=1e-6)


def test_the_report_of_fit_shows_the_members_that_failed(tmp_path):
    report = de.callbacks.Report(tmp_path)
    frozen = trained(ensemble("freeze"), [5], eval_data=scored(), callbacks=[report])
    summary = json.loads((tmp_path / "summary.json").read_text())
    (member,) = frozen.failed_members
    assert summary["failures"] == {"policy": "freeze", "members": [member._asdict()]}
    assert summary["left_out_members"] == [FAILING]
    page = (tmp_path / "report.html").read_text()
    assert "failed, policy freeze" in page
    assert "member 3: 1 failed update at step 5 (the loss is not finite), frozen" in page


def breaks_member_1(info):
    """Gives member 1 parameters that are not finite."""
    if info.step > 1:
        return None
    of_member = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), info.state.params)
    return info.state._replace(params=of_member)


def test_members_that_are_left_out_do_not_make_the_averages_nan(tmp_path, capsys):
    values = {"num_members": 3, "steps": 3, "execution": "vmap", "failures": {"policy": "freeze"}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (4,)}, "data": {"global_batch_size": 64}}
    made = train(
        Experiment.from_dict(values), tmp_path, parts=OwnParts(callbacks=(breaks_member_1,))
    )
    assert made.scores.left_out == [1]
    assert np.isfinite(made.scores.mean_member["nll"])
    assert "have diverged" not in capsys.readouterr().out


@pytest.mark.parametrize("names", [["plain", "checked"], ["checked", "plain"]])
def test_copies_of_runs_of_which_one_checks_its_updates_keep_what_has_failed(names, tmp_path):
    values = {"num_members": 2, "steps": 3, "execution": "vmap", "data": {"global_batch_size": 64}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (4,)}}
    train(Experiment.from_dict(values), tmp_path / "plain")
    checked = {"failures": {"policy": "freeze"}, "seed": 1}
    train(
        Experiment.from_dict(values | checked),
        tmp_path / "checked",
        parts=OwnParts(callbacks=(breaks_member_1,)),
    )
    copy_members([tmp_path / name for name in names], tmp_path / "both")
    both = de.load(tmp_path / "both")
    assert both.ensemble.seed == (1 if names[0] == "checked" else 0)
    scores = both.evaluate(intervals=False)
    assert scores.left_out == [1 if names[0] == "checked" else 3]


def test_members_with_a_number_that_is_not_finite_are_found_in_every_wave():
    layout, w = de.Layout.make(4, devices=jax.devices()[:1]), np.ones((4, 3), np.float32)
    w[[0, 2], [1, 2]] = np.nan, np.inf
    put = layout.put({"w": w, "steps": np.zeros(4, np.int32)}, "members")
    for waves, tree in ((1, put), (2, copied_off_devices(put))):
        made = types.SimpleNamespace(layout=layout, waves=waves, num_members=4)
        assert finite_members(tree, made).tolist() == [False, True, False, True]
        assert finite_members({}, made).all()


def test_the_policy_raise_ends_the_run_one_call_after_the_failure():
    with pytest.raises(RunError, match="^Member 3 failed at step 6: the loss is not fin") as raised:
        trained(ensemble("raise"), [6], steps=9)
    assert raised.value.exit_code == ExitCode.DIVERGED
    with pytest.raises(RunError, match="^Member 3 failed at step 9"):  # The last step of a run.
        trained(ensemble("raise"), [9], steps=9)


def stop_at(step):
    """A callback that stops the run by a signal when a step is reached."""
    return lambda info: signal.raise_signal(signal.SIGTERM) if info.step == step else None


@pytest.mark.parametrize("policy", ["drop", *long("freeze", "skip")])
def test_a_run_that_ended_before_its_response_says_it_once_when_it_is_resumed(policy, tmp_path):
    made, told = ensemble(policy), []
    options = {"checkpoints": de.Checkpoints(tmp_path), "say": told.append}
    # The failure of step 6 is saved, and would be told of after step 7.
    trained(made, [6], callbacks=[stop_at(6)], **options)
    assert not any("failed at step" in sentence for sentence in told)
    for steps in (8, 9):
        trained(made, [6], steps=steps, **options)
    assert sum("Member 3 failed at step 6: the loss" in sentence for sentence in told) == 1
    lineage = read_lineages(tmp_path)[1][FAILING]
    assert [event.step for event in lineage.events] == [6]
    assert lineage.dropped_step == (6 if policy == "drop" else None)


def test_a_member_that_another_policy_froze_is_dropped_when_the_run_is_resumed(tmp_path):
    saved = de.Checkpoints(tmp_path)
    trained(ensemble("freeze"), [3], steps=5, checkpoints=saved)
    trained(ensemble("drop"), [3], steps=7, checkpoints=saved)
    assert read_lineages(tmp_path)[1][FAILING].dropped_step == 3


def test_a_dropped_member_leaves_the_arrays_when_the_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(LongestCompilation, "_note", lambda self, event, secs, **_: None)
    monkeypatch.setattr("dist_ens.training.services._OTHER_SECS", 0.0)
    made = ensemble("drop", "loop", rows=1)
    saved, told = de.Checkpoints(tmp_path, keep=3), []
    trained(made, {3}, steps=6, checkpoints=saved)
    resumed = trained(made, {3}, steps=10, checkpoints=saved, say=told.append)
    assert {*resumed.num_computed.values()} == {8, 7}
    on_two = trained(ensemble("drop", rows=2), {3}, steps=10)  # Two rows hold equally many.
    assert on_two.num_computed == {0: 8}
    assert any("7 of 8 members go on in smaller arrays" in each for each in told)
    sound = trained(ensemble("drop", "loop", rows=1), steps=10)
    assert members_equal(resumed.state, sound.state, OTHERS)
    assert resumed.failed_members == [FailedMember(FAILING, CAUSES[1], 1, 3, 3, True)]
    # It is there where the run is loaded, or resumed with another policy.
    other = trained(ensemble("freeze", "loop", rows=1), {3}, steps=14, checkpoints=saved)
    for state in (other.state, de.load(tmp_path, ensemble=made).state):
        assert state.member_id.tolist() == [*range(MEMBERS)]
        assert state.failures.is_frozen.tolist() == [k == FAILING for k in range(MEMBERS)]
    lineage = read_lineages(tmp_path)[1][3]
    assert lineage.dropped_step == 3
    assert "is dropped" in lineage.events[0].what


def test_a_finite_loss_far_above_the_members_own_history_is_a_failure():
    # The loss is multiplied by 51, which is finite and some hundred standard deviations too large.
    spiked = trained(ensemble(WATCHED), [120], value=50, steps=125, log_every=1)
    assert np.isfinite([record["train/loss/member_03"] for record in spiked.history]).all()
    (member,) = spiked.failed_members
    assert (member.member_id, member.failed_updates, member.last_step) == (FAILING, 1, 120)
    assert member.cause == "the loss is far above its running mean"
    # Before 100 losses it is not known what is usual.
    assert trained(ensemble(WATCHED), [50], value=50, steps=55).failed_members == []


SGD = optax.sgd(0.1)


def mean_loss(params, batch):
    return de.losses.batch_mean(batch["x"] @ params["w"])


def linear(policy, *, optimizer=SGD, loss=mean_loss, params=None, **options):
    """Returns an ensemble of two members with the mean loss `w x`, whose gradient is `x`."""
    params = {"w": jnp.ones(2)} if params is None else params
    options |= {"layout": de.Layout.make(2, devices=jax.devices()[:1]), "failure_policy": policy}
    return de.Ensemble(
        de.as_member(init=lambda key, batch: (params, ())),
        optimizer,
        lambda params, model_state, batch, key: (loss(params, batch), (model_state, {})),
        **options | {"num_members": 2, "execution": "loop"},
    )


def test_a_failed_microbatch_fails_the_update():
    made = linear("skip", microbatches=2)
    batch = {"x": np.array([[np.nan, np.nan], [1, 1]], np.float32)}
    state = made.init(batch)
    for of_step, expected in ((batch, 1), ({"x": np.ones((2, 2), np.float32)}, 0.9)):
        state, metrics = made.update(state, of_step)
        assert metrics["failed_updates"].tolist() == [1, 1]
        np.testing.assert_allclose(state.params["w"], np.full((2, 2), expected), rtol=1e-7)


@pytest.mark.parametrize("are_finite", [_are_sums_finite, _are_finite_in_one])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_of_any_gradient_that_is_not_finite_is_seen(are_finite, value):
    large = jnp.full((5,), float(jnp.finfo(jnp.bfloat16).max) / 8, jnp.bfloat16)
    leaves = [jnp.ones((2, 3)), jnp.float32(1), large, jnp.ones((2, 2), jnp.complex64)]
    assert are_finite(leaves)
    for number, leaf in enumerate(leaves):
        for index in np.ndindex(leaf.shape):
            assert not are_finite([*leaves[:number], leaf.at[index].set(value)])
            assert not are_finite([leaf.at[index].set(value), *leaves[number + 1 :]])


def test_a_loss_that_differs_by_a_rounding_from_equal_ones_is_no_failure():
    known = no_failures()._replace(num_losses=np.int32(HISTORY), loss_mean=np.float32(2))
    assert _cause_of(WATCHED, known, np.nextafter(np.float32(2), np.float32(3)), 0) == 0
    assert _cause_of(WATCHED, known, np.float32(2.1), 0) == 3


def test_the_running_mean_and_variance_of_the_first_losses_are_those_of_the_losses():
    result = trained(ensemble(WATCHED), steps=7, log_every=1)
    record = jax.device_get(result.state.failures)
    for member in range(MEMBERS):
        losses = [row[f"train/loss/member_{member:02d}"] for row in result.history]
        assert record.loss_mean[member] == pytest.approx(np.mean(losses), rel=1e-5)
        assert record.loss_variance[member] == pytest.approx(np.var(losses), rel=1e-4)


def test_a_gradient_that_is_not_finite_is_seen_where_the_loss_is_finite():
    # The square root of 0 has an infinite slope: 0 * inf in the gradient is NaN, the loss is not.
    def loss(params, batch):
        return (params["w"] * jnp.sqrt(batch["x"] * params["w"])).sum()

    made, batch = linear("skip", loss=loss), {"x": np.zeros(2, np.float32)}
    state, metrics = made.update(made.init(batch), batch)
    assert metrics["loss"].tolist() == [0, 0]
    assert metrics["failed_updates"].tolist() == [1, 1]
    assert state.failures.cause.tolist() == [2, 2]
    assert state.params["w"].tolist() == [[1, 1], [1, 1]]


def test_a_parameter_that_overflows_is_seen_at_the_next_step():
    # The loss is -0.9 * 3e38 and its gradient -0.9, so that the new parameter is
    # 3e38 + 1e38 * 0.9, above the largest float32 of 3.4e38. The next loss is infinite.
    params = {"w": jnp.full(1, 3e38), "mask": jnp.full(1, -jnp.inf)}
    how = {"loss": lambda p, batch: -(p["w"] * batch["x"]).sum(), "params": params}
    made = linear("skip", optimizer=optax.sgd(1e38), **how)
    batch = {"x": np.full(1, 0.9, np.float32)}
    state, metrics = made.update(made.init(batch), batch)
    assert metrics["failed_updates"].tolist() == [0, 0]
    assert np.isinf(state.params["w"]).all()
    state, metrics = made.update(state, batch)
    assert metrics["failed_updates"].tolist() == [1, 1]


def test_skipped_updates_in_a_row_freeze_a_member_after_a_hundred():
    told = []
    stuck = trained(ensemble("skip"), range(11, 200), steps=120, steps_per_call=10, say=told.append)
    record = record_of(stuck.state)
    assert (record.num_failures, record.last_step, bool(record.is_frozen)) == (100, 110, True)
    # The first failures are told of, and then that the member is frozen.
    first, last = (sentence for sentence in told if "Member 3 failed at step" in sentence)
    assert "the update was skipped." in first
    assert "100 updates in a row failed, so it takes no more updates" in last


def test_a_run_ends_when_all_members_have_failed_and_keeps_what_they_have_learnt(tmp_path):
    all_nan = [{"inputs": np.full((4, 6), np.nan, np.float32), "labels": np.zeros(4, np.int32)}]
    told, saved = [], de.Checkpoints(tmp_path)
    options = {"steps": 50, "steps_per_call": 1, "checkpoints": saved, "say": told.append}
    result = fit(ensemble("freeze"), all_nan, **options)
    assert (result.step, result.all_failed) == (2, True)
    assert any("All 8 members have failed, so the run" in sentence for sentence in told)
    assert is_finite(result.state)
    assert steps_in(tmp_path) == [2]


def test_without_a_policy_the_last_finite_state_of_all_members_is_kept(tmp_path):
    good = {"inputs": np.ones((4, 6), np.float32), "labels": np.zeros(4, np.int32)}
    good["inputs"][:, 4] = 0
    bad = good | {"inputs": np.full((4, 6), np.nan, np.float32)}
    options = {"steps": 50, "steps_per_call": 1, "checkpoints": saved_in(tmp_path)}
    result = fit(ensemble(None), [*[good] * 4, *[bad] * 46], **options)
    # The NaN of step 5 is read after step 6. The state after step 4 is the last finite one.
    assert (result.step, result.all_failed) == (6, True)
    assert steps_in(tmp_path) == [4]
    assert [member.first_step for member in result.failed_members] == [5] * MEMBERS


@pytest.mark.parametrize("policy", ["freeze", "continue"])
def test_a_state_without_a_finite_member_does_not_replace_the_last_good_one(policy, tmp_path):
    def overflow(info):  # A finite loss and gradient gave the state of step 3.
        if info.step == 3:
            return info.state._replace(params={"w": info.state.params["w"] * np.inf})
        return None

    made, batches = linear(policy), [{"x": np.ones((1, 2), np.float32)}] * 9
    options = {"steps_per_call": 1, "checkpoints": saved_in(tmp_path), "callbacks": [overflow]}
    assert fit(made, batches, steps=9, **options).all_failed
    assert steps_in(tmp_path) == [2]


def test_without_a_policy_a_resumed_run_knows_the_failures_before_it(tmp_path):
    saved = de.Checkpoints(tmp_path)
    trained(ensemble(None), [3], checkpoints=saved, callbacks=[stop_at(4)])
    (member,) = trained(ensemble(None), steps=6, checkpoints=saved).failed_members
    assert member == FailedMember(FAILING, CAUSES[1], 4, first_step=3, last_step=6)


def test_the_policy_may_change_when_a_run_is_resumed(tmp_path):
    saved = saved_in(tmp_path, every_steps=4, keep=9)
    trained(ensemble(None), steps=4, checkpoints=saved)
    checked = trained(ensemble("skip"), [5], steps=6, checkpoints=saved)
    assert record_of(checked.state).num_failures == 1
    without = trained(ensemble(None), steps=8, checkpoints=saved)
    assert without.state.failures == ()
    assert np.isfinite(without.state.params["w"]).all()


def test_a_run_is_loaded_under_another_policy_and_pools_no_frozen_member(tmp_path):
    frozen = trained(ensemble("freeze"), [3], steps=4, checkpoints=de.Checkpoints(tmp_path))
    inputs = scored()["inputs"]
    loaded = de.load(tmp_path, ensemble=ensemble("freeze"))
    others = de.select_members(frozen.state, OTHERS)
    expected = ensemble("freeze").predict(others, inputs).mean
    np.testing.assert_array_equal(loaded.predict(inputs).mean, expected)
    assert de.load(tmp_path, ensemble=ensemble(None)).state.failures == ()


def test_the_records_of_metrics_count_failed_updates_and_leave_nan_out():
    result = trained(ensemble("skip"), [5, 7], log_every=10)
    (record,) = result.history
    assert (record["train/failed_updates"], record["train/failed_updates/member_03"]) == (2, 2)
    assert (record["train/is_frozen"], record["train/failed_updates/member_02"]) == (0, 0)
    assert np.isfinite(record["train/loss"])


# After a failure, the device of a frozen member takes every later step in the other way.
EVERY_CASE = [
    pytest.param(
        [
            ["freeze", execution, optimizer, *mesh]
            for optimizer in OPTIMIZERS
            for mesh in ((1, 1, 4), (2, 1, 4), (2, 2, 4), (2, 1, 1))
        ],
        marks=pytest.mark.faults,
        id=execution,
    )
    for execution in EXECUTIONS
]


@pytest.mark.parametrize("cases", [[["skip", "vmap", "clipped", 2, 2, 4]], *EVERY_CASE])
def test_the_other_members_have_the_same_bits_as_programs_of_a_user_compute_them(cases):
    ended = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(cases)],
        env=COMMAND_ENVIRONMENT | {"PYTHONPATH": f"{SCRIPT.parent.parent}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []


@pytest.mark.faults
@pytest.mark.parametrize(
    "options",
    [
        *({"execution": name, "own": own} for name in EXECUTIONS for own in (False, True)),
        *({"rows": rows, "waves": waves} for rows, waves in ((1, 1), (4, 1), (4, 2), (1, 4))),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", LASTING)
def test_the_other_members_have_the_bits_of_a_run_without_the_fault(policy, options, tmp_path):
    made = ensemble(policy, **options)
    for per_call in (1,) if "waves" in options else (1, 10):
        states = []
        for name, fails_at in (("fault", [50]), ("none", [])):
            folder = tmp_path / f"{name}{per_call}"
            options = {"steps_per_call": per_call, "checkpoints": saved_in(folder, every_steps=20)}
            states.append(trained(made, fails_at, steps=100, **options).state)
        assert members_equal(*states, OTHERS)
        assert not members_equal(*states, [FAILING])
        record = record_of(states[0])
        assert record.first_step == 50
        assert record.is_frozen == (policy in ("freeze", "drop"))


@pytest.mark.parametrize("policy", ["freeze", pytest.param("continue", marks=pytest.mark.faults)])
def test_a_command_whose_members_all_fail_ends_with_43_and_keeps_the_last_good_step(
    policy, tmp_path
):
    # The first update with this rate makes all parameters huge, and the second loss overflows.
    fields = ["num_members=2", "steps=40", "steps_per_call=1", "execution=vmap"]
    fields += [f"failures.policy={policy}", "optimizer.learning_rate=1e30"]
    words = [f"--config.{each}" for each in (*fields, "checkpoint.every_steps=1")]
    words += ["--config=configs/digits.py", f"--workdir={tmp_path}"]
    ended = dist_ens("train", *words, xla_flags="")
    assert ended.returncode == ExitCode.DIVERGED == 43, ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    failed = summary["failures"]["members"]
    assert [(member["member_id"], member["first_step"]) for member in failed] == [(0, 2), (1, 2)]
    assert "member 1: " in (tmp_path / "report.html").read_text()
    told = " ".join(ended.stdout.split())
    assert f"All 2 members have failed, so the run ends at step {summary['steps']} of 40" in told
    if policy == "freeze":
        assert "Member 1 failed at step 2: the loss is not finite; it takes no more upda" in told
    # The state after step 1 is the last that is finite. Frozen members keep it.
    newest = de.load(tmp_path)
    assert newest.step == (1 if policy == "continue" else summary["steps"])
    assert is_finite(newest.state)
