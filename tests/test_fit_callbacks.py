"""What callbacks of `fit` are told and save, and when they end a run."""

import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.callbacks import STOP, EarlyStopping, RunInfo
from dist_ens.checkpoint import saved_step
from dist_ens.evaluation.scores import Scores
from dist_ens.ground.errors import UserError
from dist_ens.metrics import Metric
from dist_ens.metrics.catalogue import direction_of
from dist_ens.processes import cluster
from dist_ens.training.runner import Runner
from test_bad_input import DATA, classifier, fit, loss_fn, with_loss

SCORED = {"eval_data": DATA, "eval_every": 2, "steps_per_call": 1}


def stopped_at(name, values, metrics=(), **options):
    """The number of evaluations after which a run ends; None if it does not."""
    stopping = EarlyStopping(name, **{"patience": 1} | options)
    directions = {name: direction_of(name, metrics)}
    stopping.begin(RunInfo(None, [0], 0, 8, 8, directions, eval_every=1))
    for number, value in enumerate(values, start=1):
        scores = Scores([{name: value}], [{"member_id": 0, name: value}], metrics=tuple(metrics))
        if stopping.evaluated(number, scores) is STOP:
            return number
    return None


def test_early_stopping_knows_which_direction_of_a_metric_is_better():
    own = [Metric("hit", lambda prediction, labels: labels, direction="higher")]
    rising = [0.1, 0.2, 0.3, 0.4]
    assert stopped_at("hit", rising, own) is stopped_at("accuracy", rising) is None
    assert stopped_at("hit", rising[::-1], own) == 2
    assert stopped_at("nll", rising) == stopped_at("loss", rising) == 2
    for name in ("coverage", "entropy", "force_error"):
        with pytest.raises(UserError, match=f"^EarlyStopping waits for '{name}', of which neither"):
            stopped_at(name, rising)
        assert stopped_at(name, rising, direction="higher") is None
    assert stopped_at("nll", [np.nan] * 5, patience=3) == 3


def test_early_stopping_of_an_auxiliary_scalar_takes_the_direction_that_is_given():
    def with_scalar(params, model_state, batch, key):
        loss, (model_state, _) = loss_fn(params, model_state, batch, key)
        return loss, (model_state, {"minus_loss": -loss})

    for direction, expected in (("higher", (8, 8)), ("lower", (1, 2))):
        stopping = EarlyStopping("minus_loss", patience=1, direction=direction)
        result = fit(with_loss(with_scalar), callbacks=[stopping], **(SCORED | {"eval_every": 1}))
        assert (result.step, result.history[-1]["step"]) == expected


def stopping_of(patience):
    """Stops after as many evaluations beside the first: no score improves by as much."""
    return EarlyStopping("loss", patience=patience, min_delta=1e3)


def test_a_run_that_was_stopped_early_says_so_and_is_not_trained_further(tmp_path):
    said, stopping = [], stopping_of(1)
    assert fit(with_loss(loss_fn), callbacks=[stopping], **SCORED).step == 4
    saved = de.Checkpoints(tmp_path, every_secs=None)
    options = SCORED | {"checkpoints": saved, "say": said.append}
    # The callback forgets the scores of a run that is not resumed.
    for callback in (stopping, stopping_of(1)):
        result = fit(with_loss(loss_fn), callbacks=[callback], **options)
        assert (result.step, result.stopped_by) == (4, "EarlyStopping")
        assert result.scores is not None
    reason = r"at step 4 of 8 by EarlyStopping: loss has not improved by more than 1000 for 1 .*\."
    assert re.fullmatch(f"Stopped {reason}", said[0])
    assert re.match(f"This run has ended: it was stopped {reason} Change this", said[1])
    assert fit(with_loss(loss_fn), callbacks=[stopping_of(2)], **options).step == 6


def test_a_run_is_said_to_be_stopped_only_if_it_was():
    def stops(info):
        return STOP if info.step >= 4 else None

    said, options = [], {"steps_per_call": 1, "callbacks": [stops]}
    for steps, stopped_by in ((4, None), (8, stops.__qualname__)):
        result = fit(classifier(), steps=steps, say=said.append, **options)
        assert (result.step, result.stopped_by) == (4, stopped_by)
    assert said == [f"Stopped at step 4 of 8 by {stops.__qualname__}."]


