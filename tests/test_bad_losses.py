"""Losses with a mistake: each is an error message, in `fit`, `update` and `evaluate`."""

import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.ground.errors import UserError
from test_bad_input import DATA, EXAMPLES, fit, layout_of, loss_fn, nll_of, no_update, with_loss

__all__ = ["no_update"]  # a fixture


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda nll, state: (nll, (state, {})),
            r"The value 'loss' of the loss has the shape \[16\], and it must be one number",
        ),
        (
            lambda nll, state: nll.mean(),
            r"The loss returned float32\[\]. A loss is loss_fn\(params, model",
        ),
        (
            lambda nll, state: (nll.mean(), (state, {"nll": nll})),
            r"The value 'nll' of the loss has the shape \[16\]",
        ),
        (
            lambda nll, state: (nll.mean(), ({"count": jnp.float32(1)}, {})),
            r"The loss returned a model state of \['count'\] float32\[\], and",
        ),
        (
            lambda nll, state: (np.log(np.asarray(nll)).mean(), (state, {})),
            "The loss cannot be compiled: TracerArray.* Use jax.numpy in place of NumPy",
        ),
        (
            lambda nll, state: (nll[0] if nll[0] > 1 else 2 * nll[0], (state, {})),
            "The loss cannot be compiled: TracerBool.* Use jnp.where or jax.lax.cond",
        ),
    ],
)
def test_a_bad_loss_is_refused_by_fit_update_and_evaluate(returned, message):
    def loss(params, model_state, batch, key):
        return returned(nll_of(params, batch), model_state)

    with pytest.raises(UserError, match=f"^{message}"):
        fit(with_loss(loss), batch_size=EXAMPLES)
    ensemble = with_loss(loss, layout=layout_of(1, 2))
    state = ensemble.init(DATA)
    with pytest.raises(UserError, match=f"^{message}"):
        ensemble.update(state, DATA)
    assert not state.params["w"].is_deleted()
    with pytest.raises(UserError, match=f"^{message}"):
        de.evaluate(with_loss(loss), with_loss(loss_fn).init(DATA), DATA)


def test_fit_says_what_a_loss_raised():
    def loss(params, model_state, batch, key):
        return batch["targets"].mean() * params["w"].sum(), (model_state, {})

    message = "^A training step could not be traced: KeyError: 'targets'. Correct the network"
    with pytest.raises(UserError, match=message):
        fit(with_loss(loss))
