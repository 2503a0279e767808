"""Losses with a mistake: each is an error message, in `fit`, `update` and `evaluate`."""

import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.ground.errors import UserError
from test_bad_input import DATA, EXAMPLES, fit, layout_of, loss_fn, nll_of, no_update, with_loss

__all__ = ["no_update"]  # a fixture


def returns_vector(params, model_state, batch, key):
    return nll_of(params, batch), (model_state, {})


def returns_loss_alone(params, model_state, batch, key):
    return nll_of(params, batch).mean()


def returns_vector_beside(params, model_state, batch, key):
    nll = nll_of(params, batch)
    return nll.mean(), (model_state, {"nll": nll})


def returns_other_state(params, model_state, batch, key):
    return nll_of(params, batch).mean(), ({"count": jnp.float32(1)}, {})


def uses_numpy(params, model_state, batch, key):
    return np.log(np.asarray(nll_of(params, batch))).mean(), (model_state, {})


def branches_on_value(params, model_state, batch, key):
    loss = nll_of(params, batch).mean()
    return (loss if loss > 1 else 2 * loss), (model_state, {})


BAD_LOSSES = {
    returns_vector: r"The value 'loss' of the loss has the shape \[16\], and it must be one number",
    returns_loss_alone: r"The loss returned float32\[\]. A loss is loss_fn\(params, model",
    returns_vector_beside: r"The value 'nll' of the loss has the shape \[16\]",
    returns_other_state: r"The loss returned a model state of \['count'\] float32\[\], and",
    uses_numpy: "The loss cannot be compiled: TracerArray.* Use jax.numpy in place of NumPy",
    branches_on_value: "The loss cannot be compiled: TracerBool.* Use jnp.where or jax.lax.cond",
}


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize("loss", BAD_LOSSES, ids=lambda loss: loss.__name__)
def test_a_bad_loss_is_refused_by_fit_update_and_evaluate(loss):
    message = f"^{BAD_LOSSES[loss]}"
    with pytest.raises(UserError, match=message):
        fit(with_loss(loss), batch_size=EXAMPLES)
    ensemble = with_loss(loss, layout=layout_of(1, 2))
    state = ensemble.init(DATA)
    with pytest.raises(UserError, match=message):
        ensemble.update(state, DATA)
    assert not state.params["w"].is_deleted()
    with pytest.raises(UserError, match=message):
        de.evaluate(with_loss(loss), with_loss(loss_fn).init(DATA), DATA)


def test_fit_says_what_a_loss_raised():
    def loss(params, model_state, batch, key):
        return batch["targets"].mean() * params["w"].sum(), (model_state, {})

    message = "^A training step could not be traced: KeyError: 'targets'. Correct the network"
    with pytest.raises(UserError, match=message):
        fit(with_loss(loss))
