"""Every adapter makes a member that trains."""

import dataclasses
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import networks
from dist_ens.ground.errors import UserError
from dist_ens.layout import BATCHES, Layout
from dist_ens.members import (
    from_equinox,
    from_example_functions,
    from_functions,
    from_linen,
    from_nnx,
    from_pytree,
    with_normalized_inputs,
)
from marked import long

pytestmark = pytest.mark.quick
INPUTS = jax.ShapeDtypeStruct((8, 6), jnp.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class Equinox(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.hidden = eqx.nn.Linear(6, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(16, 3, key=keys[1])

    def __call__(self, x, state, key):
        x, state = self.norm(self.hidden(x), state)
        return self.head(self.dropout(jax.nn.relu(x), key=key)), state


class EquinoxPlain(eqx.Module):
    head: eqx.nn.Linear

    def __init__(self, key):
        self.head = eqx.nn.Linear(6, 3, key=key)

    def __call__(self, x, key=None):
        return self.head(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: jax.Array
    biases: jax.Array

    def __call__(self, x):
        return x @ self.weights + self.biases[None]


class Unregistered:
    def __init__(self, key):
        self.weights = jax.random.normal(key, (6, 3))

    def __call__(self, x):
        return x @ self.weights


def linear(key):
    return {"w": jax.random.normal(key, (6, 3)), "b": jnp.zeros(3)}


MEMBERS = {
    "functions": from_functions(linear, lambda p, x: x @ p["w"] + p["b"][None]),
    "example_functions": from_example_functions(linear, lambda p, x: x @ p["w"] + p["b"]),
    "linen": from_linen(Linen()),
    "nnx": from_nnx(lambda rngs: Nnx(rngs)),
    "equinox": from_equinox(Equinox, stateful=True),
    "equinox_plain": from_equinox(EquinoxPlain),
    "registered": from_pytree(lambda key: Registered(jax.random.normal(key, (6, 3)), jnp.zeros(3))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "functions",
        "linen",
        "nnx",
        "equinox",
        *long("equinox_plain", "example_functions", "registered"),
    ],
)
def test_a_member_of_every_kind_learns_and_members_differ(name):
    inputs = np.random.default_rng(0).normal(size=(100, 8, 6)).astype(np.float32)
    labels = inputs[..., :3].argmax(-1).astype(np.int32)  # a linear rule
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble = networks.ensemble_of(MEMBERS[name], optax.adam(0.05), layout)
    batches = layout.put({"inputs": inputs, "labels": labels}, BATCHES)
    state, metrics = ensemble.update_steps(networks.begin(ensemble, INPUTS), batches)
    losses = np.asarray(metrics["loss"])
    assert losses[-20:].mean() < 0.8 * losses[:20].mean()
    first = jax.tree.leaves(state.params)[-1]
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Unregistered, r"'Unregistered'.*jax.tree_util.register_dataclass"),
        (lambda key: {"layers": [Unregistered(key)]}, r"'Unregistered'.*register_dataclass"),
        (
            lambda key: {"n": np.zeros((), np.int32)},
            r"\['n'\] has the type int32, which has no grad",
        ),
        (lambda key: {}, "The network has no parameters"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        from_pytree(make, apply=lambda p, x: x).init(jax.random.key(0), None)


SEEN = from_functions(lambda key: {"w": jnp.zeros(1)}, lambda p, x: x)


def test_inputs_are_normalised_per_channel_in_float32():
    member = with_normalized_inputs(SEEN, (1.0, 2.0), (2.0, 4.0))
    outputs, _ = member.apply({}, (), np.array([[3, 10]], np.uint8), None, False)
    np.testing.assert_array_equal(outputs, np.float32([[1.0, 2.0]]))  # (3-1)/2, (10-2)/4
    assert with_normalized_inputs(SEEN, (0.0,), (1.0,)) is SEEN


@pytest.mark.parametrize(
    ("mean", "std", "shape"),
    [
        ((1.0, 2.0), (1.0,), (4, 4, 3)),
        ((0.0,), (1.0, 2.0), (4, 4, 3)),
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), (4, 4, 1)),  # It would broadcast to three channels.
        ((1.0, 2.0), (2.0,), ()),  # It would be taken along the batch.
    ],
)
def test_means_and_deviations_of_other_channels_are_refused(mean, std, shape):
    member = with_normalized_inputs(SEEN, mean, std)
    told = f"There are {len(mean)} means and {len(std)} deviations for inputs of the shape "
    with pytest.raises(UserError, match=re.escape(told + str([*shape]))):
        member.apply({}, (), jnp.ones((2, *shape)), None, False)
