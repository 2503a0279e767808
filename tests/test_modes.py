"""A network is told that it is trained, whatever it calls the switch."""

import dataclasses
from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import networks
from dist_ens.errors import UserError
from dist_ens.layout import BATCHES, DATA, Layout
from dist_ens.members import (
    check_member,
    check_modes,
    from_equinox,
    from_example_functions,
    from_functions,
    from_linen,
    from_nnx,
    from_pytree,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.members.modes import EVALUATION, EVALUATION_ARGUMENTS, TRAINING

pytestmark = pytest.mark.quick
INPUTS = jax.ShapeDtypeStruct((8, 6), jnp.float32)
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def both(member):
    """Outputs and model state of a network in training, and in evaluation."""
    params, model_state = member.init(jax.random.key(0), X)

    def applied(train):
        key = jax.random.key(1) if train else None
        return member.apply(params, model_state, X, key, train)

    return applied(True), applied(False)


def trains_and_evaluates(member):
    check_member(member, INPUTS, (8, 3))
    check_modes(member, INPUTS, DATA)
    (trained, _), (evaluated, _) = both(member)
    return not np.allclose(trained, evaluated)


def linen_with(name, where):
    """A linen module with dropout, whose switch has some name."""
    value = {True: name in EVALUATION_ARGUMENTS, False: name not in EVALUATION_ARGUMENTS}

    def forward(self, x, switch):
        trains = switch is value[False]
        x = nn.BatchNorm(use_running_average=not trains)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not trains)(x))

    if where == "argument":
        namespace: dict = {"nn": nn, "forward": forward}
        source = (
            f"class Net(nn.Module):\n    @nn.compact\n    def __call__(self, x, {name}="
            f"{value[True]}):\n        return forward(self, x, {name})\n"
        )
        exec(source, namespace)
        return namespace["Net"]()

    def call(self, x):
        return forward(self, x, getattr(self, name))

    return type(
        "Net",
        (nn.Module,),
        {"__annotations__": {name: bool}, name: value[True], "__call__": nn.compact(call)},
    )()


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


class Nnx(nnx.Module):
    def __init__(self, rngs, name=None):
        self.head = nnx.Linear(6, 3, rngs=rngs)
        self.rngs = rngs
        if name:
            setattr(self, name, name in EVALUATION)

    def dropped(self, x, trains):
        if not trains:
            return self.head(x)
        keep = jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape)
        return self.head(x * keep)


@pytest.mark.slow
# Every nnx module has methods `train` and `eval`, and they stay that.
@pytest.mark.parametrize(
    "name", [n for n in (*TRAINING, *EVALUATION) if not hasattr(nnx.Module, n)]
)
def test_an_nnx_module_is_switched_by_an_attribute_of_every_usual_name(name):
    class Net(Nnx):
        def __call__(self, x):
            return self.dropped(x, vars(self)[name] is not (name in EVALUATION))

    assert trains_and_evaluates(from_nnx(lambda rngs: Net(rngs, name)))


def test_an_nnx_module_is_switched_by_an_argument():
    class Net(Nnx):
        def __call__(self, x, is_training=False):
            return self.dropped(x, is_training)

    assert trains_and_evaluates(from_nnx(lambda rngs: Net(rngs)))


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


@pytest.mark.slow
@pytest.mark.parametrize("make", [Equinox, EquinoxArgument, EquinoxField])
def test_an_equinox_module_is_switched(make):
    assert trains_and_evaluates(from_equinox(make))


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


def test_a_switch_that_somebody_has_set_stays_set():
    def apply(w, x, *, training):
        return (2.0 if training else 1.0) * (x @ w)

    (trained, _), (evaluated, _) = both(from_functions(weights, partial(apply, training=False)))
    np.testing.assert_array_equal(trained, evaluated)


class WithAField(nn.Module):
    """Its field has nothing to do with evaluation."""

    test: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) * (100 if self.test else 1)


def test_a_field_of_a_general_name_is_no_switch():
    (trained, _), (evaluated, _) = both(from_linen(WithAField()))
    np.testing.assert_array_equal(trained, evaluated)


def test_inputs_that_are_called_like_a_switch_are_none():
    member = from_functions(weights, lambda train, test: test @ train)
    (trained, _), (evaluated, _) = both(member)
    np.testing.assert_array_equal(trained, evaluated)


