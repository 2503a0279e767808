"""`as_member` takes a network of any library, inputs of any structure, and says what is wrong."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dist_ens as de
from dist_ens.ground.errors import UserError
from dist_ens.members import (
    Member,
    as_member,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from networks import check_member
from test_member import Equinox as Stateful
from test_member import EquinoxPlain as Equinox
from test_member import Linen, Nnx, Registered, Unregistered

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
KEY = jax.random.key(0)
INPUTS = jax.ShapeDtypeStruct((8, 6), jnp.float32)
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def registered(key):
    return Registered(jax.random.normal(key, (6, 3)), jnp.zeros(3))


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
    "nnx function of another name": lambda r: Nnx(rngs=r),
    "nnx partial": functools.partial(Nnx),
    "equinox class": Equinox,
    "equinox function of another name": lambda k: Equinox(k),
    "equinox function of a position": lambda key, /: Equinox(key),
    "equinox with state": Stateful,
    "function of a registered class": registered,
    "short functions": (short_init, short_apply),
    "full functions": (full_init, full_apply),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_every_kind_becomes_a_member(name):
    member = as_member(NETWORKS[name])
    assert member.has_apply
    check_member(member, INPUTS, (8, 3))


def test_nothing_is_computed_to_find_out_the_library():
    made = []
    before = len(jax.live_arrays())
    as_member(lambda key: made.append(Equinox(key)) or made[0])
    assert len(jax.live_arrays()) == before
    assert isinstance(made[0].head.weight, jax.core.Tracer)


def test_the_short_form_sets_the_switch_and_the_full_form_keeps_the_state():
    short = as_member((short_init, short_apply))
    params, state = short.init(KEY, X)
    assert state == ()
    trained, _ = short.apply(params, (), X, None, True)
    np.testing.assert_allclose(trained, 2 * X @ params["w"], rtol=1e-5)

    full = as_member(init=full_init, apply=full_apply)
    params, state = full.init(KEY, X)
    assert full.apply(params, state, X, KEY, True)[1]["calls"] == 1.0
    # Outside training the state stays as it was, whatever the function returns.
    assert full.apply(params, state, X, None, False)[1]["calls"] == 0.0


@pytest.mark.parametrize("init", [short_init, full_init])
def test_a_network_without_apply_trains_but_cannot_predict(init):
    member = as_member(init=init)
    params, _ = check_member(member, INPUTS)
    assert params["w"].shape == (6, 3)
    changed = with_compute_dtype(member, "bfloat16"), with_normalized_inputs(member, (1.0,), (2.0,))
    for wrapped in (member, *changed, rematerialized(member)):
        assert not wrapped.has_apply
        with pytest.raises(UserError, match="given without apply. Give as_member"):
            wrapped.apply(*member.init(KEY, X), X, None, False)


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


@pytest.mark.slow
@pytest.mark.parametrize("network", [LinenGraph(), EquinoxGraph])
def test_a_graph_goes_in_and_a_dict_comes_out(network):
    member = as_member(network)
    check_member(member, GRAPH_SHAPES)
    params, state = member.init(KEY, GRAPH)
    outputs, _ = member.apply(params, state, GRAPH, jax.random.key(1), True)
    assert outputs["energy"].shape == (8,)
    # Of the 40 numbers, those that 3 does not divide: 0 .. 4 has 1, 2, 4.
    assert outputs["count"][0] == 3


def test_only_floating_leaves_are_computed_in_another_type():
    seen = {}

    def apply(params, graph):
        seen.update(jax.tree.map(lambda leaf: leaf.dtype, graph))
        return {"energy": graph["atoms"] @ params["w"], "count": graph["mask"].sum(-1)}

    member = with_compute_dtype(as_member((graph_init, apply)), "bfloat16")
    graph = jax.tree.map(jnp.asarray, GRAPH)
    outputs, _ = member.apply(graph_init(KEY), (), graph, None, False)
    assert seen == {"atoms": jnp.bfloat16, "mask": jnp.bool_}
    assert outputs["energy"].dtype == jnp.float32
    assert outputs["count"].dtype == jnp.int32


def test_members_of_a_loss_function_predict_in_the_type_in_which_they_are_trained():
    seen = []

    def apply(params, x):
        seen.append((str(params["w"].dtype), str(x.dtype)))
        return x @ params["w"]

    def loss(params, model_state, batch, key):
        return apply(params, batch["inputs"]).mean(), (model_state, {})

    parts, batch = ((short_init, apply), optax.sgd(0.1), loss), {"inputs": X}
    ensemble = de.Ensemble(*parts, num_members=2, compute_dtype="bfloat16")
    state, _ = ensemble.update(ensemble.init(batch), batch)
    prediction = ensemble.predict(state, X)
    de.evaluate(ensemble, state, batch)
    assert {*seen} == {("bfloat16", "bfloat16")}
    assert prediction.mean.dtype == jnp.float32
    weights = np.asarray(state.params["w"].astype(jnp.bfloat16), np.float32)
    by_hand = np.einsum("nf,mfc->mnc", X.astype(jnp.bfloat16).astype(np.float32), weights)
    np.testing.assert_allclose(prediction.members, by_hand, rtol=0.01, atol=0.02)


def test_leaves_are_normalized_each_by_its_own_numbers():
    member = as_member((graph_init, lambda params, graph: graph))
    mean, std = {"atoms": (1.0, 2.0), "mask": (0.0,)}, {"atoms": (2.0, 4.0), "mask": (1.0,)}
    given, _ = with_normalized_inputs(member, mean, std).apply({}, (), GRAPH, None, False)
    np.testing.assert_array_equal(given["atoms"][0, :2], [[-0.5, -0.25], [0.5, 0.25]])
    assert given["mask"].dtype == np.bool_
    same = with_normalized_inputs(member, {"atoms": 0, "mask": 0}, {"atoms": 1, "mask": 1})
    assert same is member


# Haiku


def haiku_network():
    """A network of haiku whose dropout precedes its BatchNorm."""

    def network(x, is_training):
        x = hk.Linear(8)(x)
        x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=is_training)
        return hk.Linear(1)(jnp.tanh(x))

    return hk.transform_with_state(network)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [Linen(), Nnx, Stateful, pytest.param("haiku", marks=needs_haiku)]
)
def test_dropout_follows_the_key_and_nothing_is_random_or_changes_without_training(network):
    member = as_member(haiku_network() if network == "haiku" else network)
    params, model_state = jax.jit(member.init)(KEY, X)
    apply = jax.jit(member.apply, static_argnums=4)
    one, same, other = (
        apply(params, model_state, X, jax.random.key(number), True)[0] for number in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    (first, state), (second, _) = (apply(params, model_state, X, None, False) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, state, model_state)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: as_member(Nnx(nnx.Rngs(0))), r"exist already.*as_member\(lambda rngs: Nnx\("),
        (lambda: as_member(registered(KEY)), r"as_member\(lambda key: Registered\("),
        (lambda: as_member(lambda key: Linen()), "makes Linen, which is no network yet. Give"),
        (lambda: as_member(Unregistered), r"Leaf \(the whole\) of a member is an object of class"),
        (lambda: as_member(eqx.nn.Linear), r"Linear\(in_features, out_features, key\) cannot be"),
        (lambda: as_member(lambda key: jnp.zeros(3).missing), "key, it raised AttributeError"),
        (lambda: as_member((lambda: 0, short_apply)), r"init has the parameters \(\)"),
        (lambda: as_member((full_init, lambda params, x: x)), r"apply has the parameters \(params"),
        (lambda: as_member(init=nn.Dense(3).init).init(KEY, X), "a dict, not a tuple"),
    ],
)
def test_what_is_no_network_is_told_what_to_give_instead(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
