"""Updates within less memory, or in less precision: the same members, as far as that allows."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import networks
from dist_ens.data import Spec
from dist_ens.experiment import Experiment, ModelConfig, make_model
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import RunError
from dist_ens.layout import BATCHES, Layout
from dist_ens.members import from_linen, rematerialized, with_compute_dtype
from failing import fit
from marked import long


def updated(network, *, change=lambda member: member, microbatches=1, mesh=(2, 2)):
    """State and metrics after three steps."""
    member, inputs, label_shape = network()
    layout, options = networks.layout_on(mesh, 4), {"microbatches": microbatches}
    ensemble = networks.ensemble_of(change(member), optax.sgd(0.1), layout, **options)
    state = networks.born_on(layout, network)
    batches = layout.put(networks.batches_for(inputs, label_shape, 3), BATCHES)
    return jax.device_get(ensemble.update_steps(state, batches))


# What microbatches change

ROWS = np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32)


def info_nce(params, model_state, batch, key):
    """A loss over pairs: each example is told from all others of the batch."""
    scores = (batch["x"] * params["w"][None]) @ batch["x"].T
    return -jnp.diagonal(jax.nn.log_softmax(scores)).mean(), (model_state, {})


def dropping(params, model_state, batch, key):
    """A mean over examples of which half of the inputs are dropped."""
    kept = jnp.where(jax.random.bernoulli(key, 0.5, batch["x"].shape), batch["x"], 0)
    return ((kept * params["w"][None]).sum(axis=1) ** 2).mean(), (model_state, {})


def weighted(*, ratio):
    def loss(params, model_state, batch, key):
        errors = (batch["x"] * params["w"][None]).sum(axis=1) ** 2
        mean = de.losses.batch_mean(errors, jnp.abs(batch["x"][:, 0]), ratio=ratio)
        return mean, (model_state, {})

    return loss


def with_loss(loss, mesh=(2, 1), **options):
    layout = networks.layout_on(mesh, 2)
    member = de.as_member(init=lambda key, batch: ({"w": jax.random.normal(key, (4,))}, ()))
    options = {"num_members": 2, "layout": layout, "microbatches": 4} | options
    return de.Ensemble(member, optax.sgd(0.1), loss, **options)


def said_by_fit(ensemble):
    said = []
    fit(ensemble, [{"x": ROWS}] * 2, steps=2, say=said.append)
    return [line for line in said if "microbatches" in line]


@pytest.mark.parametrize(("mesh", "waves"), [((2, 1), 1), ((1, 4), 2), *long(((1, 8), 1))])
def test_a_loss_that_microbatches_change_is_warned_of_with_both_numbers(mesh, waves, caplog):
    ensemble = with_loss(info_nce, mesh, waves=waves)
    state = ensemble.init({"x": ROWS})

    def of(w, rows):
        scores = (rows * w) @ rows.T
        return (np.log(np.exp(scores).sum(axis=1)) - np.diagonal(scores)).mean()

    # A part holds every fourth example. A member's loss in parts is the mean over its four parts.
    # Of members in waves, those of the first wave are compared.
    each = np.asarray(state.params["w"], np.float64)[: ensemble.of_wave.num_members]
    whole = np.mean([of(w, ROWS) for w in each])
    parts = np.mean([[of(w, ROWS[k::4]) for k in range(4)] for w in each])
    expected = f"The loss of the first batch is {whole:.5g} as a whole, and {parts:.5g} as the mean"
    [told] = said_by_fit(ensemble)
    assert told.startswith(expected)
    for _ in range(2):
        state, _ = ensemble.update(state, {"x": ROWS})
    assert [m.startswith(expected) for m in caplog.messages if "microbatches" in m] == [True]


@pytest.mark.parametrize(
    ("loss", "count"), [(weighted(ratio=False), 1), (weighted(ratio=True), 0), (dropping, 0)]
)
def test_a_weighted_mean_is_warned_of_unless_it_is_a_ratio_and_noise_is_not(loss, count):
    assert len(said_by_fit(with_loss(loss))) == count


@pytest.mark.parametrize(
    ("network", "count"), [(networks.mlp, 4), *long((networks.transformer, 2))]
)
def test_accumulated_gradients_are_those_of_the_large_batch(network, count):
    whole, metrics = updated(network)
    parts, other = updated(network, microbatches=count)
    networks.assert_close((whole.params, metrics), (parts.params, other))


def test_parts_of_a_batch_have_statistics_and_dropout_of_their_own():
    whole, _ = updated(networks.dropout)
    parts, _ = updated(networks.dropout, microbatches=2)
    kernel = lambda state: state.params["Dense_0"]["kernel"]  # noqa: E731
    assert not np.allclose(kernel(whole), kernel(parts), atol=1e-5)
    again, _ = updated(networks.dropout, microbatches=2, mesh=(4, 2))
    networks.assert_close(parts.params, again.params)


class Deep(nn.Module):
    """Much between its matrix products that a backward pass wants."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(64)(x)))
            x = jnp.tanh(x) * jnp.exp(-x)
        return nn.Dense(networks.CLASSES)(x)