@pytest.mark.parametrize(
    "stops",
    [
        lambda info: STOP if info.step == 2 else None,
        types.SimpleNamespace(evaluated=lambda step, scores: STOP if step == 2 else None),
    ],
    ids=["step", "evaluation"],
)
def test_a_callback_changes_the_state_once_at_the_step_at_which_a_run_is_stopped(stops):
    seen = []

    def adds_one(info):
        seen.append((info.step, info.is_last))
        return info.state._replace(params=jax.tree.map(lambda leaf: leaf + 1, info.state.params))

    plain = classifier().init(DATA).params["w"]
    frozen = with_loss(loss_fn).replace(optimizer=optax.set_to_zero())
    result = fit(frozen, callbacks=[adds_one, stops], **SCORED)
    assert result.step == 2
    assert seen == [(1, False), (2, False), (2, True)]
    np.testing.assert_allclose(result.state.params["w"], plain + 2, rtol=1e-6)


def test_a_callback_of_one_host_ends_the_run_of_all(monkeypatch):
    # Another host asks to stop in its third call; `any_host` is what the hosts agree on.
    asked = iter([False, False, True])
    monkeypatch.setattr(cluster, "any_host", lambda value: value or next(asked, False))
    monkeypatch.setattr(Runner, "ask", lambda *_: False)
    seen = []

    def looks(info):
        seen.append((info.step, info.is_last))

    result = fit(classifier(), steps_per_call=1, callbacks=[looks])
    assert (result.step, result.stopped_by) == (3, "a callback of another host")
    assert seen[-2:] == [(3, False), (3, True)]


def test_a_callback_is_called_at_multiples_of_its_own_number_of_steps():
    def sees(info):
        seen.append(info.step)

    sees.every = 6
    for options, expected in (({}, [6, 12]), ({"steps_per_call": 4}, [8, 12])):
        seen = []
        fit(classifier(), steps=13, callbacks=[sees], **options)
        assert seen == expected


class Counts:
    """A callback with a state."""

    def __init__(self, value=None):
        self.value = value

    def state(self):
        return self.value

    def restore(self, state):
        self.value = state


class CountsToo(Counts):
    pass


def resume(folder, callbacks, *, steps=4, **options):
    """Begins or resumes a run in a folder, with some callbacks."""
    checkpoints = de.Checkpoints(folder, every_secs=None, **options)
    return fit(classifier(), steps=steps, callbacks=callbacks, checkpoints=checkpoints)


def test_states_belong_to_callbacks_by_their_names_and_are_what_json_can_hold(tmp_path):
    state = {"best": np.float32(0.5), "steps": [np.int64(3), jnp.int32(4)]}
    resume(tmp_path, [print, Counts(1), CountsToo(state), Counts(3)], steps=2)
    callbacks = [Counts(), CountsToo(), Counts(), print]
    resume(tmp_path, callbacks)
    assert [each.value for each in callbacks[:3]] == [1, {"best": 0.5, "steps": [3, 4]}, 3]
    message = "The state of the callback Counts cannot be saved: can only convert an array of size"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        resume(tmp_path / "other", [Counts(np.zeros(2))])


def test_the_state_of_one_callback_is_not_given_to_another(tmp_path):
    resume(tmp_path, [Counts(1)], steps=2)
    callbacks = [CountsToo(), Counts()]
    message = (
        f"{tmp_path} holds states of the callbacks Counts, and this run has CountsToo, Counts. "
        "Give the same callbacks in the same order, or set resume='anyway'"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        resume(tmp_path, callbacks)
    resume(tmp_path, callbacks, resume="anyway")
    assert [each.value for each in callbacks] == [None, 1]
    resume(tmp_path / "plain", [], steps=2)
    resume(tmp_path / "plain", callbacks)  # A run without states may get callbacks that have one.


def test_states_of_callbacks_are_read_by_another_number_of_hosts(tmp_path, monkeypatch):
    resume(tmp_path, [Counts(7)], steps=2)
    saved = saved_step(tmp_path, 2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for host in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        stored = saved.host_file("services", is_shared=True)
        assert json.loads(stored) == [{"name": "Counts", "state": 7}]
