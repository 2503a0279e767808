"""Equinox modules as people write them: fields of any kind, a state, and a loss of one's own."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
import networks

DATA = {"inputs": np.random.default_rng(0).normal(size=(8, 3)).astype("f")}


class Module(eqx.Module):
    """A module with a Python number, an array of whole numbers, and a state."""

    power: int
    weights: jax.Array
    order: jax.Array
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.power = 3
        self.weights = jax.random.normal(key, (3,))
        self.order = jax.random.permutation(key, 3)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return jnp.tanh(x[self.order] @ self.weights) ** self.power, state


@functools.partial(eqx.filter_value_and_grad, has_aux=True)
def squares(module, state, x):
    called = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    outputs, state = called(x, state)
    return jnp.mean(outputs**2), state


def loss_fn(params, model_state, batch, key):
    assert params.power == 3
    (loss, model_state), _ = squares(params, model_state, batch["inputs"])
    return loss, (model_state, {})


LAYOUT = networks.layout_on((1, 1), 2)
ENSEMBLE = networks.ensemble_of(Module, optax.sgd(0.1), LAYOUT, loss_fn)


def test_a_step_is_that_of_filter_grad_by_the_state_and_the_arrays_that_are_not_trained():
    first = jax.device_get(ENSEMBLE.init(DATA))
    state, metrics = ENSEMBLE.update(ENSEMBLE.init(DATA), DATA)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for number in range(2):
        params, (fixed, statistics) = networks.member_of((first.params, first.model_state), number)
        (made, _), x = eqx.nn.make_with_state(Module)(jax.random.key(0)), DATA["inputs"]
        module = eqx.combine(params, fixed, made)
        (value, new_statistics), grads = squares(module, statistics, x)
        close(metrics["loss"][number], value)
        # Normalised inputs, and weights in the member's own order.
        normal = ((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))[:, fixed.order]
        close(value, np.mean(np.tanh(normal @ params.weights) ** 6))
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, eqx.filter(grads, eqx.is_array))
        jax.tree.map(close, networks.member_of(state.params, number), expected)
        jax.tree.map(close, networks.member_of(state.model_state[1], number), new_statistics)


def test_a_module_is_trained_predicted_saved_and_loaded(tmp_path):
    saved = de.Checkpoints(tmp_path)
    fitted = de.fit(ENSEMBLE, DATA, steps=2, batch_size=4, checkpoints=saved, progress=False)
    found = ENSEMBLE.predict(fitted.state, DATA["inputs"]).members
    assert found.shape == (2, 8)
    loaded = de.load(tmp_path, ensemble=ENSEMBLE)
    np.testing.assert_array_equal(loaded.predict(DATA["inputs"]).members, found)
