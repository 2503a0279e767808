"""Equinox modules as people write them: any fields, and a call of their own.

The program has the structure of the example `train_rnn` in the documentation of equinox.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
import networks

LAYOUT = networks.layout_on((1, 1), 2)
RANDOM = np.random.default_rng(0)


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size, out_size, hidden_size, *, key):
        cell_key, linear_key = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=cell_key)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=linear_key)
        self.bias = jnp.zeros(out_size)

    def __call__(self, sequence):
        hidden = jnp.zeros((self.hidden_size,))
        out, _ = jax.lax.scan(lambda carry, x: (self.cell(x, carry), None), hidden, sequence)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


@eqx.filter_value_and_grad
def cross_entropy(model, x, y):
    pred = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(pred) + (1 - y) * jnp.log(1 - pred))


SEQUENCES = RANDOM.normal(size=(16, 5, 2)).astype("f")
LABELS = (SEQUENCES[:, :1, 0] > 0).astype("f")


def make(key):
    return RNN(2, 1, 4, key=key)


def loss_fn(params, model_state, batch, key):
    assert params.hidden_size == 4
    return cross_entropy(params, batch["inputs"], batch["y"])[0], (model_state, {})


ENSEMBLE = networks.ensemble_of(make, optax.sgd(0.1), LAYOUT, loss_fn)
DATA = {"inputs": SEQUENCES, "y": LABELS}


def test_a_program_of_equinox_is_trained_predicted_saved_and_loaded(tmp_path):
    saved = de.Checkpoints(tmp_path)
    fitted = de.fit(ENSEMBLE, DATA, steps=2, batch_size=8, checkpoints=saved, progress=False)
    found = ENSEMBLE.predict(fitted.state, SEQUENCES).members
    for params, outputs in zip(de.unstack_members(fitted.state.params), found, strict=True):
        trained = eqx.combine(params, make(jax.random.key(0)))
        np.testing.assert_allclose(outputs, jax.vmap(trained)(SEQUENCES), rtol=1e-5, atol=1e-6)
    loaded = de.load(tmp_path, ensemble=ENSEMBLE)
    np.testing.assert_array_equal(loaded.predict(SEQUENCES).members, found)


def test_a_step_of_a_module_with_other_fields_is_that_of_filter_grad():
    state = ENSEMBLE.init(DATA)
    before = de.unstack_members(state.params)
    state, metrics = ENSEMBLE.update(state, DATA)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for number, params in enumerate(before):
        model = eqx.combine(params, make(jax.random.key(0)))
        value, grads = cross_entropy(model, SEQUENCES, LABELS)
        np.testing.assert_allclose(metrics["loss"][number], value, rtol=1e-5)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, eqx.filter(grads, eqx.is_array))
        jax.tree.map(close, networks.member_of(state.params, number), expected)


class Counted(eqx.Module):
    """A module with an array of whole numbers, and a state that a loss of one's own updates."""

    weights: jax.Array
    order: jax.Array
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.weights = jax.random.normal(key, (3,))
        self.order = jax.random.permutation(key, 3)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return x[self.order] @ self.weights, state


def test_a_loss_is_given_the_state_of_equinox_and_the_arrays_that_are_not_trained():
    x = RANDOM.normal(size=(8, 3)).astype("f")

    def loss_fn(params, model_state, batch, key):
        called = jax.vmap(params, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        outputs, model_state = called(batch["inputs"], model_state)
        return jnp.mean(outputs**2), (model_state, {})

    ensemble = networks.ensemble_of(Counted, optax.sgd(0.1), LAYOUT, loss_fn)
    first = jax.device_get(ensemble.init({"inputs": x}))
    state, metrics = ensemble.update(ensemble.init({"inputs": x}), {"inputs": x})
    # Normalised inputs, and weights in the member's own order.
    order, weights = first.model_state[0].order, first.params.weights
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    expected = [np.mean((normal[:, order[k]] @ weights[k]) ** 2) for k in range(2)]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
    statistics = [jax.tree.leaves(each.model_state[1]) for each in (first, state)]
    assert any(not np.array_equal(*pair) for pair in zip(*statistics, strict=True))
    assert ensemble.apply(state, x).shape == (2, 8)
