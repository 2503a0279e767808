"""Every execution makes the same members."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens.ensemble import Batches
from dist_ens.execution import Execution, Lowering, register
from dist_ens.execution.heuristics import candidates
from dist_ens.execution.lowerings import CONVOLUTION
from dist_ens.execution.rewrite import contains
from dist_ens.execution.spec import LOWERINGS, MEMBER_EXECUTIONS, STEPS
from dist_ens.layout import Layout
from dist_ens.losses import categorical
from dist_ens.members import as_member, from_linen
from marked import long


class PoolingNet(nn.Module):
    """Convolutions, one strided, with max-pooling between them."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
        return nn.Dense(networks.CLASSES)(x.reshape(len(x), -1))


def pooling():
    shape = jax.ShapeDtypeStruct((networks.BATCH, 8, 8, 2), jnp.float32)
    return from_linen(PoolingNet()), shape, ()


def narrow():
    """Of two inputs, and with a layer that is no whole number of vectors wide."""
    return networks.of_config("mlp", (2,), hidden_sizes=(20, 3))


def trained(network, execution):
    """State, metrics and logits of four members after one call of three steps, from seed 0."""
    layout = networks.layout_on((2, 2), 4)
    ensemble, state, batches = networks.program(network, layout, 3, execution=execution)
    x = layout.put(jax.device_get(batches["inputs"][0]))
    state, metrics = ensemble.update_steps(state, batches)
    return jax.device_get((state, metrics, ensemble.outputs(state, x)))


EXECUTIONS = sorted(
    [*MEMBER_EXECUTIONS.keys() - {"vmap", "chunk"}, "chunk:1", "chunk:2", "chunk:3"]
)
LOWERED = [
    *(f"vmap+{each}+masks" for each in LOWERINGS if LOWERINGS[each].primitive is CONVOLUTION),
    *("unroll+canonical+scanned", "map+canonical+masks", "chunk:2+patches", "loop+masks"),
]
PRODUCTS = [f"{way}+{each}" for way in ("vmap", "map", "loop") for each in ("aligned", "flat")]
STEPPED = [f"{way}+{steps}" for way in ("vmap", "unroll", "loop") for steps in STEPS]


@functools.cache
def reference(network):
    return trained(network, "vmap")


CASES = [
    *((networks.mlp, each) for each in (*EXECUTIONS, *STEPPED)),
    *((pooling, each) for each in EXECUTIONS),
    *((narrow, each) for each in PRODUCTS),
]


@pytest.mark.parametrize(
    ("network", "execution"),
    [*CASES[1::2], *((pooling, each) for each in LOWERED), *long(*CASES[::2])],
)
def test_every_execution_makes_the_same_members(network, execution):
    networks.assert_close(trained(network, execution), reference(network))


def test_a_lowered_update_holds_no_slow_operation():
    ensemble, *arguments = networks.program(pooling, networks.layout_on((1, 1), 2))

    def text(execution):
        return ensemble.replace(execution=execution).update_steps.lower(*arguments).as_text()

    plain = text("vmap")
    assert "stablehlo.convolution" in plain
    assert "stablehlo.select_and_scatter" in plain
    assert "stablehlo.while" not in plain  # convolutions on a CPU
    lowered = text("vmap+patches+masks")
    assert "stablehlo.convolution" not in lowered
    assert "stablehlo.select_and_scatter" not in lowered
    assert "stablehlo.while" in lowered  # nothing is left that is slow there
    assert "stablehlo.while" in text("vmap+canonical+unrolled")  # of the members
    # Two members, two steps, two kernels: of each the examples.
    assert text("unroll+canonical+unrolled").count("stablehlo.while") == 2 * 2 * 2


@pytest.mark.parametrize(
    "text",
    ["vmap", "unroll+masks", "chunk:4+patches+aligned+masks+scanned", "loop+canonical+single"],
)
def test_an_execution_is_written_as_it_is_read(text):
    assert str(Execution.parse(text)) == text


def test_a_lowering_of_ones_own_is_one_object(monkeypatch):
    seen = []

    def rule(x, *, columns, **params):
        seen.append(columns)
        return 2 * jax.nn.sigmoid(2 * x) - 1

    def candidates_of(layout, traced, num_steps):
        return ["vmap+sigmoids"] if contains(traced, jax.lax.tanh_p) else []

    monkeypatch.setitem(LOWERINGS, "sigmoids", None)  # It is unregistered after the test.
    register(Lowering("sigmoids", jax.lax.tanh_p, rule, candidates_of))
    network = as_member((lambda key: jnp.full((3, 2), 0.1), lambda w, x: jnp.tanh(x @ w)))
    layout = Layout.make(2, devices=jax.devices()[:1])
    batch = {"inputs": np.ones((4, 3), np.float32), "labels": np.zeros(4, np.int32)}

    def loss_by(execution):
        ensemble = networks.ensemble_of(
            network, optax.sgd(0.1), layout, categorical(2), execution=execution
        )
        state = ensemble.init(batch)
        traced = ensemble.traced_update(state, Batches.shapes_of_step(batch))
        assert candidates(layout, traced, 1)[-1] == "vmap+sigmoids"
        return ensemble.update(state, batch)[1]["loss"]

    expected = loss_by("vmap")
    assert not seen
    np.testing.assert_allclose(loss_by("vmap+sigmoids"), expected, rtol=1e-6)
    assert set(seen) == {1}
