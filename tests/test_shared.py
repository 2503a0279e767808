"""What members share: adapters, heads and priors on a network that is not trained."""

import dataclasses
import json

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dist_ens as de
import networks
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import INIT, key_of_step, member_key
from marked import long
from saving import assert_same

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
IMAGES = RANDOM.normal(size=(8, 6, 6, 2)).astype(np.float32)
TOKENS = RANDOM.integers(0, 7, (8, 5)).astype(np.int32)
CLASSES = 3


def labels_of(inputs):
    return (np.arange(len(inputs)) % CLASSES).astype(np.int32)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class Attention(nn.Module):
    """Attention in a block that is computed again, and an embedding that is used twice."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 8)
        x = embed(tokens)
        x = x + nn.remat(nn.MultiHeadDotProductAttention)(2)(x)
        return nn.Dense(CLASSES)(embed.attend(x).mean(axis=1))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(6, 8, key=one)
        self.last = eqx.nn.Linear(8, CLASSES, key=two)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def of_haiku(x):
    return hk.nets.MLP([8, CLASSES])(x)


HAIKU = hk.transform(of_haiku)
MLP = de.models.mlp((6,), CLASSES, hidden_sizes=(8,))
# Of each a network, what people have of it when it was trained, inputs, targets, and whether an
# array maps its last axis to the ones before, as equinox does.
CASES = {
    "linen": (Dense(), lambda key: Dense().init(key, X, False), X, "*/kernel", False),
    "conv": (Conv(), lambda key: Conv().init(key, IMAGES), IMAGES, "*", False),
    "attention": (Attention(), lambda key: Attention().init(key, TOKENS), TOKENS, "*", False),
    "lookup": (Attention(), lambda key: Attention().init(key, TOKENS), TOKENS, "Embed*", False),
    "nnx": (Nnx, lambda key: Nnx(nnx.Rngs(key)), X, "*", False),
    "equinox": (Equinox, Equinox, X, "*", True),
    "haiku": (HAIKU, lambda key: HAIKU.init(key, X), X, ["*linear_0/w", "*linear_1/w"], False),
    "plain": (MLP, lambda key: MLP.init(key, X)[0], X, "*/w", False),
}
RANK = 2


def merged(base, adapters, is_turned):
    """The parameters of one network, W + a b at the adapters; the names are those of the keys."""
    paths, structure = jax.tree_util.tree_flatten_with_path(base)
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").removesuffix("/raw_value")
        for path, _ in paths
    ]
    leaves = []
    for name, (_, leaf) in zip(names, paths, strict=True):
        if name in adapters:
            change = np.tensordot(adapters[name]["a"], adapters[name]["b"], axes=1) if not isinstance(adapters[name]["a"], jax.core.Tracer) else jnp.tensordot(adapters[name]["a"], adapters[name]["b"], axes=1)
            leaf = leaf + (change.T if is_turned else change).reshape(leaf.shape)
        leaves.append(leaf)
    assert {*adapters} <= {*names}
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_those_of_a_network_whose_arrays_are_summed(name):
    network, trained, inputs, targets, is_turned = CASES[name]
    base, given = de.as_member(network), trained(jax.random.key(7))
    member = de.models.lora(network, rank=RANK, targets=targets)
    shared = member.base_of(given)
    adapters, model_state = member.init(jax.random.key(1), inputs, shared)
    adapters = jax.tree.map(
        lambda leaf: RANDOM.normal(size=leaf.shape).astype(np.float32) / 3, adapters
    )
    key = jax.random.key(2)

    def outputs(adapters, train):
        return member.apply(adapters, model_state, inputs, key, train, shared=shared)[0]

    def by_hand(adapters, train):
        params = merged(shared[0], adapters, is_turned)
        return base.apply(params, model_state, inputs, key, train)[0]

    for train in (False, True):
        np.testing.assert_allclose(
            outputs(adapters, train), by_hand(adapters, train), rtol=2e-5, atol=2e-5
        )
        mine, expected = (
            jax.grad(lambda each, f=f: (f(each, train) ** 2).mean())(adapters)
            for f in (outputs, by_hand)
        )
        networks.assert_close_to_scale(mine, expected)
