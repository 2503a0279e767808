"""A network is told that it is trained, whatever it calls the switch."""

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dist_ens.ground.errors import UserError
from dist_ens.members import (
    from_equinox,
    from_example_functions,
    from_functions,
    from_linen,
    from_nnx,
    from_pytree,
)
from dist_ens.members.modes import EVALUATION, EVALUATION_ARGUMENTS, TRAINING
from networks import Asking, check_member
from test_as_member import INPUTS, X

pytestmark = pytest.mark.quick


def both(member):
    """Outputs and model state of a network in training, and in evaluation."""
    params, model_state = member.init(jax.random.key(0), X)

    def applied(train):
        key = jax.random.key(1) if train else None
        return member.apply(params, model_state, X, key, train)

    return applied(True), applied(False)


def trains_and_evaluates(member):
    check_member(member, INPUTS, (8, 3))
    (trained, _), (evaluated, _) = both(member)
    return not np.allclose(trained, evaluated)


def normalised_and_dropped(x, trains):
    x = nn.BatchNorm(use_running_average=not trains)(nn.Dense(16)(x))
    return nn.Dense(3)(nn.Dropout(0.5, deterministic=not trains)(x))


def linen_with(name, where):
    """A linen module with dropout, whose switch has some name."""
    in_training = name not in EVALUATION_ARGUMENTS
    field, argument = f"{name}: bool = {not in_training}", f"{name}={not in_training}"
    parts = (field, "", f"self.{name}") if where == "field" else ("", argument, name)
    namespace = globals().copy()
    exec(
        "class Net(nn.Module):\n    {}\n    @nn.compact\n    def __call__(self, x, {}):\n"
        "        return normalised_and_dropped(x, {} is {})\n".format(*parts, in_training),
        namespace,
    )
    return namespace["Net"]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "argument") for name in (*TRAINING, *EVALUATION_ARGUMENTS)),
        *((name, "field") for name in (*TRAINING, *EVALUATION)),
    ],
)
def test_a_linen_module_is_switched_by_every_usual_name(name, where):
    member = from_linen(linen_with(name, where))
    assert trains_and_evaluates(member)
    (_, trained), (_, evaluated) = both(member)
    assert np.any(trained["batch_stats"]["BatchNorm_0"]["mean"])
    assert not np.any(evaluated["batch_stats"]["BatchNorm_0"]["mean"])


@pytest.mark.slow
# Every nnx module has methods `train` and `eval`, and they stay that.
@pytest.mark.parametrize(
    "name", [n for n in (*TRAINING, *EVALUATION) if not hasattr(nnx.Module, n)]
)
def test_an_nnx_module_is_switched_by_an_attribute_of_every_usual_name(name):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.head, self.rngs = nnx.Linear(6, 3, rngs=rngs), rngs
            setattr(self, name, name in EVALUATION)

        def __call__(self, x):
            if vars(self)[name] is not (name in EVALUATION):
                x = x * jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape)
            return self.head(x)

    assert trains_and_evaluates(from_nnx(Net))


class Equinox(eqx.Module):
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.head = eqx.nn.Linear(6, 3, key=key)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x, key=None):
        return self.head(self.dropout(x, key=key))


class EquinoxArgument(Equinox):
    def __call__(self, x, key=None, enable=True, training=False):
        return self.head(self.dropout(x, key=key, inference=not training))


class EquinoxField(eqx.Module):
    head: eqx.nn.Linear
    is_training: bool

    def __init__(self, key):
        self.head, self.is_training = eqx.nn.Linear(6, 3, key=key), False

    def __call__(self, x, key=None):
        if self.is_training:
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return self.head(x)


class EquinoxInference(Equinox):
    def __call__(self, x, key=None, inference=None):
        return self.head(self.dropout(x, key=key, inference=inference))


