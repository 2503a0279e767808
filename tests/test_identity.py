"""What would make a member depend on its company, on a column, or on JAX's configuration."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens.ensemble import MemberBatches
from dist_ens.evaluation.out_of_bag import examples_out_of_bag
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import EXAMPLES, member_key
from dist_ens.layout import BATCHES, MEMBER_BATCHES, MEMBERS, Layout
from dist_ens.members import Member, from_functions, from_linen
from dist_ens.methods import poisson_weight
from marked import long
from saving import reader, save

BATCH = networks.BATCH
INPUTS = jax.ShapeDtypeStruct((BATCH, 12), jnp.float32)
DEVICE = jax.devices()[:1]


def trained(member, *, mesh=(1, 1), num_members=2, ids=None, optimizer=networks.SGD, **options):
    """The state after three steps of one call each, on the host."""
    layout = networks.layout_on(mesh, num_members)
    ensemble = networks.ensemble_of(member, optimizer, layout, **options)
    state = networks.begin(ensemble, INPUTS, member_ids=ids)
    batches = networks.batches_for(INPUTS, (), 3)
    for step in range(3):
        batch = {name: leaf[step : step + 1] for name, leaf in batches.items()}
        state, _ = ensemble.update_steps(state, layout.put(batch, BATCHES))
    return state


# Random numbers


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(networks.CLASSES)(x)


under_any_configuration = pytest.mark.parametrize(
    "configured",
    [
        functools.partial(jax.default_prng_impl, "rbg"),
        functools.partial(jax.threefry_partitionable, False),
        *long(functools.partial(jax.default_prng_impl, "unsafe_rbg")),
    ],
    ids=["rbg", "not partitionable", "unsafe_rbg"],
)


@under_any_configuration
@pytest.mark.parametrize("optimizer", [optax.noisy_sgd(0.1, key=0), *long((networks.SGD,))])
def test_a_member_is_the_same_under_any_configuration_of_random_numbers(configured, optimizer):
    member = from_linen(Dropping())
    as_usual = trained(member, optimizer=optimizer)
    with configured():
        networks.assert_equal(trained(member, optimizer=optimizer), as_usual)
        company = trained(member, optimizer=optimizer, num_members=8)
        alone = trained(member, optimizer=optimizer, num_members=1, ids=[1])
    of_company = networks.member_of(company.params, 1)
    networks.assert_close(of_company, networks.member_of(alone.params, 0))


@under_any_configuration
def test_dropout_samples_are_the_same_under_any_configuration_of_random_numbers(configured):
    layout = Layout.make(2, devices=DEVICE)
    x = layout.put(networks.batches_for(INPUTS, (), 1)["inputs"][0])

    def made():
        member = from_linen(networks.Asking())
        return networks.ensemble_of(member, networks.SGD, layout, dropout_samples=3)

    state = networks.begin(made(), INPUTS)
    as_usual = made().outputs(state, x)
    with configured():
        np.testing.assert_array_equal(made().outputs(state, x), as_usual)


@under_any_configuration
def test_a_bootstrap_sample_is_the_same_under_any_configuration_of_random_numbers(configured):
    def weights():
        keys = jax.vmap(lambda i: jax.random.fold_in(member_key(0, i), EXAMPLES))(np.arange(3))
        together = jax.jit(jax.vmap(lambda key: poisson_weight(key, jnp.arange(50))))(keys)
        left_out = examples_out_of_bag(np.arange(3), 50, seed=0, num_folds=None)
        np.testing.assert_array_equal(left_out, np.asarray(together) == 0)
        return together

    as_usual = weights()
    assert (np.asarray(as_usual) == 0).sum(axis=1).min() > 10  # about 50 / e of each
    with configured():
        np.testing.assert_array_equal(weights(), as_usual)


def test_a_members_key_does_not_depend_on_an_offset_of_seeds():
    expected = jax.random.key_data(member_key(5, 1)).tolist()
    jax.config.update("jax_random_seed_offset", 7)
    try:
        assert jax.random.key_data(member_key(5, 1)).tolist() == expected
    finally:
        jax.config.update("jax_random_seed_offset", 0)


# A network whose parameter has no gradient: only an optimizer's noise moves it.
CONSTANT_LOSS = from_functions(
    lambda key: {"w": jnp.zeros((12, networks.CLASSES))}, lambda params, x: 0 * (x @ params["w"])
)


def plain_keys(seed):
    """Noise from keys that are plain arrays, as optimizers of older packages keep them."""

    def init(params):
        return {"keys": jnp.stack([jax.random.PRNGKey(seed + i) for i in range(2)])}

    def update(grads, state, params=None):
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(state["keys"])
        noise = jax.tree.map(lambda g: g + jax.random.normal(keys[0], g.shape), grads)
        return noise, {"keys": keys}

    return optax.GradientTransformation(init, update)


NOISY = {
    "noisy_sgd": lambda seed: optax.noisy_sgd(1e-2, key=seed),
    "every other step": lambda seed: optax.MultiSteps(
        optax.noisy_sgd(1e-2, key=seed), 2
    ).gradient_transformation(),
    "another generator": lambda seed: optax.add_noise(0.1, 0.5, jax.random.key(seed, impl="rbg")),
    "plain keys": plain_keys,
}


@pytest.mark.parametrize(
    "name", ["noisy_sgd", "plain keys", *long("every other step", "another generator")]
)
def test_an_optimizers_noise_is_each_members_own(name):
    def moved(num_members=4, ids=None, seed=0, **options):
        optimizer = NOISY[name](seed)
        options |= {"num_members": num_members, "ids": ids, "optimizer": optimizer}
        state = trained(CONSTANT_LOSS, **options)
        return np.asarray(state.params["w"])

    together = moved()
    assert np.abs(together).min(axis=(1, 2)).max() > 0
    for a, b in itertools.combinations(together, 2):
        assert np.abs(a - b).max() > 1e-3
    np.testing.assert_allclose(moved(1, ids=[2])[0], together[2], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(moved(mesh=(2, 2)), together, rtol=1e-5, atol=1e-7)
    assert np.abs(moved(seed=1) - together).max() > 1e-3


def gamma_noise(seed):
    """Noise that is drawn from a plain key without a typed one, beside two counters."""

    def init(params):
        return {"key": jax.random.PRNGKey(seed), "counters": jnp.zeros(2, jnp.uint32)}

    def update(grads, state, params=None):
        noise = jax.tree.map(lambda g: g + jax.random.gamma(state["key"], 2.0, g.shape), grads)
        return noise, {**state, "counters": state["counters"] + 1}

    return optax.GradientTransformation(init, update)


def test_a_plain_key_is_told_from_counters_by_what_is_drawn_from_it():
    state = trained(CONSTANT_LOSS, optimizer=gamma_noise(0), num_members=3)
    assert state.opt_state["counters"].tolist() == [[3, 3]] * 3
    assert len({tuple(key) for key in state.opt_state["key"].tolist()}) == 3
    params = np.asarray(state.params["w"])
    assert not np.allclose(params[0], params[1])


def over_columns():
    """An optimizer that averages over the columns itself."""

    def update(grads, state, params=None):
        return jax.lax.pmean(grads, "data"), state

    return optax.GradientTransformation(lambda params: (), update)


# Two that no trace can take alone, and one that gives each member noise of its own.
@pytest.mark.parametrize("optimizer", [optax.lbfgs(), over_columns(), NOISY["noisy_sgd"](0)])
def test_networks_trained_elsewhere_begin_as_others_do(optimizer):
    layout, of_ids = Layout.make(2, devices=DEVICE), {"seed": 5, "member_ids": [3, 1]}
    ensemble = networks.ensemble_of(CONSTANT_LOSS, optimizer, layout, **of_ids)
    params = [{"w": np.zeros((12, networks.CLASSES), np.float32)}] * 2
    networks.assert_equal(ensemble.state_of(params), networks.begin(ensemble, INPUTS))


def test_an_optimizer_that_draws_from_no_key_in_its_state_is_refused():
    def update(grads, state, params=None):
        key = jax.random.fold_in(jax.random.key(0), state)
        return jax.tree.map(lambda g: g + jax.random.normal(key, g.shape), grads), state + 1

    optimizer = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    with pytest.raises(UserError, match="from a key that is not in its state"):
        trained(CONSTANT_LOSS, optimizer=optimizer)


# How a batch is divided


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -0.004, 0.004),))


def clipping_its_cotangents():
    return from_functions(
        lambda key: {"w": 0.5 * jax.random.normal(key, (12, networks.CLASSES))},
        lambda params, x: clipped(x @ params["w"]),
    )


@functools.cache
def trained_on_two_rows(member):
    return trained(member(), mesh=(2, 1))


@pytest.mark.parametrize("member", [clipping_its_cotangents, lambda: networks.mlp()[0]])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        *[((2, 2), {}), ((2, 2), {"microbatches": 4})],
        ((1, 8), {"microbatches": 4}),  # Parts of 4 examples do not divide over 8 columns.
        *long(((1, 8), {}), ((2, 1), {"microbatches": 2})),
    ],
    ids=str,
)
def test_a_gradient_does_not_depend_on_how_the_batch_is_divided(member, mesh, options):
    whole, parts = trained_on_two_rows(member), trained(member(), mesh=mesh, **options)
    networks.assert_close(parts.params, whole.params)


def counting():
    """A network whose state counts the positive inputs, and holds a complex mean of the last."""

    def apply(params, model_state, x, key, train):
        if not train:
            return x @ params["w"], model_state
        count = model_state["n"] + (x > 0).sum(dtype=jnp.int32)
        mean = jax.lax.complex(x, -x).mean(axis=0)
        return x @ params["w"], {**model_state, "n": count, "mean": mean}

    def init(key, x):
        w = jax.random.normal(key, (12, networks.CLASSES))
        mean = jnp.zeros(12, jnp.complex64)
        return {"w": w}, {"n": jnp.int32(0), "mean": mean, "never": jnp.float32(jnp.nan)}

    return Member(init, apply)


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2), (1, 4)], ids=str)
def test_integer_and_complex_state_is_that_of_the_whole_batch(mesh):
    state = trained(counting(), mesh=mesh).model_state
    inputs = networks.batches_for(INPUTS, (), 3)["inputs"]
    assert state["n"].tolist() == [int((inputs > 0).sum())] * 2
    mean = inputs[-1].mean(axis=0)
    networks.assert_close(state["mean"], np.stack([mean - 1j * mean] * 2))


# What a batch holds


def test_a_loss_function_sees_every_part_of_a_members_batch():
    member = networks.mlp()[0]

    def loss_fn(params, model_state, batch, key):
        outputs, model_state = member.apply(params, model_state, batch["inputs"], key, True)
        return (outputs**2).mean(), (model_state, {"extra": batch["extra"].mean()})

    layout = Layout.make(2, devices=DEVICE)
    ensemble = networks.ensemble_of(member, networks.SGD, layout, loss_fn)
    batch = networks.batches_for(INPUTS, (), 1)
    batch["extra"] = np.arange(BATCH, dtype=np.float32)[None]
    own = {name: np.stack([leaf] * 2) for name, leaf in batch.items()}
    own["extra"][1] += 1
    given = MemberBatches(layout.put(own, MEMBER_BATCHES))
    _, metrics = ensemble.update_steps(networks.begin(ensemble, INPUTS), given)
    # The mean of 0, ..., 15 is 7.5; the second member's own numbers are each one more.
    assert metrics["extra"].tolist() == [[7.5, 8.5]]


# How often an update is compiled


def init_temperature(key, x):
    w = jax.random.normal(key, (12, networks.CLASSES))
    return {"w": w, "scale": 1.0, "shift": jnp.asarray(0.0)}, {"scale": 1.0}


def apply_temperature(params, model_state, x, key, train):
    outputs = params["scale"] * (x @ params["w"]) + params["shift"]
    return outputs, {"scale": 2.0 if train else model_state["scale"]}


# A network whose parameters and state are written as Python numbers.
WITH_TEMPERATURE = Member(init_temperature, apply_temperature)


@pytest.fixture
def compiled():
    """How often the compiler was asked, in a list that grows."""
    times = []

    def count(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            times.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield times
    jax.monitoring.unregister_event_duration_listener(count)


def born(ensemble, tmp_path):
    return networks.begin(ensemble, INPUTS)


def from_elsewhere(ensemble, tmp_path):
    made = [init_temperature(jax.random.key(i), None) for i in range(2)]
    return ensemble.state_of(*zip(*made, strict=True))


def restored(ensemble, tmp_path):
    save(tmp_path, networks.begin(ensemble, INPUTS))
    return reader(tmp_path, 1).state(ensemble.abstract_state({"inputs": INPUTS}))


def moved(ensemble, tmp_path):
    elsewhere = ensemble.replace(layout=Layout.make(2, devices=jax.devices()[:2]))
    return ensemble.layout.moved(networks.begin(elsewhere, INPUTS), MEMBERS)


@pytest.mark.parametrize("way", [born, from_elsewhere, restored, moved])
def test_an_update_is_compiled_once_however_the_state_was_made(way, compiled, tmp_path):
    layout = Layout.make(2, devices=DEVICE)
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    ensemble = networks.ensemble_of(WITH_TEMPERATURE, optimizer, layout)
    state = way(ensemble, tmp_path)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    batch = layout.put(networks.batches_for(INPUTS, (), 1), BATCHES)
    jax.block_until_ready((state, batch))
    compiled.clear()
    for _ in range(3):
        state, _ = ensemble.update_steps(state, batch)
    assert len(compiled) == 1