# Networks to which nothing gets through


class Deaf(nn.Module):
    """Its switch has a name of its own."""

    layer: str = "dropout"

    @nn.compact
    def __call__(self, x, learning=False):
        x = nn.Dense(16)(x)
        if self.layer == "dropout":
            x = nn.Dropout(0.5, deterministic=not learning)(x)
        elif self.layer == "attention":
            attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5)
            x = attend(x[:, None], deterministic=not learning)[:, 0]
        else:
            x = nn.BatchNorm(use_running_average=not learning)(x)
        return nn.Dense(3)(x)


class DeafNnx(nnx.Module):
    def __init__(self, rngs):
        self.head, self.dropout = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, learning=False):
        return self.head(self.dropout(x, deterministic=not learning))


class DeafEquinox(Equinox):
    def __call__(self, x, key=None, learning=False):
        return self.head(self.dropout(x, key=key, inference=not learning))


DEAF = {
    "Dropout_0": from_linen(Deaf()),
    "MultiHeadDotProductAttention_0": from_linen(Deaf("attention")),
    "BatchNorm_0": from_linen(Deaf("norm")),
    "dropout": from_nnx(DeafNnx),
    "dropout ": from_equinox(DeafEquinox),
}
WRAPPED = {
    "plain": lambda member: member,
    "in bfloat16": lambda member: with_compute_dtype(member, "bfloat16"),
    "normalized": lambda member: with_normalized_inputs(member, (1.0,), (2.0,)),
    "rematerialized": rematerialized,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", DEAF)
def test_a_network_that_is_not_told_that_it_is_trained_is_refused(name, wrapped):
    member = WRAPPED[wrapped](DEAF[name])
    with pytest.raises(UserError, match=f"although it has {name.strip()}: these layers are never"):
        check_modes(member, INPUTS, DATA)


def test_what_a_network_waits_for_is_found_out_in_the_type_that_it_is_given():
    class OfFloats(Deaf):
        def __call__(self, x, learning=False):
            if x.dtype != jnp.float32:
                raise TypeError("it takes float32")
            return super().__call__(x, learning)

    member = with_normalized_inputs(from_linen(OfFloats()), (1.0,), (2.0,))
    with pytest.raises(UserError, match="though it has Dropout_0"):
        check_modes(member, jax.ShapeDtypeStruct((8, 6), jnp.uint8), DATA)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_dropout_samples_are_drawn_whatever_the_call_takes(kind):
    class OfNnx(nnx.Module):
        def __init__(self, rngs):
            self.head, self.dropout = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, deterministic=None):
            return self.head(self.dropout(x, deterministic=deterministic))

    class OfEquinox(Equinox):
        def __call__(self, x, key=None, inference=None):
            return self.head(self.dropout(x, key=key, inference=inference))

    member = from_nnx(OfNnx) if kind == "nnx" else from_equinox(OfEquinox)
    assert trains_and_evaluates(member)
    params, model_state = member.init(jax.random.key(0), X)
    drawn = [
        np.asarray(member.apply(params, model_state, X, key, False)[0])
        for key in (None, None, jax.random.key(0), jax.random.key(1))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.allclose(drawn[2], drawn[3])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.BatchNorm(use_running_average=not training)(x)


class ForgetsItsBlock(nn.Module):
    """The switch of a part, of a usual name, is never passed on."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(Block()(x))


class ForgetsItself(nn.Module):
    """The network is told, and does not tell its layer."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


class HasAField(nn.Module):
    learning: bool = False

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=not self.learning)
        return nn.Dense(3)(norm(x))


class ForgetsInNnx(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.head = nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x, learning=None):
        return self.head(self.norm(x, use_running_average=not learning))


class EquinoxPart(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __call__(self, x, state, learning=False):
        return self.norm(x, state, inference=not learning)


class ForgetsInEquinox(eqx.Module):
    part: EquinoxPart
    head: eqx.nn.Linear

    def __init__(self, key):
        norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        self.part, self.head = EquinoxPart(norm), eqx.nn.Linear(6, 3, key=key)

    def __call__(self, x, state, key=None):
        x, state = self.part(x, state)
        return self.head(x), state


@pytest.mark.parametrize(
    "member",
    [
        from_linen(ForgetsItsBlock()),
        from_linen(ForgetsItself()),
        from_linen(HasAField()),
        from_nnx(ForgetsInNnx),
        from_equinox(ForgetsInEquinox, stateful=True),
    ],
    ids=["block", "itself", "field", "nnx", "equinox"],
)
def test_statistics_that_a_switch_does_not_reach_are_refused(member):
    with pytest.raises(UserError, match="computes the same in training as in evaluation"):
        check_modes(member, INPUTS, DATA)


class AsksItsStreams(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x))