class NnxDeterministic(nnx.Module):
    def __init__(self, rngs):
        self.head, self.dropout = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, deterministic=None):
        return self.head(self.dropout(x, deterministic=deterministic))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Equinox, EquinoxArgument, EquinoxField])
def test_an_equinox_module_is_switched(make):
    assert trains_and_evaluates(from_equinox(make))


@pytest.mark.slow
@pytest.mark.parametrize("member", [from_nnx(NnxDeterministic), from_equinox(EquinoxInference)])
def test_dropout_samples_are_drawn_whatever_the_call_takes(member):
    assert trains_and_evaluates(member)
    params, model_state = member.init(jax.random.key(0), X)
    drawn = [
        np.asarray(member.apply(params, model_state, X, key, False)[0])
        for key in (None, None, jax.random.key(0), jax.random.key(1))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.allclose(drawn[2], drawn[3])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: jax.Array

    def __call__(self, x, training=False):
        return (2.0 if training else 1.0) * (x @ self.weights)


def weights(key):
    return jax.random.normal(key, (6, 3))


@pytest.mark.parametrize(
    "member",
    [
        from_pytree(lambda key: Registered(weights(key))),
        from_functions(weights, lambda w, x, train=False: (2.0 if train else 1.0) * (x @ w)),
        from_example_functions(weights, lambda w, x, *, training=False: (1.0 + training) * (x @ w)),
    ],
    ids=["registered", "functions", "example functions"],
)
def test_a_function_that_takes_a_switch_is_given_it(member):
    (trained, _), (evaluated, _) = both(member)
    np.testing.assert_allclose(trained, 2 * evaluated, rtol=1e-6)


class Frozen(nn.Module):
    """Batch statistics that are frozen on purpose: there is no switch."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


def test_a_network_without_a_switch_computes_the_same_in_both():
    assert not trains_and_evaluates(from_linen(Frozen()))
    assert trains_and_evaluates(from_linen(Asking(3)))


# Streams and what a call leaves, in nnx


class DroppingBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.linear(x)))
        self.sow(nnx.Intermediate, "activations", x)
        return x


class Stacked(nnx.Module):
    """Layers in one stack, over which is scanned, as flax's own guide does it."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return DroppingBlock(rngs)

        self.blocks, self.head = blocks(rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x)

        return self.head(forward(x, self.blocks))


@pytest.mark.slow
def test_stacked_nnx_layers_drop_each_by_a_key_of_its_own():
    member = from_nnx(Stacked)
    assert trains_and_evaluates(member)
    params, model_state = member.init(jax.random.key(0), X)
    assert not jax.tree.leaves(model_state)

    def masks(key):
        """What of ones each layer lets through, [layers, features]."""
        ones = jnp.ones((1, 6))
        identity = jax.tree.map(jnp.zeros_like, params)
        linear, head = identity["blocks"]["linear"], identity["head"]
        linear["kernel"] = linear["kernel"].replace(jnp.stack([jnp.eye(6)] * 3))
        head["kernel"] = head["kernel"].replace(jnp.eye(6, 3))
        return member.apply(identity, model_state, ones, key, True)[0]

    # A feature gets through three layers that each drop half with probability 1/8, and is then 8;
    # through one mask three times it would with 1/2.
    keys = jax.vmap(jax.random.key)(np.arange(200))
    passed = np.asarray(jax.jit(lambda keys: jax.lax.map(masks, keys))(keys))
    assert set(np.unique(passed)) == {0.0, 8.0}
    assert abs((passed > 0).mean() - 1 / 8) < 0.06  # four standard deviations of 600 draws


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        if train:
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(3)(x)


class AlwaysDropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


def test_a_linen_module_draws_from_any_stream_and_drops_in_evaluation_only_with_a_key():
    assert trains_and_evaluates(from_linen(Noisy()))
    with pytest.raises(UserError, match="without a key, which evaluation does not have. Switch"):
        from_linen(AlwaysDropping()).apply({"Dense_0": {}}, {}, X, None, False)
