"""The state of the best evaluation: what `fit` returns, saves, and finds again when it resumes."""

import shutil
import signal
import types
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import dist_ens as de
import failing
from dist_ens.callbacks import STOP, EarlyStopping
from dist_ens.checkpoint import opened
from dist_ens.checkpoint import saved_steps as steps_in

_RANDOM = np.random.default_rng(0)
# 16 examples of 20 inputs are learnt by heart, so that the score of others rises from some step on.
TRAIN, OTHERS = (
    {
        "inputs": _RANDOM.normal(size=(16, 20)).astype(np.float32),
        "labels": _RANDOM.integers(0, 2, 16),
    }
    for _ in range(2)
)
NETWORK = (
    lambda key: {"w": jax.random.normal(key, (20, 2))},
    lambda params, inputs: inputs @ params["w"],
)


def fit(steps=60, *, rows=2, columns=1, waves=1, said=None, **options):
    devices = jax.devices()[: rows * columns]
    layout = de.Layout.make(4, ensemble_axis=rows, devices=devices)
    objective, optimizer = de.losses.categorical(2), optax.sgd(0.2)
    how = {"num_members": 4, "layout": layout, "execution": "vmap", "waves": waves}
    ensemble = de.Ensemble(NETWORK, optimizer, objective, **how)
    options = {"eval_data": OTHERS, "eval_every": 2, "steps_per_call": 2} | options
    say = None if said is None else said.append
    return ensemble, failing.fit(ensemble, TRAIN, steps=steps, say=say, **options)


def saved_in(folder, **options):
    return de.Checkpoints(folder, every_secs=None, **options)


@pytest.fixture(scope="module")
def best():
    """The step with the lowest NLL, and that NLL."""
    of_steps = {at["step"]: at["test/nll"] for at in fit()[1].history if "test/nll" in at}
    best = min(of_steps, key=of_steps.get)
    assert 2 < best < 40, of_steps
    return best, of_steps[best]


@pytest.mark.parametrize(
    ("mesh", "patience"),
    [
        *(({}, 3), ({"columns": 2}, 3)),
        pytest.param({}, 99, marks=pytest.mark.long),
        pytest.param({"waves": 2}, 3, marks=pytest.mark.long),
    ],
)
def test_the_state_of_the_best_evaluation_is_returned_with_its_scores(best, mesh, patience):
    said = []
    result = fit(**mesh, said=said, callbacks=[EarlyStopping(patience=patience)])[1]
    step, nll = best
    assert (result.step, result.best_step) == (step, step)
    assert np.asarray(result.state.step).tolist() == [step] * 4
    # It is stopped after three evaluations that are no better, or at its last step.
    assert result.history[-1]["step"] == (step + 6 if patience == 3 else 60)
    assert result.stopped_by == ("EarlyStopping" if patience == 3 else None)
    assert said[-1] == f"The result is the state of step {step}, which was scored best."
    of_steps = fit(step, **mesh, eval_data=None, eval_every=None)[1].state
    for found, expected in zip(*map(jax.tree.leaves, (result.state, of_steps)), strict=True):
        assert found.sharding == expected.sharding
    np.testing.assert_array_equal(result.state.params["w"], of_steps.params["w"])
    np.testing.assert_allclose(result.scores.ensemble["nll"], nll, rtol=1e-5)
    assert result.scores.intervals  # as those of a last evaluation have
    # It can be trained further.
    assert fit(step + 2, **mesh, state=result.state)[1].step == step + 2


def test_the_last_state_is_returned_if_it_is_asked_for_or_no_callback_knows_a_better(best):
    last = best[0] + 6
    result = fit(callbacks=[EarlyStopping(patience=3, restore_best=False)])[1]
    assert (result.step, result.best_step) == (last, None)
    assert result.scores.ensemble["nll"] > best[1]


