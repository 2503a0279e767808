"""Losses with a mistake: each is an error message, in `fit`, `update` and `evaluate`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.errors import UserError
from test_bad_input import DATA, EXAMPLES, fit, layout_of, loss_fn, nll_of, no_update, with_loss

__all__ = ["no_update"]  # a fixture


def returns_vector(params, model_state, batch, key):
    return nll_of(params, batch), (model_state, {})


def returns_loss_alone(params, model_state, batch, key):
    return nll_of(params, batch).mean()


def returns_aux_alone(params, model_state, batch, key):
    return nll_of(params, batch).mean(), {"accuracy": 1.0}


def returns_list(params, model_state, batch, key):
    return nll_of(params, batch).mean(), (model_state, [1.0])


def returns_vector_beside(params, model_state, batch, key):
    nll = nll_of(params, batch)
    return nll.mean(), (model_state, {"nll": nll})


def returns_text_beside(params, model_state, batch, key):
    return nll_of(params, batch).mean(), (model_state, {"name": "mlp"})


def returns_loss_twice(params, model_state, batch, key):
    loss = nll_of(params, batch).mean()
    return loss, (model_state, {"loss": loss})


def returns_other_state(params, model_state, batch, key):
    return nll_of(params, batch).mean(), ({"count": jnp.float32(1)}, {})


def returns_integer(params, model_state, batch, key):
    return jnp.int32(1), (model_state, {})


def uses_numpy(params, model_state, batch, key):
    return np.log(np.asarray(nll_of(params, batch))).mean(), (model_state, {})


def branches_on_value(params, model_state, batch, key):
    loss = nll_of(params, batch).mean()
    return (loss if loss > 1 else 2 * loss), (model_state, {})


_KEPT = []


def keep_a_tracer():
    jax.jit(lambda x: _KEPT.append(x) or x)(1.0)


def closes_over_tracer(params, model_state, batch, key):
    return nll_of(params, batch).mean() * _KEPT[0], (model_state, {})


BAD_LOSSES = {
    returns_vector: "The loss has the shape [16], and it must be one number. Average over",
    returns_loss_alone: "The loss returned an array float32[]. A loss is loss_fn(params, model",
    returns_aux_alone: "The loss returned a dict beside its value. A loss is loss_fn(params, mo",
    returns_list: "The auxiliary output of the loss is a list, not a dict of scalars by name. A",
    returns_vector_beside: "The auxiliary value 'nll' of the loss has the shape [16], and it must",
    returns_text_beside: "The auxiliary value 'name' of the loss is a str, and it must be one numb",
    returns_loss_twice: "The auxiliary output of the loss has a key 'loss', which is the name of",
    returns_other_state: "The loss returned a model state of ['count'] float32[], and",
    returns_integer: "The loss has the type int32, which has no gradient. Return a floating-point",
    uses_numpy: "The loss passes a traced array to NumPy, which cannot be compiled: ",
    branches_on_value: "The loss needs the value of a traced array while it is compiled: ",
    closes_over_tracer: "The loss uses an array of another traced function: it closes over",
}


@pytest.fixture
def kept_tracer():
    keep_a_tracer()
    yield
    _KEPT.clear()


@pytest.mark.usefixtures("no_update", "kept_tracer")
@pytest.mark.parametrize("loss", BAD_LOSSES, ids=lambda loss: loss.__name__)
def test_fit_refuses_a_bad_loss_before_anything_is_compiled(loss):
    with pytest.raises(UserError, match=f"^{re.escape(BAD_LOSSES[loss])}"):
        fit(with_loss(loss), batch_size=EXAMPLES)


@pytest.mark.usefixtures("kept_tracer")
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("loss", BAD_LOSSES, ids=lambda loss: loss.__name__)
def test_update_refuses_a_bad_loss(loss, columns):
    ensemble = with_loss(loss, layout=layout_of(1, columns))
    state = ensemble.init(DATA)
    with pytest.raises(UserError, match=f"^{re.escape(BAD_LOSSES[loss])}"):
        ensemble.update(state, DATA)
    assert not state.params["w"].is_deleted()


@pytest.mark.usefixtures("kept_tracer")
@pytest.mark.parametrize("loss", BAD_LOSSES, ids=lambda loss: loss.__name__)
def test_evaluate_refuses_a_bad_loss(loss):
    state = with_loss(loss_fn).init(DATA)
    with pytest.raises(UserError, match=f"^{re.escape(BAD_LOSSES[loss])}"):
        de.evaluate(with_loss(loss), state, DATA)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda params, batch: params["w"].sum(),
        lambda params, model_state, batch, key, step: params["w"].sum(),
        lambda: 0.0,
    ],
    ids=["two", "five", "none"],
)
def test_a_loss_with_another_signature_is_refused(wrong):
    with pytest.raises(UserError, match=r"^The loss <lambda>\(.*\) cannot be called with four arg"):
        with_loss(wrong)


def test_what_is_no_loss_is_refused():
    with pytest.raises(UserError, match=r"^The loss is a str. Give an objective, such as "):
        with_loss("categorical")


def test_fit_says_what_a_loss_raised():
    def loss(params, model_state, batch, key):
        return batch["targets"].mean() * params["w"].sum(), (model_state, {})

    message = "^A training step could not be traced: KeyError: 'targets'. Correct the network"
    with pytest.raises(UserError, match=message):
        fit(with_loss(loss))