def deep():
    return from_linen(Deep()), jax.ShapeDtypeStruct((networks.BATCH, 12), jnp.float32), ()


@pytest.mark.parametrize("network", [deep, *long(networks.dropout)])
def test_rematerialized_members_are_the_same(network):
    whole, _ = updated(network)
    again, _ = updated(network, change=rematerialized)
    networks.assert_close(whole.params, again.params)


def test_a_rematerialized_member_keeps_what_products_return():
    member, inputs, _ = deep()
    params, state = jax.eval_shape(member.init, jax.random.key(0), inputs)

    def kept(member):
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (params, inputs))
        _, backward = jax.vjp(lambda p, x: member.apply(p, state, x, None, True)[0], *ones)
        of_batch = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape[:1] == (16,)]
        return sum(leaf.size for leaf in of_batch)

    # The inputs, 16 x 12, and what four products return, 16 x 64 each.
    assert kept(rematerialized(member)) <= 16 * (12 + 4 * 64)
    assert kept(member) > 3 * 16 * (12 + 4 * 64)


MODELS = {
    "mlp": ((12,), {"hidden_sizes": (8,)}),
    "mlp_bn_dropout": ((12,), {"hidden_sizes": (8,)}),
    "lenet5": ((12, 12), {}),
    "resnet8": ((8, 8, 3), {}),
    "transformer": ((6,), {"num_blocks": 1, "width": 8, "num_heads": 2, "mlp_size": 8}),
}


@pytest.mark.parametrize(
    "name", ["mlp_bn_dropout", "lenet5", "transformer", *long("mlp", "resnet8")]
)
def test_in_bfloat16_every_product_of_a_network_is(name):
    input_shape, options = MODELS[name]
    member = make_model(ModelConfig(name=name, options=options), input_shape, 5)
    member = with_compute_dtype(member, "bfloat16")
    dtype = "int32" if name == "transformer" else "float32"
    inputs = jax.ShapeDtypeStruct((2, *input_shape), dtype)
    layout = Layout.make(1, devices=jax.devices()[:1])
    ensemble = networks.ensemble_of(member, optax.adam(0.1), layout)
    state = ensemble.abstract_state({"inputs": inputs})
    batches = {
        "inputs": jax.ShapeDtypeStruct((1, 2, *input_shape), dtype),
        "labels": jax.ShapeDtypeStruct((1, 2, *input_shape[: name == "transformer"]), "int32"),
    }
    lines = ensemble.update_steps.lower(state, batches).as_text().splitlines()
    products = [line for line in lines if "dot_general" in line or "stablehlo.conv" in line]
    products = [line for line in products if "stablehlo.convert" not in line]
    assert len(products) >= 5
    assert [line for line in products if "xf32>" in line.rsplit(" : ")[-1]] == []
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


def test_in_bfloat16_state_stays_float32_and_learns_nearly_the_same():
    whole, metrics = updated(networks.mlp)
    state, other = updated(networks.mlp, change=partial(with_compute_dtype, dtype="bfloat16"))
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, whole)
    # bfloat16 has 8 bits: a part in 256 per operation, of losses around 2 nats.
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=0.05)
    assert not np.array_equal(metrics["loss"], other["loss"])


def test_a_config_says_precision_and_memory():
    values = {"num_members": 4, "steps": 2, "data": {"global_batch_size": 16}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (8,)}}
    values |= {"compute": {"dtype": "bfloat16", "rematerialize": True, "microbatches": 2}}
    spec, layout = Spec((12,), "float32", (), 5), Layout.make(4, devices=jax.devices()[:2])
    ensemble = build_ensemble(Run(Experiment.from_dict(values), spec, 100), layout)
    inputs = jax.ShapeDtypeStruct((16, 12), jnp.float32)
    state = networks.begin(ensemble, inputs)
    batches = layout.put(networks.batches_for(inputs, (), 1), BATCHES)
    text = str(jax.make_jaxpr(ensemble.update_steps)(state, batches))
    assert "bf16[2,8,8]" in text  # two members on a device, a part of the batch, hidden units
    assert "remat" in text or "checkpoint" in text


def test_an_update_without_enough_memory_is_explained():
    def loss(params, model_state, batch, key):
        # A sorted array of 2^48 numbers, 2^50 bytes, which no machine has.
        numbers = jnp.arange(2**24)[None]
        large = jnp.broadcast_to(params["w"] * batch.sum(), (2**20, 2**24)) * numbers
        return jnp.sort(jax.lax.stop_gradient(large), axis=0).sum() + params["w"], (model_state, {})

    member = de.as_member(init=lambda key: {"w": jnp.ones(())})
    layout = Layout.make(2, devices=jax.devices()[:1])
    ensemble = de.Ensemble(member, optax.sgd(0.1), loss, num_members=2, layout=layout)
    message = (
        r"too little memory for an update: XLA asked for [\d,]+ MiB at once, and a device "
        r"has [\d,]+ MiB free. A device takes 2 members at once. These need less memory: .*more "
        r"waves \(now 1\), more microbatches \(now 1\), a smaller batch"
    )
    with pytest.raises(RunError, match=message):
        de.fit(ensemble, np.ones((4, 3), np.float32), steps=3, progress=False)
