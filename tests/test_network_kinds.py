"""Networks of every library: given from elsewhere, what they are given, sampling, and sowing."""

from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dist_ens as de
import networks
from dist_ens.ensemble.initial_state import inputs_of
from dist_ens.ground.errors import UserError
from marked import long
from test_as_member import X, hk
from test_member import Linen, Nnx

DATA = {"inputs": X, "labels": X[:, :3].argmax(-1).astype(np.int32)}
KEYS = [jax.random.key(number) for number in range(2)]


def ensemble_of(network, ids=(0, 1), loss=None):
    layout, objective = networks.layout_on((1, 1), len(ids)), loss or de.losses.categorical(3)
    return networks.ensemble_of(network, optax.adam(0.1), layout, objective, member_ids=ids)


# Networks that were trained elsewhere


class Equinox(eqx.Module):
    head: eqx.nn.Linear
    activation: object

    def __init__(self, key):
        self.head, self.activation = eqx.nn.Linear(6, 3, key=key), jax.nn.relu

    def __call__(self, x):
        return self.activation(self.head(x))


def evaluated(module):
    return nnx.view(module, use_running_average=True, deterministic=True)(X)


# Of each a network, its parameters from a key, and its outputs.
GIVEN = {
    "linen variables": (
        Linen(),
        lambda key: Linen().init(key, X, False),
        lambda variables: Linen().apply(variables, X, False),
    ),
    "nnx modules": (Nnx, lambda key: Nnx(nnx.Rngs(key)), evaluated),
    "equinox": (Equinox, Equinox, lambda module: jax.vmap(module)(X)),
    "functions": (
        (lambda key: jax.random.normal(key, (6, 3)), lambda params, x: x @ params),
        lambda key: jax.random.normal(key, (6, 3)),
        lambda params: X @ params,
    ),
}
if hk is not None:
    HAIKU = hk.transform_with_state(lambda x: hk.Linear(3)(x))
    GIVEN["haiku"] = (
        HAIKU,
        lambda key: HAIKU.init(key, X)[0],
        lambda params: HAIKU.apply(params, {}, None, X)[0],
    )


@pytest.mark.parametrize("name", ["linen variables", "nnx modules", *long(*[*GIVEN][2:])])
def test_networks_are_given_predicted_joined_and_trained(name):
    network, init, by_hand = GIVEN[name]
    params = [init(key) for key in KEYS]
    outputs = np.stack([by_hand(each) for each in params])
    ensemble = ensemble_of(network)
    state = ensemble.state_of(params)
    np.testing.assert_allclose(ensemble.apply(state, X), outputs, rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(ensemble.abstract_state(DATA))
    turned = de.State.concatenate([state.select([1]), state.select([0])])
    np.testing.assert_allclose(ensemble.apply(turned, X), outputs[::-1], rtol=1e-5, atol=1e-5)
    fitted = de.fit(ensemble, DATA, steps=1, batch_size=8, state=state, progress=False)
    assert fitted.state.step.tolist() == [1, 1]


# Networks of ones that sample around their inputs where they predict, and drop in training.


class SamplesInLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        scale = self.param("scale", nn.initializers.ones, (6,))
        noise = jax.random.normal(self.make_rng("sample"), x.shape)
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)
        return nn.Dropout(0.5, deterministic=not train)(x) * scale[None] + 0.01 * noise


class SamplesInNnx(nnx.Module):
    def __init__(self, rngs):
        self.scale, self.rngs = nnx.Param(jnp.ones(6)), rngs
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        noise = jax.random.normal(self.rngs.sample(), x.shape)
        return self.dropout(x) * self.scale[...][None] + 0.01 * noise


class SamplesInEquinox(eqx.Module):
    scale: jax.Array
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.scale, self.dropout = jnp.ones(6), eqx.nn.Dropout(0.5)

    def __call__(self, x, key):
        keys = jax.random.split(key)
        noise = jax.random.normal(keys[1], x.shape)
        return self.dropout(x, key=keys[0]) * self.scale + 0.01 * noise


def samples_in_haiku(x, is_training):
    scale = hk.get_parameter("scale", (6,), init=jnp.ones)
    noise = jax.random.normal(hk.next_rng_key(), x.shape)
    x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
    return x * scale[None] + 0.01 * noise


def samples(params, model_state, inputs, key, train):
    return inputs * params + 0.01 * jax.random.normal(key, inputs.shape), model_state


SAMPLING = {
    "linen": SamplesInLinen(),
    "nnx": SamplesInNnx,
    "equinox": SamplesInEquinox,
    "functions": (lambda key, inputs: (jnp.ones((1, 6)), ()), samples),
}
if hk is not None:
    SAMPLING["haiku"] = hk.transform(samples_in_haiku)


