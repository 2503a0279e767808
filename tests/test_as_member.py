"""`as_member` takes a network of any library, inputs of any structure, and says what is wrong."""

import dataclasses
import functools
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
from dist_ens.errors import UserError
from dist_ens.layout import BATCHES, Layout
from dist_ens.members import (
    Member,
    as_member,
    check_member,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)

try:
    import haiku as hk
except Exception as error:  # An older Haiku may use names that a newer JAX removed.
    if jax.__version_info__ < (0, 12):
        raise
    hk, no_haiku = None, f"Haiku does not import with jax {jax.__version__}: {error}"
else:
    no_haiku = ""

pytestmark = pytest.mark.quick
needs_haiku = pytest.mark.skipif(hk is None, reason=no_haiku)
INPUTS = jax.ShapeDtypeStruct((8, 6), jnp.float32)
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs, width=16):
        self.hidden = nnx.Linear(6, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class NnxOfKeyword(Nnx):
    def __init__(self, *, width=16, rngs):
        super().__init__(rngs, width)


class Equinox(eqx.Module):
    head: eqx.nn.Linear

    def __init__(self, key):
        self.head = eqx.nn.Linear(6, 3, key=key)

    def __call__(self, x, key=None):
        return self.head(x)


class EquinoxOfKeyword(Equinox):
    def __init__(self, width=3, *, key):
        super().__init__(key)


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        self.head = eqx.nn.Linear(6, 3, key=key)

    def __call__(self, x, state, key=None):
        x, state = self.norm(x, state)
        return self.head(x), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: jax.Array

    @classmethod
    def make(cls, key):
        return cls(jax.random.normal(key, (6, 3)))

    def __call__(self, x):
        return x @ self.weights


class Unregistered:
    def __init__(self, key):
        self.weights = jax.random.normal(key, (6, 3))

    def __call__(self, x):
        return x @ self.weights


def short_init(key):
    return {"w": jax.random.normal(key, (6, 3))}


def short_apply(params, x, *, training):
    return (2.0 if training else 1.0) * (x @ params["w"])


def full_init(key, inputs):
    return {"w": jax.random.normal(key, (inputs.shape[-1], 3))}, {"calls": jnp.zeros(())}


def full_apply(params, model_state, inputs, key, train):
    return inputs @ params["w"], {"calls": model_state["calls"] + 1}


NETWORKS = {
    "a member": Member(full_init, full_apply),
    "linen": Linen(),
    "nnx class": Nnx,
    "nnx class of a keyword": NnxOfKeyword,
    "nnx function": lambda rngs: Nnx(rngs=rngs),
    "nnx function of another name": lambda r: Nnx(rngs=r),
    "nnx partial": functools.partial(Nnx, width=4),
    "equinox class": Equinox,
    "equinox class of a keyword": EquinoxOfKeyword,
    "equinox function": lambda key: Equinox(key),
    "equinox function of another name": lambda k: Equinox(k),
    "equinox function of a position": lambda key, /: Equinox(key),
    "equinox with state": Stateful,
    "registered class": Registered.make,
    "short functions": (short_init, short_apply),
    "full functions": (full_init, full_apply),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_every_kind_becomes_a_member_that_trains(name):
    member = as_member(NETWORKS[name])
    assert member.has_apply
    check_member(member, INPUTS, (8, 3))
    ensemble = networks.ensemble_of(
        member, optax.sgd(0.1), Layout.make(2, ensemble_axis=1, devices=jax.devices()[:1])
    )
    labels = X[:, :3].argmax(-1).astype(np.int32)
    batches = {"inputs": np.stack([X] * 2), "labels": np.stack([labels] * 2)}
    placed = ensemble.layout.put(batches, BATCHES)
    _, metrics = ensemble.update_steps(networks.begin(ensemble, INPUTS), placed)
    assert np.isfinite(np.asarray(metrics["loss"])).all()


def test_a_member_is_returned_as_it_is():
    member = NETWORKS["a member"]
    assert as_member(member) is member


def test_nothing_is_computed_to_find_out_the_library():
    made = []

    def make(key):
        made.append(Equinox(key))
        return made[-1]

    before = len(jax.live_arrays())
    as_member(make)
    assert len(jax.live_arrays()) == before
    assert isinstance(made[0].head.weight, jax.core.Tracer)


@pytest.mark.slow
def test_an_equinox_module_with_state_is_found_by_its_state():
    member = as_member(lambda key: Stateful(key))
    params, model_state = member.init(jax.random.key(0), X)
    assert len(jax.tree.leaves(model_state)) == 3  # mean, variance, and whether it was called
    _, trained = member.apply(params, model_state, X, jax.random.key(1), True)
    assert any(
        not np.array_equal(new, old)
        for new, old in zip(jax.tree.leaves(trained), jax.tree.leaves(model_state), strict=True)
    )


def test_the_short_form_sets_the_switch_and_the_full_form_keeps_the_state():
    short = as_member((short_init, short_apply))
    params, state = short.init(jax.random.key(0), X)
    assert state == ()
    trained, _ = short.apply(params, (), X, None, True)
    np.testing.assert_allclose(trained, 2 * X @ params["w"], rtol=1e-5)

    full = as_member(init=full_init, apply=full_apply)
    params, state = full.init(jax.random.key(0), X)
    assert full.apply(params, state, X, jax.random.key(0), True)[1]["calls"] == 1.0
    # Outside training the state stays as it was, whatever the function returns.
    assert full.apply(params, state, X, None, False)[1]["calls"] == 0.0


PARAMS = {"w": jnp.ones((6, 3))}


@pytest.mark.parametrize(
    ("init", "apply", "model_state"),
    [
        (lambda key, batch=None: (PARAMS, ()), None, ()),
        (lambda key, batch=None: ({"w": jnp.ones((batch.shape[-1], 3))}, ()), None, ()),
        (lambda key, batch=None: (PARAMS, {"calls": jnp.zeros(())}), full_apply, {"calls": 0.0}),
        (lambda key, width=3: {"w": jnp.ones((6, width))}, None, ()),
    ],
    ids=["a pair", "of the batch", "by apply", "a width"],
)
def test_an_init_with_a_default_has_the_form_of_what_it_returns(init, apply, model_state):
    params, found = as_member(init=init, apply=apply).init(jax.random.key(0), X)
    np.testing.assert_array_equal(params["w"], np.ones((6, 3)))
    assert found == model_state


def test_an_init_with_a_default_that_may_have_either_form_is_refused():
    def init(key, scale=1.0):
        return jnp.ones((6, 3)) * scale, jnp.zeros(3)

    with pytest.raises(
        UserError, match=r"\(key, scale\) returned a tuple of two, which may be par"
    ):
        as_member(init=init)
    params, model_state = as_member(
        init=init, apply=lambda params, x: x @ params[0] + params[1]
    ).init(jax.random.key(0), X)
    assert len(params) == 2
    assert model_state == ()


def test_a_linen_modules_own_init_is_told_to_return_two():
    member = as_member(init=Linen().init)
    with pytest.raises(UserError, match=r"init returned a dict instead of a tuple of two.*\(\)"):
        member.init(jax.random.key(0), X)


@pytest.mark.parametrize("init", [short_init, full_init])
def test_a_network_without_apply_trains_but_cannot_predict(init):
    member = as_member(init=init)
    params, _ = check_member(member, INPUTS)
    assert params["w"].shape == (6, 3)
    changed = [
        member,
        with_compute_dtype(member, "bfloat16"),
        with_normalized_inputs(member, (1.0,), (2.0,)),
        rematerialized(member),
    ]
    for wrapped in changed:
        assert not wrapped.has_apply
        with pytest.raises(UserError, match=r"given without apply.*as_member\(init=\.\.\., apply="):
            wrapped.apply(*member.init(jax.random.key(0), X), X, None, False)


# A loss of the user's


def gradient_by_apply(member, make_loss):
    params, model_state = member.init(jax.random.key(0), X)

    def loss(params):
        outputs, new_state = member.apply(params, model_state, X, jax.random.key(1), True)
        return make_loss(outputs), new_state

    return params, model_state, jax.grad(loss, has_aux=True)(params)


@pytest.mark.slow
@pytest.mark.parametrize("network", [Nnx, Stateful])
def test_a_loss_of_the_users_calls_the_network_through_apply(network):
    # d(sum of outputs) / d(bias of the last layer) is the number of examples, 8.
    params, model_state, (grads, new_state) = gradient_by_apply(
        as_member(network), lambda outputs: outputs.sum()
    )
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    bias = grads["head"]["bias"].get_value() if network is Nnx else grads.head.bias
    np.testing.assert_allclose(bias, np.full(3, 8.0))
    changed = [
        not np.array_equal(new, old)
        for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(model_state), strict=True)
    ]
    assert any(changed)


# Inputs and outputs of any structure

GRAPH = {
    "atoms": np.arange(8 * 5 * 2, dtype=np.float32).reshape(8, 5, 2),
    "mask": np.arange(40).reshape(8, 5) % 3 > 0,
}
GRAPH_SHAPES = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), GRAPH)