class DropsNothing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.0, deterministic=True)(nn.LayerNorm()(x)))


class HasConstants(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.variable("constants", "scale", jnp.ones, (1, 6))
        return nn.Dense(3)(x * scale.value)


class Frozen(nn.Module):
    """Batch statistics that are frozen on purpose: there is no switch."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


class HasARate(nn.Module):
    """A field that is called like a rate, and no dropout."""

    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class AsksAnUnboundModule(nn.Module):
    def width(self):
        return 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(AsksAnUnboundModule(parent=None).width())(x)


class LooksAtItsColumn(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3)(x + jax.lax.axis_index(DATA) if train else x)


def test_a_network_may_look_at_the_column_it_is_in():
    check_modes(from_linen(LooksAtItsColumn()), INPUTS, DATA)


@pytest.mark.slow
def test_networks_that_are_as_they_should_be_are_not_refused():
    assert not trains_and_evaluates(from_linen(Frozen()))
    assert not trains_and_evaluates(from_linen(HasARate()))
    assert not trains_and_evaluates(from_linen(AsksAnUnboundModule()))
    assert trains_and_evaluates(from_linen(AsksItsStreams()))
    assert not trains_and_evaluates(from_linen(DropsNothing()))
    assert not trains_and_evaluates(from_linen(HasConstants()))


# Streams and what a call leaves, in nnx


def learns(make):
    """Whether two members learn a linear rule, on a mesh and in the lift."""
    labels = X[:, :3].argmax(-1).astype(np.int32)
    layout = Layout.make(2, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble = networks.ensemble_of(from_nnx(make), optax.adam(0.02), layout)
    batches = {"inputs": np.stack([X] * 300), "labels": np.stack([labels] * 300)}
    _, metrics = ensemble.update_steps(
        networks.begin(ensemble, INPUTS), layout.put(batches, BATCHES)
    )
    losses = np.asarray(metrics["loss"])
    return losses[-50:].mean() < 0.8 * losses[:50].mean()


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
    assert learns(Stacked)
    params, model_state = member.init(jax.random.key(0), X)
    assert not jax.tree.leaves(model_state)

    def masks(key):
        """What of ones each layer lets through, [layers, features]."""
        ones = jnp.ones((1, 6))
        identity = jax.tree.map(jnp.zeros_like, params)
        kernel = jnp.stack([jnp.eye(6)] * 3)
        identity["blocks"]["linear"]["kernel"] = identity["blocks"]["linear"]["kernel"].replace(
            kernel
        )
        identity["head"]["kernel"] = identity["head"]["kernel"].replace(jnp.eye(6, 3))
        return member.apply(identity, model_state, ones, key, True)[0]

    # A feature gets through three layers that each drop half with probability 1/8, and is then 8;
    # through one mask three times it would with 1/2.
    keys = jax.vmap(jax.random.key)(np.arange(200))
    passed = np.asarray(jax.jit(lambda keys: jax.lax.map(masks, keys))(keys))
    assert set(np.unique(passed)) == {0.0, 8.0}
    assert abs((passed > 0).mean() - 1 / 8) < 0.06  # four standard deviations of 600 draws


@pytest.mark.slow
def test_what_an_nnx_module_sows_is_no_state():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.block, self.head = DroppingBlock(rngs), nnx.Linear(6, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(6, rngs=rngs)

        def __call__(self, x):
            return self.head(self.perturb("before", self.norm(self.block(x))))

    member = from_nnx(Sowing)
    assert trains_and_evaluates(member)
    assert learns(Sowing)
    (_, trained), (_, evaluated) = both(member)
    assert jax.tree.structure(trained) == jax.tree.structure(evaluated)
    assert jax.tree.leaves(evaluated)


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
    with pytest.raises(UserError, match=r"There is no key in evaluation. Switch dropout off"):
        from_linen(AlwaysDropping()).apply({"Dense_0": {}}, {}, X, None, False)
