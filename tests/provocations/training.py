"""How the messages of `dist_ens.training` are provoked."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dist_ens import fit
from dist_ens.checkpoint import Lineage
from dist_ens.layout import BATCH
from dist_ens.losses import squared_error
from dist_ens.members import as_member
from dist_ens.training import callback_states, host_batches, loop
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.beginning import _without_dropped
from provocations._parts import (
    CLASSES,
    FEATURES,
    apply,
    batch,
    ensemble,
    examples,
    layout,
    network,
    raises,
    source,
)


def _fit(data=None, loss=None, made=None, **options):
    if not {"steps", "epochs"} & options.keys():
        options["steps"] = 1
    data = batch() if data is None else data
    return fit(made or ensemble(loss), data, progress=False, **options)


def _loss(params, model_state, batch, key):
    return jnp.square(apply(params, batch["inputs"])).mean(), (model_state, {})


def _read(*batches, again=True, steps=9, objective=None):
    """Reads all batches of an iterable, and those of further passes."""
    data = BatchIterable(list(batches) if again else iter(batches), layout(), objective)
    for step in range(steps):
        data._next(step, steps, print)


def no_batches():
    _read()


def a_batch_of_another_type():
    _read(batch(), batch() | {"labels": np.zeros(8, np.float32)})


def a_batch_of_unequal_length():
    _read(batch() | {"labels": np.zeros(7, int)}, objective=squared_error())


def a_batch_without_labels():
    _read(batch(), {"inputs": batch()["inputs"]})


def an_iterator_that_ends():
    _read(batch(), batch(), again=False)


def a_function_that_returns_one_iterator():
    only = iter([batch()])
    data = BatchIterable(lambda: only, layout())
    data._next(0, 9, print)
    data._next(1, 9, print)


@functools.cache
def _begun():
    return ensemble().init(batch())


def _state(**changes):
    return _begun()._replace(**changes)


def a_state_of_another_network():
    _fit(state=_state(params={"w": jnp.zeros((2, FEATURES, CLASSES + 1))}))


def a_state_of_other_members():
    _fit(state=_state(member_id=jnp.array([4, 5])))


def a_state_of_members_at_other_steps():
    _fit(state=_state(step=jnp.array([10, 20])))


def a_run_that_has_its_steps():
    _fit(state=_state(step=jnp.array([10, 10])))


class Stopping:
    """A callback with a state that JSON cannot hold."""

    def state(self):
        return {"best": object()}

    def restore(self, state):
        pass


def a_callback_whose_state_json_cannot_hold():
    callback_states.saved_states([Stopping()])


def a_run_with_other_callbacks():
    stored = json.dumps({"callbacks": [{"name": "EarlyStopping", "state": {}}]}).encode()
    callback_states.restore_states([Stopping()], stored, "runs/digits", "same")


def a_step_that_cannot_be_traced():
    def loss(params, model_state, batch, key):
        raises()

    _fit(loss=loss)


def a_callback_without_a_method():
    _fit(callbacks=[3])


def parameters_in_place_of_a_state():
    _fit(state={"w": jnp.zeros((2, FEATURES, CLASSES))})


def a_network_that_cannot_be_initialised():
    _fit(made=ensemble(member=as_member(init=lambda key, inputs: raises(), apply=_full_apply)))


def _full_apply(params, model_state, inputs, key, train):
    return inputs, model_state


def a_network_that_does_not_take_the_inputs():
    _fit(made=ensemble(member=network(raises)))


def a_network_with_fewer_outputs():
    _fit(made=ensemble(member=network(lambda params, inputs: inputs[:, :2])))


def a_network_that_returns_two_arrays():
    _fit(made=ensemble(member=network(lambda params, inputs: (inputs, inputs))))


def data_without_labels():
    _fit({"inputs": examples()[0]})


def data_of_other_groups():
    _fit(source(), made=ensemble(num_groups=2))


def one_callback_in_place_of_a_list():
    _fit(callbacks=Stopping())


def a_name_in_place_of_checkpoints():
    _fit(checkpoints="runs/digits")


def a_network_in_place_of_an_ensemble():
    fit(network(), batch(), steps=1)


def no_epochs():
    _fit(epochs=0)


def neither_steps_nor_epochs():
    _fit(steps=None, epochs=None)


def scores_without_data():
    _fit(eval_every=10)


def standardised_labels_of_an_iterable():
    _fit([batch()], squared_error(standardize=True))


def a_number_in_place_of_data():
    _fit(3)


def a_batch_size_that_is_a_fraction():
    _fit(batch_size=0.5)


def a_batch_size_larger_than_the_data():
    _fit(batch_size=9)


def a_batch_size_of_an_iterable():
    _fit([batch()], batch_size=8)


def epochs_of_an_iterable():
    _fit([batch()], epochs=2)


def two_kinds_of_data_to_score():
    _fit(eval_data=batch(), validation=0.1)


def a_share_in_percent():
    _fit(validation=10)


def a_share_of_an_iterable():
    _fit([batch()], validation=0.1)


def _two_hosts(monkeypatch):
    """Makes a second host that yields something else."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda mine: np.stack([mine, mine + 1])
    )


def hosts_that_yield_other_examples(monkeypatch):
    of_all = layout(2, num_devices=4)
    _two_hosts(monkeypatch)
    host_batches.check_columns_agree(of_all, {"inputs": examples()[0]}, BATCH)


def hosts_that_yield_other_shapes(monkeypatch):
    _two_hosts(monkeypatch)
    host_batches.check_hosts_agree({"inputs": jax.ShapeDtypeStruct((8, FEATURES), "float32")})


def _returned(change):
    """Checks what a callback of this name returns for a state."""
    state = _state()
    loop._checked_state(Stopping(), change(state), state, layout())


def a_callback_that_returns_parameters():
    _returned(lambda state: state.params)


def a_callback_that_returns_another_network():
    _returned(lambda state: state._replace(params={"w": jnp.zeros((2, 2))}))


class _Printing:
    def __call__(self, info):
        print(info.step)


def a_callback_that_is_a_class():
    _fit(callbacks=[_Printing])


def data_that_are_a_class():
    _fit(dict)


def labels_that_are_all_the_same():
    data = {"inputs": examples()[0], "labels": np.ones(8, np.float32)}
    made = ensemble(squared_error(standardize=True), network(lambda p, x: x @ p["w"][:, :1]))
    _fit(data, made=made)


def a_member_that_fails_under_the_policy_raise():
    bad = batch() | {"inputs": np.full((8, FEATURES), np.nan, np.float32)}
    made = ensemble(failures="raise")
    _fit([bad], made=made, steps=3, steps_per_call=1)


def members_that_were_dropped_under_another_policy():
    opened = types.SimpleNamespace(members=[Lineage(0)], saved_step=500)
    _without_dropped(ensemble(), opened)