class LinenGraph(nn.Module):
    @nn.compact
    def __call__(self, graph):
        atoms = nn.Dense(1)(graph["atoms"])[..., 0] * graph["mask"]
        return {"energy": atoms.sum(-1), "count": graph["mask"].sum(-1)}


class NnxGraph(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, graph):
        atoms = self.layer(graph["atoms"])[..., 0] * graph["mask"]
        return {"energy": atoms.sum(-1), "count": graph["mask"].sum(-1)}


class EquinoxGraph(eqx.Module):
    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.layer, self.dropout = eqx.nn.Linear(2, 1, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, graph, key=None):
        atoms = jax.vmap(self.layer)(graph["atoms"])[..., 0] * graph["mask"]
        return {"energy": self.dropout(atoms, key=key).sum(-1), "count": graph["mask"].sum(-1)}


def graph_init(key):
    return {"w": jax.random.normal(key, (2,))}


def graph_apply(params, graph):
    atoms = (graph["atoms"] @ params["w"]) * graph["mask"]
    return {"energy": atoms.sum(-1), "count": graph["mask"].sum(-1)}


GRAPH_NETWORKS = {
    "linen": LinenGraph(),
    "nnx": NnxGraph,
    "equinox": EquinoxGraph,
    "functions": (graph_init, graph_apply),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPH_NETWORKS)
