"""Section "Bad input" of the Python API: every mistake is an error message, before it costs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import failing
from dist_ens.ensemble import Ensemble
from dist_ens.ground.errors import RunError, UserError
from dist_ens.metrics import Metric

EXAMPLES, CLASSES = 16, 3
_RANDOM = np.random.default_rng(0)
DATA = {
    "inputs": _RANDOM.normal(size=(EXAMPLES, 4)).astype(np.float32),
    "labels": _RANDOM.integers(0, CLASSES, EXAMPLES).astype(np.int32),
}


def init(key, inputs):
    return {"w": jax.random.normal(key, (4, CLASSES))}, ()


def apply(params, model_state, inputs, key, train):
    return inputs @ params["w"], model_state


def nll_of(params, batch):
    logits = batch["inputs"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def loss_fn(params, model_state, batch, key):
    return nll_of(params, batch).mean(), (model_state, {})


def layout_of(rows=2, columns=1):
    return de.Layout.make(2, ensemble_axis=rows, devices=jax.devices()[: rows * columns])


def ensemble_of(network, loss, **options):
    """An ensemble of two members on two devices."""
    options = {"num_members": 2, "layout": layout_of(), "execution": "vmap"} | options
    return de.Ensemble(network, optax.sgd(0.1), loss, **options)


def classifier(**options):
    """An ensemble with an objective."""
    return ensemble_of((init, apply), de.losses.categorical(CLASSES), **options)


def with_loss(loss, **options):
    """An ensemble with a loss function, which cannot predict."""
    return ensemble_of(de.as_member(init=init), loss, **options)


def fit(ensemble, data=DATA, **options):
    return failing.fit(ensemble, data, **{"steps": 8} | options)


@pytest.fixture
def no_update(monkeypatch):
    """The update of an ensemble must not be called, nor compiled."""

    def refuse(ensemble):
        raise AssertionError("an update was asked for")

    monkeypatch.setattr(Ensemble, "update_steps", property(refuse))


SHORT = DATA | {"labels": DATA["labels"][:-1]}
OBJECTS = DATA | {"names": np.array(["cat"] * EXAMPLES)}
TOO_LARGE = DATA | {"inputs": np.full((EXAMPLES, 4), 1e300)}
TOO_LONG = DATA | {"labels": np.full(EXAMPLES, 2**40)}
SCALAR = DATA | {"scale": 1.0}
NO_LABELS = {"inputs": DATA["inputs"]}

BAD_DATA = [
    (SHORT, "The arrays of the data have different lengths, or no examples: "),
    (OBJECTS, "the data['names'] has the type <U3, which holds no numbers. Convert it"),
    (TOO_LARGE, "the data['inputs']: the value 1e+300 at index (0, 0) does not fit in"),
    (TOO_LONG, "the data['labels']: the value 1099511627776 at index 0 does not fit in "),
]


@pytest.mark.usefixtures("no_update")
def test_bad_arrays_are_refused():
    ensemble = classifier()
    state = ensemble.init(DATA)
    for use in (
        lambda data: fit(ensemble, data),
        lambda data: fit(ensemble, eval_data=data),
        lambda data: de.evaluate(ensemble, state, data),
    ):
        for data, message in BAD_DATA:
            with pytest.raises(UserError, match=f"^{re.escape(message)}"):
                use(data)


BAD_BATCHES = [
    (SHORT, "The arrays of batch 7 have different lengths: ['inputs'] float32[16, 4], "),
    (OBJECTS, "Leaf ['names'] of batch 7 has the type <U3, which holds no numbers."),
    (TOO_LARGE, "Leaf ['inputs'] of batch 7: the value 1e+300 at index (0, 0) does "),
    (TOO_LONG, "Leaf ['labels'] of batch 7: the value 1099511627776 at index 0 does no"),
    (SCALAR, "The arrays of batch 7 have different lengths: ['inputs'] float32[16, 4], "),
    (NO_LABELS, "Leaf ['labels'] of the batch of step 7 is absent, and that of the first batch"),
]


def test_a_bad_later_batch_of_an_iterable_is_refused():
    ensemble = classifier()
    for data, message in BAD_BATCHES:
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            fit(ensemble, [*[DATA] * 7, data], steps=9)


def test_an_iterable_that_cannot_be_started_again_is_an_error():
    once = iter([DATA] * 5)
    message = r"^The data yielded no batch when it was started again after 5 batches. Give an iter"
    with pytest.raises(UserError, match=message):
        fit(classifier(), lambda: once, steps=9)


def test_a_callback_that_raises_is_named():
    def breaks(info):
        if info.step == 3:
            raise ValueError("no such column")

    message = "^The callback .*breaks raised ValueError at step 3: no such column. Correct the call"
    with pytest.raises(RunError, match=message) as raised:
        fit(classifier(), steps=5, steps_per_call=1, callbacks=[breaks])
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_callback_that_returns_another_structure_is_refused():
    def changes(info):
        return info.state._replace(params={"v": info.state.params["w"]})

    message = r"^The callback .*changes returned a state in which .*\.params\['v'\]"
    with pytest.raises(UserError, match=message):
        fit(classifier(), callbacks=[changes])


def test_a_metric_of_the_wrong_length_is_refused():
    ensemble = classifier()
    state = ensemble.init(DATA)
    for statistic in (
        lambda prediction, labels: prediction["log_probs"][:-1, 0],
        lambda prediction, labels: prediction["log_probs"],
        lambda prediction, labels: jnp.float32(1),
    ):
        with pytest.raises(UserError, match=r"^The (statistic of the )?metric 'own' r"):
            de.evaluate(ensemble, state, DATA, metrics=[Metric("own", statistic)])


def test_types_and_ids_of_other_libraries_are_arguments():
    ensemble = classifier(compute_dtype=jnp.bfloat16, member_ids=np.array([5, 3]))
    assert (ensemble.compute_dtype, ensemble.member_ids) == ("bfloat16", (5, 3))


def test_arrays_that_lie_on_the_device_already_are_checked_too():
    one = de.Layout.make(2, devices=jax.devices()[:1])
    message = r"^Argument 0\['w'\] has the shape \[3\], and its axis 0 should hold 2 members"
    with pytest.raises(UserError, match=message):
        de.lift(lambda m: m["w"], layout=one, in_specs=("members",))({"w": jnp.ones(3)})
    ensemble = classifier(layout=one)
    state = ensemble.init(DATA)
    batch = {"inputs": jnp.asarray(DATA["inputs"]), "labels": jnp.asarray(DATA["labels"][:-1])}
    with pytest.raises(UserError, match=r"^The labels have the shape \[15\], and the network ret"):
        ensemble.update(state, batch)


def test_evaluate_leaves_out_what_the_objective_does_not_read():
    ensemble = classifier()
    state, more = ensemble.init(DATA), DATA | {"group": np.arange(EXAMPLES)}
    found, expected = (de.evaluate(ensemble, state, data).ensemble for data in (more, DATA))
    assert found == expected