@pytest.mark.parametrize("name", ["linen", "nnx", *long(*[*SAMPLING][2:])])
def test_a_network_that_samples_predicts_with_the_key_of_its_member(name):
    ensembles = [
        ensemble_of(SAMPLING[name], ids, de.losses.categorical(6)) for ids in ([0, 3, 1], [3, 4])
    ]
    outputs = [each.apply(each.init(DATA), X) for each in ensembles]
    noise = outputs[0] - X[None]
    assert np.abs(noise).max() < 0.1  # Dropout would double the inputs, or make them 0.
    assert np.abs(noise[0] - noise[1]).max() > 0.01
    np.testing.assert_allclose(outputs[0][1], outputs[1][0], atol=1e-6)
    fitted = de.fit(ensembles[1], DATA, steps=1, batch_size=8, progress=False)
    assert ensembles[1].predict(fitted.state, X).mean.shape == (8, 6)


# What a network is given


class LinenOfTwo(nn.Module):
    @nn.compact
    def __call__(self, t, y, train=False):
        return nn.Dense(3)(y) * t[:, None]


class NnxOfTwo(Nnx):
    def __call__(self, t, y):
        return self.head(self.hidden(y)) * t[:, None]


class EquinoxOfTwo(Equinox):
    def __call__(self, t, y, *, key=None):
        return self.head(y) * t


OF_TWO = {"linen": LinenOfTwo(), "nnx": NnxOfTwo, "equinox": EquinoxOfTwo}
if hk is not None:
    OF_TWO["haiku"] = hk.transform(lambda t, y: hk.Linear(3)(y) * t[:, None])


@pytest.mark.parametrize("name", ["nnx", *long(*sorted(OF_TWO.keys() - {"nnx"}))])
def test_a_network_of_several_inputs_takes_a_tuple_or_a_dict(name):
    ensemble = ensemble_of(OF_TWO[name])
    ones, twos = ((np.full(8, number, np.float32), X) for number in (1, 2))
    state = ensemble.init({**DATA, "inputs": ones})
    once, twice = ensemble.apply(state, ones), ensemble.apply(state, {"t": twos[0], "y": X})
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
    data = {**DATA, "inputs": {"t": ones[0], "y": X}}
    fitted = de.fit(ensemble, data, steps=1, batch_size=8, progress=False)
    assert ensemble.predict(fitted.state, ones).mean.shape == (8, 3)


class Batch(NamedTuple):
    image: np.ndarray
    label: np.ndarray


@pytest.mark.parametrize("batch", [DATA, Batch(X, DATA["labels"])], ids=["dict", "tuple"])
def test_init_and_apply_of_a_network_are_given_the_same(batch):
    seen = []

    def init(key, inputs):
        seen.append(inputs)
        return jnp.ones(3), ()

    def apply(params, model_state, inputs, key, train):
        seen.append(inputs)
        return jnp.ones((8, 3)), model_state

    def loss_fn(params, model_state, batch, key):
        return params.sum(), (model_state, {})

    ensemble = ensemble_of((init, apply), loss=loss_fn)
    inputs = inputs_of(ensemble, batch)
    assert inputs is (X if batch is DATA else batch)
    ensemble.predict(ensemble.init(batch), inputs)
    shapes = [jax.tree.map(jnp.shape, each) for each in (seen[0], seen[-1])]
    assert shapes[0] == shapes[1]


class Sows(nn.Module):
    """A module with a penalty, other sown values and values that depend on the batch's size."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, kernel_init=nn.initializers.ones)(x)
        self.sow("losses", "penalty", (x**2).mean())
        self.sow("statistics", "outputs", x)
        return self.perturb("outputs", x)


def test_a_linen_module_that_sows_trains_with_a_loss_that_adds_what_it_sows():
    with pytest.raises(UserError, match="sows losses, which an objective does not add"):
        de.fit(ensemble_of(Sows()), DATA, steps=1, progress=False)

    def loss_fn(params, model_state, batch, key):
        variables = {"params": params, **model_state}
        _, sown = Sows().apply(variables, batch["inputs"], mutable=["losses"])
        return sum(jax.tree.leaves(sown["losses"])), (model_state, {})

    ensemble = ensemble_of(Sows(), loss=loss_fn)
    state = ensemble.init(DATA)
    assert state.model_state == {}
    # Each output is the sum of the inputs.
    _, metrics = ensemble.update(state, DATA)
    np.testing.assert_allclose(metrics["loss"], [(X.sum(1) ** 2).mean()] * 2, rtol=1e-5)
    assert ensemble.predict(ensemble.init(DATA), X[:5]).mean.shape == (5, 3)
