"""Networks of every library, and lifted steps, see the whole batch on a data axis."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import batch_programs
import dist_ens as de
from batch_programs import BATCH, FEATURES, RATE, SEED
from dist_ens.ground.randomness import INIT, key_of_step
from test_global_batch import MESHES, assert_close, layout_of

BATCHES = batch_programs.batches()


# A network of each library, without a name of an axis. Dropout precedes the statistics.


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5)(nn.Dense(8)(x), deterministic=not train)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(jnp.tanh(x))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


@hk.transform_with_state
def of_haiku(x, is_training):
    x = hk.Linear(8)(x)
    x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
    x = hk.BatchNorm(True, True, 0.9)(x, is_training=is_training)
    return hk.Linear(1)(jnp.tanh(x))


class OfEquinox(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        of_first, of_last = jax.random.split(key)
        self.first = eqx.nn.Linear(FEATURES, 8, key=of_first)
        self.dropout = eqx.nn.Dropout(0.5)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.last = eqx.nn.Linear(8, 1, key=of_last)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.dropout(self.first(x), key=key), state)
        return self.last(jnp.tanh(x)), state


LIBRARIES = {"linen": Linen(), "nnx": OfNnx, "Haiku": of_haiku, "equinox": OfEquinox}


@functools.cache
def network_by_hand(library):
    """Returns losses, parameters and outputs of member 1, trained alone on one device."""
    member, key = de.as_member(LIBRARIES[library]), jax.random.fold_in(jax.random.key(SEED), 1)
    params, statistics = jax.jit(member.init)(
        jax.random.fold_in(key, INIT), jnp.zeros((BATCH, FEATURES))
    )

    @jax.jit
    def step(params, statistics, batch, key):
        def loss(params):
            outputs, new = member.apply(params, statistics, batch["inputs"], key, True)
            return jnp.square(batch["target"] - outputs[:, 0]).mean(), new

        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), statistics, value

    losses = []
    for number, batch in enumerate(BATCHES):
        params, statistics, value = step(params, statistics, batch, key_of_step(key, number))
        losses.append(value)
    outputs, _ = jax.jit(member.evaluate)(params, statistics, BATCHES[0]["inputs"], key)
    return jax.device_get((jnp.stack(losses), params, outputs))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_network_of_every_library_has_the_statistics_of_the_whole_batch(library, mesh):
    losses, params, outputs = network_by_hand(library)
    ensemble = de.Ensemble(
        LIBRARIES[library],
        optax.sgd(RATE),
        de.losses.squared_error(),
        num_members=2,
        seed=SEED,
        layout=layout_of(*mesh, 2),
        execution="vmap",
    )
    batches = [{"inputs": batch["inputs"], "labels": batch["target"]} for batch in BATCHES]
    state, found = ensemble.init(batches[0]), []
    for batch in batches:
        state, metrics = ensemble.update(state, batch)
        found.append(jax.device_get(metrics["loss"])[1])
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    of_member = jax.tree.map(lambda leaf: leaf[1], jax.device_get(state.params))
    assert_close(of_member, params)
    assert_close(jax.device_get(ensemble.apply(state, batches[0]["inputs"]))[1], outputs)


# A GAN as a step of one's own, whose key is in the state of its member.


def gan_init(key):
    of_generator, of_critic, own = jax.random.split(key, 3)
    return {
        "generator": jax.random.normal(of_generator, (2, FEATURES)),
        "critic": jax.random.normal(of_critic, (FEATURES, 8)) / 3,
        "key": own,
    }


def gan_step(gan, real):
    key, of_noise, of_mask = jax.random.split(gan["key"], 3)
    noise = jax.random.normal(of_noise, (len(real), 2))
    mask = jax.random.bernoulli(of_mask, 0.5, (len(real), 8))

    def scores(generator, critic, x):
        return (mask * jnp.tanh(x @ critic)).mean(axis=1)

    def critics_loss(critic, generator):
        fake = jnp.tanh(noise @ generator)
        return (
            jax.nn.softplus(-scores(generator, critic, real)).mean()
            + jax.nn.softplus(scores(generator, critic, fake)).mean()
        )

    def generators_loss(generator, critic):
        fake = jnp.tanh(noise @ generator)
        return jax.nn.softplus(-scores(generator, critic, fake)).mean()

    loss, of_critic = jax.value_and_grad(critics_loss)(gan["critic"], gan["generator"])
    critic = gan["critic"] - 0.5 * of_critic
    of_generator = jax.grad(generators_loss)(gan["generator"], critic)
    generator = gan["generator"] - 0.5 * of_generator
    return {"generator": generator, "critic": critic, "key": key}, loss, (noise, mask)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_lifted_gan_draws_for_the_whole_batch_from_the_key_in_its_state(mesh):
    rows, columns, num_members, execution = mesh
    alone, by_hand = jax.jit(gan_step), []
    members = [gan_init(jax.random.key(i)) for i in range(num_members)]
    lifted = de.lift(
        gan_step,
        layout=layout_of(rows, columns, num_members),
        in_specs=("members", "batch"),
        out_specs=("members", "members", "member_batch"),
        execution=execution,
    )
    state = de.stack_members(members)
    for batch in BATCHES:
        state, losses, drawn = lifted(state, batch["inputs"])
        by_hand = [alone(member, batch["inputs"]) for member in members]
        members = [member for member, _, _ in by_hand]
        np.testing.assert_allclose(losses, [loss for _, loss, _ in by_hand], rtol=1e-6)
        for found, *expected in zip(drawn, *(drawn for *_, drawn in by_hand), strict=True):
            np.testing.assert_array_equal(found, np.stack(expected))
    for member_id, member in enumerate(members):
        own = jax.tree.map(lambda leaf, i=member_id: leaf[i], state)
        assert bool((own.pop("key") == member.pop("key")).all())
        assert_close(own, member)


def test_a_lifted_step_sees_a_members_own_whole_batch():
    def step(w, shared, own):
        rank = jnp.argsort(jnp.argsort(own[:, 0])) * shared[:, 0]
        return w + jnp.square(own - own.mean(axis=0)[None]).sum(), rank

    own = np.stack([batch["view"] for batch in BATCHES[:2]])
    lifted = de.lift(
        step,
        layout=layout_of(2, 4, 2),
        in_specs=("members", "batch", "member_batch"),
        out_specs=("members", "member_batch"),
    )
    shared = BATCHES[0]["inputs"]
    sums, ranks = lifted(np.zeros(2, np.float32), shared, own)
    for member_id in range(2):
        expected = jax.jit(step)(np.float32(0), shared, own[member_id])
        np.testing.assert_allclose(sums[member_id], expected[0], rtol=1e-6)
        np.testing.assert_array_equal(ranks[member_id], expected[1])


def test_counts_of_the_batch_keep_their_type():
    def step(w, labels):
        return jnp.zeros(3, jnp.uint8).at[labels].add(jnp.uint8(200))

    layout = layout_of(1, 4, 1)
    counts = de.lift(step, layout=layout, in_specs=("members", "batch"))(
        np.zeros(1, np.float32), BATCHES[0]["label"]
    )
    # Eight, four and four labels, 200 each, modulo 256.
    assert counts.dtype == jnp.uint8
    assert counts.tolist() == [[64, 32, 32]]


@pytest.mark.parametrize("execution", ["vmap", "map"])
def test_a_step_may_call_python_functions_on_a_data_axis(execution):
    def step(w, x):
        def loss(w):
            checked = eqx.error_if(w * x, jnp.isnan(x).any(), "NaN in the batch")
            return jnp.square(checked).mean()

        rows = jax.ShapeDtypeStruct((), jnp.int32)
        count = jax.pure_callback(lambda x: np.int32(len(x)), rows, x, vmap_method="sequential")
        return jax.grad(loss)(w), count

    x, w = BATCHES[0]["inputs"], np.array([1, 2], np.float32)
    layout = layout_of(2, 2, 2)
    lifted = de.lift(step, layout=layout, in_specs=("members", "batch"), execution=execution)
    gradients, counts = lifted(w, x)
    np.testing.assert_allclose(gradients, 2 * w * np.square(x).mean(), rtol=1e-6)
    assert counts.tolist() == [BATCH, BATCH]


def test_an_ensemble_whose_loss_and_network_call_python_is_trained_and_scored_on_a_data_axis():
    def checked(x):
        return eqx.error_if(x, jnp.isnan(x).any(), "NaN in the batch")

    def loss(params, model_state, batch, key):
        errors = checked(batch["inputs"]) @ params - batch["target"]
        return jnp.square(errors).mean(), (model_state, {})

    network = de.as_member(
        init=lambda key: jax.random.normal(key, (FEATURES,)),
        apply=lambda params, x: checked(x) @ params,
    )
    layout = layout_of(2, 2, 2)
    ensemble = de.Ensemble(network, optax.sgd(RATE), loss, num_members=2, layout=layout)
    state, _ = ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    x, target = BATCHES[0]["inputs"], BATCHES[0]["target"]
    outputs = ensemble.apply(state, x)
    np.testing.assert_allclose(outputs, jax.device_get(state.params) @ x.T, rtol=1e-5, atol=1e-6)
    scores = de.evaluate(ensemble, state, BATCHES[0])
    expected = np.square(np.asarray(outputs) - target[None]).mean(axis=1)
    losses = [member["loss"] for member in scores.members]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
