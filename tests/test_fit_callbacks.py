"""What callbacks of `fit` are told and save, and when they end a run."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.checkpoint import CheckpointStore
from dist_ens.errors import UserError
from dist_ens.training.callback_states import restore_states, saved_states
from test_bad_input import classifier, fit


def saved_in(folder):
    return de.Checkpoints(folder, every_secs=None)


# States of callbacks


class Counts:
    """A callback with a state."""

    def __init__(self, value=None):
        self.value = value

    def state(self):
        return self.value

    def restore(self, state):
        self.value = state


class CountsToo(Counts):
    """Another one."""


def test_states_belong_to_callbacks_by_their_names():
    stored = saved_states([print, Counts(1), CountsToo({"best": 0.5}), Counts(3)])
    callbacks = [Counts(), CountsToo(), print, Counts()]
    restore_states(callbacks, stored, "runs/a", "same")
    assert [each.value for each in callbacks if each is not print] == [1, {"best": 0.5}, 3]


def test_the_state_of_one_callback_is_not_given_to_another():
    stored = saved_states([Counts(1)])
    callbacks = [CountsToo(), Counts()]
    message = (
        "runs/a holds a run with states of the callbacks Counts, and this run has CountsToo, "
        "Counts. Give the same callbacks in the same order, or set resume='anyway'"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        restore_states(callbacks, stored, "runs/a", "same")
    with pytest.raises(UserError, match="of the callbacks Counts, and this run has none. Give"):
        restore_states([], stored, "runs/a", "same")
    restore_states(callbacks, stored, "runs/a", "anyway")
    assert [each.value for each in callbacks] == [None, 1]


def test_states_that_were_saved_without_names_are_restored_in_their_order():
    stored = json.dumps([1, {"best": None}]).encode()
    callbacks = [Counts(), CountsToo()]
    restore_states(callbacks, stored, "runs/a", "same")
    assert [each.value for each in callbacks] == [1, {"best": None}]
    for given in ([Counts()], [Counts(), Counts(), Counts()]):
        with pytest.raises(UserError, match="holds a run with states of the callbacks"):
            restore_states(given, stored, "runs/a", "same")


def test_a_state_is_what_json_can_hold():
    stored = saved_states([Counts({"best": np.float32(0.5), "steps": [np.int64(3), jnp.int32(4)]})])
    callback = Counts()
    restore_states([callback], stored, "runs/a", "same")
    assert callback.value == {"best": 0.5, "steps": [3, 4]}
    message = (
        "The state of the callback Counts cannot be saved: a ndarray is not what JSON can hold. "
        "Return what JSON can hold from Counts.state: numbers, texts, bools, None, and lists and "
        "dicts of these."
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        saved_states([Counts(np.zeros(2))])


def test_a_resumed_run_restores_its_callbacks(tmp_path):
    fit(classifier(), steps=2, callbacks=[Counts(7)], checkpoints=saved_in(tmp_path))
    callback = Counts()
    fit(classifier(), steps=4, callbacks=[callback], checkpoints=saved_in(tmp_path))
    assert callback.value == 7
    with pytest.raises(UserError, match="holds a run with states of the callbacks Counts, and th"):
        fit(classifier(), steps=6, callbacks=[CountsToo()], checkpoints=saved_in(tmp_path))


def test_states_of_callbacks_are_read_by_another_number_of_hosts(tmp_path, monkeypatch):
    fit(classifier(), steps=2, callbacks=[Counts(7)], checkpoints=saved_in(tmp_path))
    store = CheckpointStore(tmp_path, read_only=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for host in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        stored = store.restore_host_file(2, "callbacks", is_shared=True)
        assert json.loads(stored)["callbacks"] == [{"name": "Counts", "state": 7}]