def test_a_callback_of_ones_own_chooses_the_state_that_is_returned():
    third = types.SimpleNamespace(
        best_step=lambda: 6, evaluated=lambda step, _: STOP if step == 10 else None
    )
    result = fit(callbacks=[EarlyStopping(restore_best=False), third, EarlyStopping()])[1]
    assert (result.step, result.history[-1]["step"]) == (6, 10)


def test_the_best_score_counts_also_where_it_improves_by_less_than_min_delta():
    stopping = EarlyStopping("loss", patience=3, min_delta=0.1, direction="lower")
    losses = {1: 1.0, 2: 0.95, 3: 0.92, 4: 0.94}
    scores = [types.SimpleNamespace(ensemble={"loss": x}, metrics=()) for x in losses.values()]
    # No score is below 1.0 - 0.1, and three have come since.
    assert list(map(stopping.evaluated, losses, scores)) == [None, None, None, STOP]
    assert stopping.best_step() == 3


def test_a_run_that_is_interrupted_has_the_best_state_after_it_resumes(best, tmp_path):
    step, nll = best

    def interrupts(info):
        if info.step == step + 4:
            signal.raise_signal(signal.SIGTERM)

    def run(*callbacks, folder="run", patience=3, **options):
        checkpoints = saved_in(tmp_path / folder, keep=1, every_steps=2)
        stopping = EarlyStopping(patience=patience)
        return fit(callbacks=[stopping, *callbacks], checkpoints=checkpoints, **options)

    ensemble, stopped = run(interrupts)
    # It is not complete, so the state is the last one, from which it goes on.
    assert (stopped.step, stopped.best_step) == (step + 4, None)
    assert steps_in(tmp_path / "run") == [step, step + 4]
    assert de.load(tmp_path / "run", ensemble=ensemble).step == step + 4
    shutil.copytree(tmp_path / "run", tmp_path / "lost")
    for _ in range(2):  # The second run finds that it has ended.
        resumed = run()[1]
        assert (resumed.step, resumed.stopped_by) == (step, "EarlyStopping")
        np.testing.assert_allclose(resumed.scores.ensemble["nll"], nll, rtol=1e-5)
    loaded = de.load(tmp_path / "run", ensemble=ensemble)
    assert loaded.step == step
    np.testing.assert_array_equal(loaded.state.params["w"], resumed.state.params["w"])
    assert steps_in(tmp_path / "run") == [step, step + 6]
    # Training goes on after the last step, not after the best.
    further = run(patience=5)[1]
    assert (further.step, further.history[-1]["step"]) == (step, step + 10)
    # Without its checkpoint the best state is gone, and that is said.
    shutil.rmtree(tmp_path / "lost" / "checkpoints" / str(step))
    said = []
    result = run(folder="lost", said=said)[1]
    assert (result.step, result.best_step) == (step + 6, None)
    assert any(f"that of step {step}, which is in no sound checkpoint." in each for each in said)
    assert de.load(tmp_path / "lost", ensemble=ensemble).step == step + 6


@pytest.mark.parametrize("kept", ["keep_best", "keep_best_of_members"])
def test_the_best_evaluation_of_the_ensemble_or_of_each_member_is_saved(kept, tmp_path):
    result = fit(checkpoints=saved_in(tmp_path, keep=1, **{kept: "nll"}))[1]
    assert (result.step, result.best_step) == (60, None)
    of_steps = [at for at in result.history if "test/nll" in at]
    names = [f"test/nll/member_0{k}" for k in range(4)] if "members" in kept else ["test/nll"]
    bests = {min(of_steps, key=lambda at: at[name])["step"] for name in names}
    assert steps_in(tmp_path) == sorted({*bests, 60})


def test_a_run_killed_before_it_deleted_a_checkpoint_deletes_it_when_it_resumes(tmp_path):
    def run():
        return fit(4, checkpoints=saved_in(tmp_path, keep=1, every_steps=2), eval_every=None)

    with mock.patch.object(opened, "give_up_checkpoint", side_effect=OSError):
        run()
    assert steps_in(tmp_path) == [2, 4]
    run()  # Its last step is saved already.
    assert steps_in(tmp_path) == [4]
