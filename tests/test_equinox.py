"""Equinox modules as people write them: any fields, and a call of their own.

The two programs have the structure of the examples `train_rnn` and `score_based_diffusion` in the
documentation of equinox.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de

LAYOUT = de.Layout.make(2, ensemble_axis=1, devices=jax.devices()[:1])
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


class Block(eqx.Module):
    mixer: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, num_patches, hidden_size, *, key):
        self.mixer = eqx.nn.MLP(num_patches, num_patches, 8, depth=1, key=key)
        self.norm = eqx.nn.LayerNorm((hidden_size, num_patches))

    def __call__(self, y):
        return y + jax.vmap(self.mixer)(self.norm(y))


class Mixer(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list
    activation: object
    t1: float

    def __init__(self, patch_size, hidden_size, num_patches, t1, *, key):
        keys = jax.random.split(key, 4)
        stride = {"stride": patch_size}
        self.conv_in = eqx.nn.Conv2d(2, hidden_size, patch_size, **stride, key=keys[0])
        self.conv_out = eqx.nn.ConvTranspose2d(hidden_size, 1, patch_size, **stride, key=keys[1])
        self.blocks = [Block(num_patches, hidden_size, key=k) for k in keys[2:]]
        self.activation = jax.nn.tanh
        self.t1 = t1

    def __call__(self, t, y, *, key=None):
        t = jnp.broadcast_to(t / self.t1, y.shape)
        y = self.conv_in(jnp.concatenate([y, t]))
        _, height, width = y.shape
        y = self.activation(y.reshape(y.shape[0], height * width))
        for block in self.blocks:
            y = block(y)
        return self.conv_out(y.reshape(y.shape[0], height, width))


def single_loss(model, data, t, key):
    mean, std = data * jnp.exp(-0.5 * t), jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
    noise = jax.random.normal(key, data.shape)
    pred = model(t, mean + std * noise)
    return (1 - jnp.exp(-t)) * jnp.mean((pred + noise / std) ** 2)


def batch_loss(model, data, t1, key):
    time_key, loss_key = jax.random.split(key)
    t = jax.random.uniform(time_key, (len(data),), maxval=t1)
    keys = jax.random.split(loss_key, len(data))
    return jnp.mean(jax.vmap(functools.partial(single_loss, model))(data, t, keys))


SEQUENCES = RANDOM.normal(size=(16, 5, 2)).astype("f")
LABELS = (SEQUENCES[:, :1, 0] > 0).astype("f")
IMAGES = RANDOM.normal(size=(16, 1, 4, 4)).astype("f")
TIMES = RANDOM.uniform(0.1, 2, 16).astype("f")
PROGRAMS = {
    "train_rnn": (
        lambda key: RNN(2, 1, 4, key=key),
        lambda model, batch, key: cross_entropy(model, batch["inputs"], batch["y"])[0],
        {"inputs": SEQUENCES, "y": LABELS},
        SEQUENCES,
        lambda model: jax.vmap(model)(SEQUENCES),
    ),
    "score_based_diffusion": (
        lambda key: Mixer(2, 4, 4, 2.0, key=key),
        lambda model, batch, key: batch_loss(model, batch, model.t1, key),
        IMAGES,
        {"t": TIMES, "y": IMAGES},
        lambda model: jax.vmap(model)(TIMES, IMAGES),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_equinox_is_trained_predicted_saved_and_loaded(name, tmp_path):
    make, loss, data, inputs, by_hand = PROGRAMS[name]

    def loss_fn(params, model_state, batch, key):
        assert params.hidden_size == 4 if name == "train_rnn" else params.t1 == 2.0
        return loss(params, batch, key), (model_state, {})

    def ensemble():
        fields = {"num_members": 2, "layout": LAYOUT, "execution": "vmap"}
        return de.Ensemble(make, optax.sgd(0.1), loss_fn, **fields)

    fitted = de.fit(
        ensemble(),
        data,
        steps=2,
        batch_size=8,
        checkpoints=de.Checkpoints(tmp_path),
        progress=False,
    )
    found = ensemble().predict(fitted.state, inputs).members
    for params, outputs in zip(de.unstack_members(fitted.state.params), found, strict=True):
        trained = eqx.combine(params, make(jax.random.key(0)))
        np.testing.assert_allclose(outputs, by_hand(trained), rtol=1e-5, atol=1e-6)
    loaded = de.load(tmp_path, ensemble=ensemble())
    np.testing.assert_array_equal(loaded.predict(inputs).members, found)


def test_a_step_of_a_module_with_other_fields_is_that_of_filter_grad():
    make, loss, data, _, _ = PROGRAMS["train_rnn"]
    ensemble = de.Ensemble(
        make,
        optax.sgd(0.1),
        lambda params, model_state, batch, key: (loss(params, batch, key), (model_state, {})),
        num_members=2,
        layout=LAYOUT,
    )
    state = ensemble.init(data)
    before = de.unstack_members(state.params)
    state, metrics = ensemble.update(state, data)
    for number, params in enumerate(before):
        model = eqx.combine(params, make(jax.random.key(0)))
        value, grads = cross_entropy(model, SEQUENCES, LABELS)
        np.testing.assert_allclose(metrics["loss"][number], value, rtol=1e-5)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, eqx.filter(grads, eqx.is_array))
        after = de.unstack_members(state.params)[number]
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), after, expected
        )


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

    ensemble = de.Ensemble(Counted, optax.sgd(0.1), loss_fn, num_members=2, layout=LAYOUT)
    state, metrics = ensemble.update(ensemble.init({"inputs": x}), {"inputs": x})
    # Normalised inputs, and weights in the member's own order.
    first = ensemble.init({"inputs": x})
    order, weights = (
        np.asarray(leaf) for leaf in (first.model_state[0].order, first.params.weights)
    )
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    expected = [np.mean((normal[:, order[k]] @ weights[k]) ** 2) for k in range(2)]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
    statistics = [jax.tree.leaves(each.model_state[1]) for each in (first, state)]
    assert any(not np.array_equal(*pair) for pair in zip(*statistics, strict=True))
    assert ensemble.apply(state, x).shape == (2, 8)