def test_a_graph_goes_in_and_a_dict_comes_out(name):
    member = as_member(GRAPH_NETWORKS[name])
    check_member(member, GRAPH_SHAPES)
    params, state = member.init(jax.random.key(0), GRAPH)
    outputs, _ = member.apply(params, state, GRAPH, jax.random.key(1), True)
    assert outputs["energy"].shape == (8,)
    # Of the 40 numbers, those that 3 does not divide: 0 .. 4 has 1, 2, 4.
    assert outputs["count"][0] == 3


def test_the_check_of_outputs_describes_every_array():
    member = as_member(LinenGraph())
    message = (
        "for a batch ['atoms'] float32[8, 5, 2], ['mask'] bool[8, 5] it returned ['count'] "
        "int32[8], ['energy'] float32[8] instead of shape [8, 3]"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        check_member(member, GRAPH_SHAPES, (8, 3))


def test_only_floating_leaves_are_computed_in_another_type():
    seen = {}

    def apply(params, graph):
        seen.update(jax.tree.map(lambda leaf: leaf.dtype, graph))
        return {"energy": graph["atoms"] @ params["w"], "count": graph["mask"].sum(-1)}

    member = with_compute_dtype(as_member((graph_init, apply)), "bfloat16")
    graph = jax.tree.map(jnp.asarray, GRAPH)
    outputs, _ = member.apply(graph_init(jax.random.key(0)), (), graph, None, False)
    assert seen == {"atoms": jnp.bfloat16, "mask": jnp.bool_}
    assert outputs["energy"].dtype == jnp.float32
    assert outputs["count"].dtype == jnp.int32


def test_leaves_are_normalized_each_by_its_own_numbers():
    member = as_member((graph_init, lambda params, graph: graph))
    mean, std = {"atoms": (1.0, 2.0), "mask": (0.0,)}, {"atoms": (2.0, 4.0), "mask": (1.0,)}
    given, _ = with_normalized_inputs(member, mean, std).apply({}, (), GRAPH, None, False)
    np.testing.assert_array_equal(given["atoms"][0, :2], [[-0.5, -0.25], [0.5, 0.25]])
    assert given["mask"].dtype == np.bool_
    same = with_normalized_inputs(member, {"atoms": 0, "mask": 0}, {"atoms": 1, "mask": 1})
    assert same is member


# Haiku


def haiku_network(x, is_training):
    x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.Linear(3)(x)


def haiku_dropout(x):
    key = hk.maybe_next_rng_key()
    return hk.Linear(3)(x if key is None else hk.dropout(key, 0.5, x))


@pytest.mark.slow
@needs_haiku
def test_a_haiku_network_with_batch_norm_trains_on_a_mesh_as_on_one_device():
    member = as_member(hk.transform_with_state(haiku_network))
    check_member(member, INPUTS, (8, 3))
    labels = X[:, :3].argmax(-1).astype(np.int32)
    states = []
    for columns in (1, 4):
        layout = Layout.make(2, ensemble_axis=1, devices=jax.devices()[:columns])
        ensemble = networks.ensemble_of(member, optax.adam(0.05), layout)
        batches = {"inputs": np.stack([X] * 60), "labels": np.stack([labels] * 60)}
        first, _ = ensemble.update_steps(
            networks.begin(ensemble, INPUTS),
            layout.put({k: v[:1] for k, v in batches.items()}, BATCHES),
        )
        states.append(jax.tree.map(np.asarray, first.model_state))
        _, metrics = ensemble.update_steps(
            networks.begin(ensemble, INPUTS), layout.put(batches, BATCHES)
        )
        losses = np.asarray(metrics["loss"])
        assert losses[-10:].mean() < 0.8 * losses[:10].mean()
    # The first step's statistics see no dropout, and are those of the global batch.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *states)
    assert np.any(states[0]["batch_norm/~/mean_ema"]["average"])


@pytest.mark.slow
@needs_haiku
def test_a_haiku_network_draws_by_its_key_and_evaluates_without_one():
    member = as_member(hk.transform_with_state(haiku_network))
    params, state = member.init(jax.random.key(0), X)

    def outputs(key, train):
        return member.apply(params, state, X, key, train)

    (one, changed), (same, _), (other, _) = (outputs(jax.random.key(i), True) for i in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert changed["batch_norm/~/mean_ema"]["counter"] == 1
    (evaluated, kept), (again, _) = outputs(None, False), outputs(None, False)
    np.testing.assert_array_equal(evaluated, again)
    jax.tree.map(np.testing.assert_array_equal, kept, state)


@pytest.mark.slow
@needs_haiku
def test_a_haiku_network_with_dropout_alone_has_no_state():
    member = as_member(hk.transform(haiku_dropout))
    params, state = member.init(jax.random.key(0), X)
    assert state == ()
    drawn = [
        np.asarray(member.apply(params, (), X, key, train)[0])
        for key, train in ((None, False), (jax.random.key(1), True), (jax.random.key(1), False))
    ]
    np.testing.assert_allclose(drawn[0], X @ params["linear"]["w"], rtol=1e-5, atol=1e-6)
    assert not np.allclose(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[1], drawn[2])  # Monte Carlo dropout


@needs_haiku
def test_a_haiku_network_may_take_no_key():
    member = as_member(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x))))
    params, _ = check_member(member, INPUTS, (8, 3))
    assert params["linear"]["w"].shape == (6, 3)


