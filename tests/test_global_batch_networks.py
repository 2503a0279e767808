"""Networks of every library, and lifted steps, see the whole batch on a data axis."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import batch_programs
import dist_ens as de
import networks
from batch_programs import BATCH, FEATURES, RATE, SEED
from dist_ens.ground.randomness import INIT, key_of_step
from marked import long
from networks import assert_close_to_scale, layout_on, member_of
from test_as_member import haiku_network, needs_haiku
from test_global_batch import MESHES

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


LIBRARIES = {"linen": Linen(), "nnx": OfNnx, "equinox": OfEquinox}


def network_of(library):
    return haiku_network() if library == "haiku" else LIBRARIES[library]


@functools.cache
def network_by_hand(library):
    """Returns losses, parameters and outputs of member 1, trained alone on one device."""
    member, key = de.as_member(network_of(library)), jax.random.fold_in(jax.random.key(SEED), 1)
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


@pytest.mark.parametrize("mesh", [(2, 2), *long(((1, 4),))], ids=str)
@pytest.mark.parametrize(
    "library", [*LIBRARIES, pytest.param("haiku", marks=[needs_haiku, pytest.mark.long])]
)
def test_a_network_of_every_library_has_the_statistics_of_the_whole_batch(library, mesh):
    losses, params, outputs = network_by_hand(library)
    parts = network_of(library), optax.sgd(RATE), layout_on(mesh, 2)
    ensemble = networks.ensemble_of(*parts, de.losses.squared_error(), seed=SEED)
    batches = [{"inputs": batch["inputs"], "labels": batch["target"]} for batch in BATCHES]
    state, found = ensemble.init(batches[0]), []
    for batch in batches:
        state, metrics = ensemble.update(state, batch)
        found.append(jax.device_get(metrics["loss"])[1])
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert_close_to_scale(member_of(state.params, 1), params)
    assert_close_to_scale(ensemble.apply(state, batches[0]["inputs"])[1], outputs)


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

    def error(critic, x, sign):
        return jax.nn.softplus(sign * (mask * jnp.tanh(x @ critic)).mean(axis=1)).mean()

    def critics_loss(critic):
        return error(critic, real, -1) + error(critic, jnp.tanh(noise @ gan["generator"]), 1)

    loss, of_critic = jax.value_and_grad(critics_loss)(gan["critic"])
    critic = gan["critic"] - 0.5 * of_critic
    of_generator = jax.grad(lambda g: error(critic, jnp.tanh(noise @ g), -1))(gan["generator"])
    generator = gan["generator"] - 0.5 * of_generator
    return {"generator": generator, "critic": critic, "key": key}, loss, (noise, mask)


@pytest.mark.parametrize(
    ("rows", "columns", "num_members", "execution"), [*MESHES[1:3], *long(MESHES[0], *MESHES[3:])]
)
def test_a_lifted_gan_draws_for_the_whole_batch_from_the_key_in_its_state(
    rows, columns, num_members, execution
):
    alone, by_hand = jax.jit(gan_step), []
    members = [gan_init(jax.random.key(i)) for i in range(num_members)]
    lifted = de.lift(
        gan_step,
        layout=layout_on((rows, columns), num_members),
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
        own = member_of(state, member_id)
        assert own.pop("key") == member.pop("key")
        assert_close_to_scale(own, member)


def test_a_lifted_step_sees_a_members_own_whole_batch():
    def step(w, shared, own):
        rank = jnp.argsort(jnp.argsort(own[:, 0])) * shared[:, 0]
        return w + jnp.square(own - own.mean(axis=0)[None]).sum(), rank

    own = np.stack([batch["view"] for batch in BATCHES[:2]])
    lifted = de.lift(
        step,
        layout=layout_on((2, 4), 2),
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

    lifted = de.lift(step, layout=layout_on((1, 4), 1), in_specs=("members", "batch"))
    counts = lifted(np.zeros(1, np.float32), BATCHES[0]["label"])
    # Eight, four and four labels, 200 each, modulo 256.
    assert counts.dtype == jnp.uint8
    assert counts.tolist() == [[64, 32, 32]]


def checked(x):
    return eqx.error_if(x, jnp.isnan(x).any(), "NaN in the batch")


@pytest.mark.parametrize("execution", ["vmap", "map"])
def test_a_step_may_call_python_functions_on_a_data_axis(execution):
    def step(w, x):
        rows = jax.ShapeDtypeStruct((), jnp.int32)
        count = jax.pure_callback(lambda x: np.int32(len(x)), rows, x, vmap_method="sequential")
        return jax.grad(lambda w: jnp.square(checked(w * x)).mean())(w), count

    x, w = BATCHES[0]["inputs"], np.array([1, 2], np.float32)
    options = {"in_specs": ("members", "batch"), "execution": execution}
    gradients, counts = de.lift(step, layout=layout_on((2, 2), 2), **options)(w, x)
    np.testing.assert_allclose(gradients, 2 * w * np.square(x).mean(), rtol=1e-6)
    assert counts.tolist() == [BATCH, BATCH]


def test_an_ensemble_whose_loss_and_network_call_python_is_trained_and_scored_on_a_data_axis():
    def loss(params, model_state, batch, key):
        errors = checked(batch["inputs"]) @ params - batch["target"]
        return jnp.square(errors).mean(), (model_state, {})

    network = de.as_member(
        init=lambda key: jax.random.normal(key, (FEATURES,)),
        apply=lambda params, x: checked(x) @ params,
    )
    parts = network, optax.sgd(RATE), layout_on((2, 2), 2), loss
    ensemble = networks.ensemble_of(*parts, execution="auto")
    state, _ = ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    x, target = BATCHES[0]["inputs"], BATCHES[0]["target"]
    outputs = ensemble.apply(state, x)
    np.testing.assert_allclose(outputs, jax.device_get(state.params) @ x.T, rtol=1e-5, atol=1e-6)
    scores = de.evaluate(ensemble, state, BATCHES[0])
    expected = np.square(np.asarray(outputs) - target[None]).mean(axis=1)
    losses = [member["loss"] for member in scores.members]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
