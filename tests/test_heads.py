"""Members with heads: networks, losses, and heads as predictors of scores and predictions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import networks
from dist_ens.ground.errors import UserError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
LABELS = (np.arange(16) % 3).astype(np.int32)
DATA = {"inputs": X, "labels": LABELS}
MLP = de.models.mlp((6,), 3, hidden_sizes=(8,))
CATEGORICAL = de.losses.of_heads(de.losses.categorical(3))


# The same weights in, the same numbers out as the code of others; see benchmarks/golden_heads.py


def golden(kind):
    """The inputs, the weights and the outputs [heads, batch, outputs] of a network of others."""
    with np.load("tests/heads_by_torch.npz") as arrays:
        of_kind = {
            n.removeprefix(f"{kind}/"): arrays[n] for n in arrays if n.startswith(f"{kind}/")
        }
    weights = {n.removeprefix("weights/"): of_kind[n] for n in of_kind if n.startswith("weights/")}
    return of_kind["inputs"], weights, of_kind["outputs"]


def plain(outputs=3):
    return de.models.mlp((5,), outputs, hidden_sizes=(16, 16))


def assert_outputs(member, params, inputs, expected):
    like = jax.eval_shape(member.init, jax.random.key(0), inputs)[0]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, like)
    found = member.apply(params, (), inputs, None, False)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_batch_ensemble_is_that_of_torch_uncertainty():
    inputs, weights, expected = golden("batch_ensemble")
    names = ["layers.0", "layers.1", "final_layer"]
    params = {
        "network": [{"w": weights[f"{name}.linear.weight"].T, "b": None} for name in names],
        "own": {f"{n}/b": weights[f"{name}.bias"] for n, name in enumerate(names)},
        "r": {f"{n}/w": weights[f"{name}.r_group"] for n, name in enumerate(names)},
        "s": {f"{n}/w": weights[f"{name}.s_group"] for n, name in enumerate(names)},
    }
    assert_outputs(de.models.batch_ensemble(plain(), heads=4), params, inputs, expected)


@pytest.mark.parametrize("mini", [False, True])
def test_tabm_is_that_of_its_authors(mini):
    inputs, weights, expected = golden("tabm_mini" if mini else "tabm")
    blocks = [f"backbone.blocks.{n}.0" for n in range(2)]
    biases = [weights[f"{name}.bias"] for name in blocks]
    params = {
        "network": [
            {"w": weights[f"{name}.weight"].T, "b": bias if mini else None}
            for name, bias in zip(blocks, biases, strict=True)
        ]
        + [{"w": None, "b": None}],
        "own": {"2/w": weights["output.weight"], "2/b": weights["output.bias"]},
        "r": {"0/w": weights["backbone.affine.weight"]} if mini else {},
        "s": {},
    }
    if not mini:
        params["own"] |= {f"{n}/b": bias for n, bias in enumerate(biases)}
        for part in "rs":
            params[part] = {f"{n}/w": weights[f"{name}.{part}"] for n, name in enumerate(blocks)}
    assert_outputs(de.models.tabm(plain(), heads=4, mini=mini), params, inputs, expected)


@pytest.mark.parametrize("gamma", [1, 2])
def test_packed_is_that_of_torch_uncertainty(gamma):
    inputs, weights, expected = golden("packed" if gamma == 1 else "packed_gamma2")
    params = []
    for name, groups in (("layers.0", 1), ("layers.1", gamma), ("final_layer", 1)):
        # theirs: [heads * groups, out, in], but for the first layer, whose units are of all heads.
        w = weights[f"{name}.weight"]
        w = w.reshape(4, groups, -1, w.shape[-1]).swapaxes(-1, -2)
        params.append({"w": w, "b": weights[f"{name}.bias"].reshape(4, -1)})
    member = de.models.packed((5,), 3, hidden_sizes=(16, 16), heads=4, alpha=2, gamma=gamma)
    assert_outputs(member, params, inputs, expected)