# What no member can be made of


def returns_one(key, inputs):
    return {"w": jnp.zeros((6, 3))}


def returns_three(key, inputs):
    return {"w": jnp.zeros((6, 3))}, (), ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: as_member(), "as_member did not get a network. Give a flax.linen module,"),
        (
            lambda: as_member(Linen(), init=full_init),
            "as_member got both a network and init or apply. Give either",
        ),
        (lambda: as_member(apply=full_apply), "as_member did not get init beside apply. Give"),
        (
            lambda: as_member(Nnx(nnx.Rngs(0))),
            "an instance of the flax.nnx class Nnx, whose parameters exist already. Each member "
            "makes its own. Give a function that makes the module: as_member(lambda rngs: Nnx(..., "
            "rngs=rngs)).",
        ),
        (
            lambda: as_member(Equinox(jax.random.key(0))),
            "an instance of the equinox class Equinox, whose parameters exist already. Each member "
            "makes its own. Give a function that makes the module: as_member(lambda key: "
            "Equinox(..., key=key)).",
        ),
        (
            lambda: as_member(Linen),
            "is the flax.linen class Linen, not an instance. Give an instance: as_member(Linen(",
        ),
        (
            lambda: as_member(lambda key: Linen()),
            "makes a flax.linen module, which has no parameters yet. Give the module itself",
        ),
        (
            lambda: as_member(Registered(jnp.zeros(3))),
            "an instance of the class Registered, whose parameters exist already.",
        ),
        (
            lambda: as_member(Registered),
            "Parameter .weights has the type key<fry>, which has no gradient.",
        ),
        (
            lambda: as_member(Unregistered),
            "Leaf (the whole) of a member is an object of class 'Unr",
        ),
        (
            lambda: as_member(eqx.nn.Linear),
            "Linear cannot be called with key alone: it also needs in_features, out_features.",
        ),
        (
            lambda: as_member(lambda key: Nnx(nnx.Rngs(key))),
            "makes the flax.nnx module Nnx from a key. Make it from rngs",
        ),
        (lambda: as_member(lambda: Linen()), "takes no key and no rngs, so all members would be"),
        (
            lambda: as_member(lambda key: jnp.zeros(3).missing),
            "made no network. Given key, it raised AttributeError:",
        ),
        (
            lambda: as_member(lambda k: Nnx(rngs=k, width="many")),
            "Given rngs, it raised TypeError:",
        ),
        (lambda: as_member(short_init), "makes an object of type dict, which cannot be called"),
        (lambda: as_member(full_init), "full_init cannot be called with key alone: it also needs"),
        (lambda: as_member("mlp"), "No network can be made from an object of type str. Give a"),
        (
            lambda: as_member((lambda: 0, short_apply)),
            "The function init has the parameters (). It must be init(key, inputs) -> (params, "
            "model_state), with () for no model state, or init(key) -> params.",
        ),
        (
            lambda: as_member((full_init, lambda params, x: x)),
            "The function apply has the parameters (params, x). With init(key, inputs) -> "
            "(params, model_state) it must be apply(params, model_state, inputs, key, train) -> "
            "(outputs, model_state).",
        ),
        (
            lambda: as_member((short_init, full_apply)),
            "The function apply has the parameters (params, model_state, inputs, key, train). "
            "With init(key) -> params it must be apply(params, inputs) -> outputs.",
        ),
        (
            lambda: as_member(init=returns_one).init(jax.random.key(0), X),
            "init returned a dict instead of a tuple of two. It must be init(key, inputs) -> "
            "(params, model_state), with () for no model state.",
        ),
        (
            lambda: as_member(init=returns_three).init(jax.random.key(0), X),
            "init returned a tuple of 3 instead of a tuple of two.",
        ),
        (
            lambda: as_member((full_init, lambda p, s, x, k, t: x)).apply({}, (), X, None, False),
            "apply returned an array instead of a tuple of two. It must be apply(params,",
        ),
    ],
)
def test_what_is_no_network_is_told_what_to_give_instead(make, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        make()
