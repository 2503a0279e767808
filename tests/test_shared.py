"""What members share: adapters, heads and priors on a network that is not trained."""

import json
import signal
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import dist_ens as de
import networks
from commands import dist_ens, wait_for
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.ensemble.batches import Batches
from dist_ens.ensemble.update_steps import dispatched, steps_of_all
from dist_ens.execution.rewrite import equations
from dist_ens.execution.spec import Execution
from dist_ens.experiment import Experiment, describe_source
from dist_ens.experiment.config_file import OwnParts
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.networks import export_members
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import INIT, member_key
from dist_ens.layout import BATCH, BATCHES
from dist_ens.plan.fitting import planner_of
from saving import assert_same

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
IMAGES = RANDOM.normal(size=(8, 6, 6, 2)).astype(np.float32)
TOKENS = RANDOM.integers(0, 7, (8, 5)).astype(np.int32)
CLASSES = 3


def labels_of(inputs):
    return (np.arange(len(inputs)) % CLASSES).astype(np.int32)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x))
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class Attention(nn.Module):
    """Attention in a block that is computed again, and an embedding that is used twice."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 8)
        x = embed(tokens)
        x = x + nn.remat(nn.MultiHeadDotProductAttention)(2)(x)
        return nn.Dense(CLASSES)(embed.attend(x).mean(axis=1))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(6, 8, key=one)
        self.last = eqx.nn.Linear(8, CLASSES, key=two)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def of_haiku(x):
    return hk.nets.MLP([8, CLASSES])(x)


HAIKU = hk.transform(of_haiku)
MLP = de.models.mlp((6,), CLASSES, hidden_sizes=(8,))
# Of each a network, what people have of it when it was trained, inputs, targets, and whether an
# array maps its last axis to the ones before, as equinox does.
CASES = {
    "linen": (Dense(), lambda key: Dense().init(key, X, False), X, "*/kernel", False),
    "conv": (Conv(), lambda key: Conv().init(key, IMAGES), IMAGES, "*", False),
    "attention": (Attention(), lambda key: Attention().init(key, TOKENS), TOKENS, "*", False),
    "lookup": (Attention(), lambda key: Attention().init(key, TOKENS), TOKENS, "Embed*", False),
    "nnx": (Nnx, lambda key: Nnx(nnx.Rngs(key)), X, "*", False),
    "equinox": (Equinox, Equinox, X, "*", True),
    "haiku": (HAIKU, lambda key: HAIKU.init(key, X), X, ["*linear_0/w", "*linear_1/w"], False),
    "plain": (MLP, lambda key: MLP.init(key, X)[0], X, "*/w", False),
}
RANK, ALPHA = 2, 3.0


def merged(base, adapters, is_turned):
    """The parameters of one network, W + a b at the adapters; the names are those of the keys."""
    paths, structure = jax.tree_util.tree_flatten_with_path(base)
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        for path, _ in paths
    ]
    leaves = []
    for name, (_, leaf) in zip(names, paths, strict=True):
        if name in adapters:
            change = jnp.tensordot(adapters[name]["a"], adapters[name]["b"], axes=1)
            change = change * ALPHA / RANK
            leaf = leaf + (change.T if is_turned else change).reshape(leaf.shape)
        leaves.append(leaf)
    assert {*adapters} <= {*names}
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_those_of_a_network_whose_arrays_are_summed(name):
    network, trained, inputs, targets, is_turned = CASES[name]
    base, given = de.as_member(network), trained(jax.random.key(7))
    member = de.models.lora(network, rank=RANK, targets=targets, alpha=ALPHA)
    shared = member.base_of(given)
    adapters, model_state = member.init(jax.random.key(1), inputs, shared)
    adapters = jax.tree.map(
        lambda leaf: RANDOM.normal(size=leaf.shape).astype(np.float32) / 3, adapters
    )
    key = jax.random.key(2)

    def outputs(adapters, train):
        return member.apply(adapters, model_state, inputs, key, train, shared=shared)[0]

    def by_hand(adapters, train):
        params = merged(shared[0], adapters, is_turned)
        return base.apply(params, model_state, inputs, key, train)[0]

    for train in (False, True):
        np.testing.assert_allclose(
            outputs(adapters, train), by_hand(adapters, train), rtol=2e-5, atol=2e-5
        )
        mine, expected = (
            jax.grad(lambda each, f=f, train=train: (f(each, train) ** 2).mean())(adapters)
            for f in (outputs, by_hand)
        )
        networks.assert_close_to_scale(mine, expected)


# Training

TRUNK = de.models.mlp((6,), 8, hidden_sizes=(8,))
HEAD = de.models.mlp((8,), CLASSES, hidden_sizes=(4,))
TRUNK_PARAMS = TRUNK.init(jax.random.key(3), X[:1])[0]
MLP_PARAMS = MLP.init(jax.random.key(4), X[:1])[0]
DATA = {"inputs": X, "labels": labels_of(X)}


def adapters(**options):
    member, objective = (
        de.models.lora(MLP, rank=RANK, targets="*/w", alpha=ALPHA),
        de.losses.categorical(CLASSES),
    )
    options = {"num_members": 4, "shared": MLP_PARAMS} | options
    return de.Ensemble(member, optax.sgd(0.1), objective, **options)


def heads(**options):
    member = de.models.heads(TRUNK, HEAD)
    objective = de.losses.categorical(CLASSES)
    optimizer, base = optax.sgd(0.1), TRUNK_PARAMS
    return de.Ensemble(member, optimizer, objective, num_members=4, shared=base, **options)


def priors(**options):
    member = de.models.with_prior(MLP, scale=3.0)
    objective = de.losses.categorical(CLASSES)
    return de.Ensemble(member, optax.sgd(0.1), objective, num_members=4, **options)


def own_losses(**options):
    """A loss function that is given the base, which the network's parameters are added to."""

    def loss_fn(params, model_state, batch, key, shared):
        summed = jax.tree.map(jnp.add, params, shared)
        logits = MLP.apply(summed, (), batch["inputs"], None, True)[0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), (model_state, {})

    def init(key, inputs):
        return jax.tree.map(jnp.zeros_like, MLP.init(key, inputs)[0]), ()

    member = de.as_member(init=init)
    options = {"num_members": 4, "shared": MLP_PARAMS} | options
    return de.Ensemble(member, optax.sgd(0.1), loss_fn, **options)


def forward_of(make, member_id):
    """The parameters and the forward pass of a member by hand."""
    key = jax.random.fold_in(member_key(np.uint32(0), member_id), INIT)
    if make is adapters:
        member = de.models.lora(MLP, rank=RANK, targets="*/w", alpha=ALPHA)
        params = member.init(key, jnp.zeros_like(X), (MLP_PARAMS, ()))[0]
        return params, lambda p, x: MLP.apply(merged(MLP_PARAMS, p, False), (), x, None, True)[0]
    if make is heads:
        features = TRUNK.apply(TRUNK_PARAMS, (), X, None, False)[0]
        params = HEAD.init(key, jnp.zeros_like(features))[0]
        return params, lambda p, x: HEAD.apply(p, (), features, None, True)[0]
    if make is priors:
        params, prior = (MLP.init(k, X)[0] for k in (key, jax.random.fold_in(key, 1)))
        of_prior = MLP.apply(prior, (), X, None, False)[0]
        return params, lambda p, x: MLP.apply(p, (), x, None, True)[0] + 3.0 * of_prior
    params = jax.tree.map(jnp.zeros_like, MLP_PARAMS)
    return params, lambda p, x: MLP.apply(jax.tree.map(jnp.add, p, MLP_PARAMS), (), x, None, True)[
        0
    ]


def by_hand(make, member_id, steps):
    params, forward = forward_of(make, member_id)

    def loss(params):
        logits = forward(params, X)
        return optax.softmax_cross_entropy_with_integer_labels(logits, DATA["labels"]).mean()

    gradient = jax.jit(jax.grad(loss))
    for _ in range(steps):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params))
    return params


MESHES = [(1, 1), (4, 1), (2, 2)]
EXECUTIONS = ["vmap", "unroll", "map", "chunk:2", "loop"]


@pytest.mark.parametrize("make", [adapters, heads, priors, own_losses])
def test_members_are_those_of_a_loop_by_hand(make):
    expected = [by_hand(make, member_id, steps=3) for member_id in range(4)]
    for mesh in MESHES:
        for execution in EXECUTIONS if mesh != (4, 1) else ["vmap"]:
            ensemble = make(layout=networks.layout_on(mesh, 4), execution=execution)
            state = ensemble.init(DATA)
            for _ in range(3):
                state, _ = ensemble.update(state, DATA)
            for position in range(4):
                found = networks.member_of(state.params, position)
                for a, b in zip(*map(jax.tree.leaves, (found, expected[position])), strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1, np.abs(b).max()))


RULES = [("shared/*/0/w", (None, "model")), ("0/w/b", (None, "model"))]


@pytest.mark.parametrize("rules", ["fsdp", RULES], ids=["fsdp", "rules"])
def test_the_base_is_divided_over_the_model_axis_as_the_layout_says(rules):
    base = MLP.init(jax.random.key(4), X)[0]
    layout = de.Layout.make(4, ensemble_axis=2, model_axis=2, model_rules=rules)
    ensemble = adapters(layout=layout)
    (first, second), _ = ensemble.shared.arrays
    specs = [tuple(layer["w"].sharding.spec) for layer in (first, second)]
    if rules == "fsdp":  # Along the longest axis that two devices divide.
        assert specs == [(None, "model"), ("model",)]
    else:  # No rule fits the others.
        assert specs == [(None, "model"), ()]
    state = ensemble.init(DATA)
    for _ in range(3):
        state, _ = ensemble.update(state, DATA)
    for position in range(4):
        expected = by_hand(adapters, position, steps=3)
        networks.assert_close_to_scale(networks.member_of(state.params, position), expected)
    assert_same(jax.tree.map(np.asarray, ensemble.shared.arrays[0]), base)


def test_devices_gather_a_divided_base_and_move_no_examples():
    mlp = de.models.mlp((64,), 8, hidden_sizes=(256, 256))
    layout = de.Layout.make(1, ensemble_axis=1, model_axis=4)
    ensemble = de.Ensemble(
        de.models.lora(mlp, rank=4),
        optax.sgd(0.1),
        de.losses.categorical(8),
        num_members=1,
        shared=mlp.init(jax.random.key(0), jnp.zeros((1, 64)))[0],
        layout=layout,
    )
    batch = {"inputs": np.zeros((64, 64), np.float32), "labels": np.zeros(64, np.int32)}
    placed = layout.put(jax.tree.map(lambda leaf: leaf[None], batch), BATCHES)
    program = dispatched(ensemble.programs.step, layout, Execution.parse("unroll"))
    state = ensemble.abstract_state(batch)
    text = program.lower(state, ensemble.programs.with_shared(placed)).compile().as_text()
    assert "all-gather(" in text
    assert "all-to-all(" not in text


def test_members_on_a_base_learn_in_microbatches_and_in_bfloat16():
    layout = networks.layout_on((1, 1), 4)
    whole, parts, rounded = (
        de.fit(adapters(layout=layout, **options), DATA, steps=3, batch_size=16, progress=False)
        for options in ({}, {"microbatches": 2}, {"compute_dtype": "bfloat16"})
    )
    networks.assert_close_to_scale(parts.state.params, whole.state.params)
    for a, b in zip(*map(jax.tree.leaves, (rounded.state.params, whole.state.params)), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=0.05)
    ensemble = adapters(layout=layout, compute_dtype="bfloat16")
    traced = ensemble.traced_update(whole.state, jax.tree.map(lambda leaf: leaf[None], DATA))
    products = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive is jax.lax.dot_general_p]
    assert {v.aval.dtype.name for eqn in products for v in eqn.invars} == {"bfloat16"}


@pytest.mark.parametrize("options", [{}, {"waves": 2}, {"execution": "chunk:2"}], ids=str)
def test_the_base_has_the_same_bits_after_a_training(options):
    base = jax.tree.map(np.array, MLP_PARAMS)
    ensemble = adapters(**options, layout=networks.layout_on((1, 1), 4))
    result = de.fit(ensemble, DATA, steps=100, batch_size=16, progress=False)
    assert_same(ensemble.shared.arrays[0], base)
    assert_same(MLP_PARAMS, base)
    expected = de.fit(adapters(), DATA, steps=100, batch_size=16, progress=False)
    networks.assert_close_to_scale(result.state.params, expected.state.params)
    found = ensemble.predict(result.state, X).mean
    np.testing.assert_allclose(found, adapters().predict(expected.state, X).mean, atol=1e-5)


# Cost


def compiled_step(ensemble, batch, execution):
    step = steps_of_all(ensemble.programs.step, ensemble.layout, Execution.parse(execution))
    batches = ensemble.programs.with_shared(Batches.shapes_of_step(batch))
    return jax.jit(step, donate_argnums=0).lower(ensemble.abstract_state(batch), batches)


@pytest.mark.parametrize("execution", ["vmap", "unroll", "chunk:4"])
def test_a_step_computes_the_trunk_once_for_all_members_of_a_device(execution):
    trunk = de.models.mlp((64,), 256, hidden_sizes=(256, 256))
    head = de.models.mlp((256,), 10, hidden_sizes=(32,))
    base = trunk.init(jax.random.key(0), jnp.zeros((1, 64)))[0]
    batch = {
        "inputs": jax.ShapeDtypeStruct((128, 64), jnp.float32),
        "labels": jax.ShapeDtypeStruct((128,), jnp.int32),
    }
    arguments = (optax.sgd(0.1), de.losses.categorical(10))
    options = {"num_members": 16, "layout": networks.layout_on((1, 1), 16)}
    with_trunk = de.Ensemble(de.models.heads(trunk, head), *arguments, shared=base, **options)
    lowered = compiled_step(with_trunk, batch, execution)
    mine = lowered.compile()
    features = batch | {"inputs": jax.ShapeDtypeStruct((128, 256), jnp.float32)}
    of_heads = compiled_step(de.Ensemble(head, *arguments, **options), features, "vmap").compile()
    forward = jax.jit(lambda params, x: trunk.apply(params, (), x, None, False)[0])
    of_trunk = forward.lower(base, batch["inputs"]).compile().cost_analysis()["flops"]
    # XLA counts the body of a loop once: 4 of 16 heads.
    part = 4 if execution == "chunk:4" else 1
    expected = of_trunk + of_heads.cost_analysis()["flops"] / part
    assert mine.cost_analysis()["flops"] == pytest.approx(expected, rel=0.02)
    if execution == "chunk:4":  # Inside the loop over chunks the trunk would count once as well.
        loop = lowered.as_text().partition("stablehlo.while")[2]
        assert "tensor<256x256xf32>" not in loop.partition(" do {")[2]
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(base)]
    both = sum(sizes) + of_heads.memory_analysis().argument_size_in_bytes
    assert mine.memory_analysis().argument_size_in_bytes <= both


class ConvTrunk(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Conv(16, (3, 3))(x)).mean(axis=(1, 2))


@pytest.mark.parametrize("execution", ["vmap", "unroll"])
def test_columns_share_the_examples_of_a_convolutional_trunk(execution):
    head = de.models.mlp((16,), CLASSES, hidden_sizes=())
    base = ConvTrunk().init(jax.random.key(0), IMAGES)
    layout = networks.layout_on((2, 2), 8)
    batch = {
        "inputs": jax.ShapeDtypeStruct((32, 16, 16, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((32,), jnp.int32),
    }
    base = ConvTrunk().init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    objective, member = de.losses.categorical(CLASSES), de.models.heads(ConvTrunk(), head)
    ensemble = de.Ensemble(
        member, optax.sgd(0.1), objective, num_members=8, layout=layout, shared=base
    )
    sharded = jax.tree.map(lambda leaf: leaf.update(sharding=layout.sharding(BATCH)), batch)
    compiled = compiled_step(ensemble, sharded, execution).compile()
    # A device has half of the examples. Along an axis, 16 windows have 3 * 16 - 2 inputs inside.
    trunk = 2 * 16 * (3 * 16 - 2) ** 2 * 3 * 16
    assert trunk < compiled.cost_analysis()["flops"] < 1.15 * trunk
    assert "all-gather(" not in compiled.as_text()


def test_a_plan_holds_no_arrays_of_the_base():
    experiment = Experiment.from_dict(dict(num_members=2, steps=1, data=dict(source="digits")))
    spec, count = describe_source(experiment.data)
    mlp = de.models.mlp(spec.input_shape, 10)
    base = mlp.init(jax.random.key(0), jnp.zeros((1, *spec.input_shape)))[0]
    parts = OwnParts(member=de.models.lora(mlp, rank=1), shared=base)
    planner = planner_of(
        Run(experiment, spec, count, "config.py"),
        parts,
        jax.devices()[:1],
        in_memory=True,
        are_cores=False,
        say=lambda line: None,
    )
    held = jax.tree.leaves(planner.make_ensemble(networks.layout_on((1, 1), 2)).shared)
    assert {type(leaf) for leaf in held} == {jax.ShapeDtypeStruct}
    planned = planner.plan_mesh(2, 1)
    assert planned.bytes_per_device["shared"] == sum(leaf.nbytes for leaf in jax.tree.leaves(base))


# Runs


def test_a_run_with_a_base_is_resumed_on_another_mesh_loaded_and_exported(tmp_path):
    options = {"steps": 6, "batch_size": 8, "progress": False, "steps_per_call": 1}
    one, other = (networks.layout_on(mesh, 4) for mesh in ((1, 1), (2, 2)))
    whole = de.fit(adapters(layout=one), DATA, **options)
    checkpoints = de.Checkpoints(tmp_path)
    de.fit(adapters(layout=one), DATA, **options | {"steps": 3}, checkpoints=checkpoints)
    resumed = de.fit(adapters(layout=other), DATA, **options, checkpoints=checkpoints)
    networks.assert_close_to_scale(resumed.state.params, whole.state.params)
    run = de.load(tmp_path, ensemble=adapters(layout=one))
    found = run.predict(X).mean
    np.testing.assert_allclose(found, adapters().predict(whole.state, X).mean, atol=1e-6)
    some = de.load(tmp_path, ensemble=adapters(layout=one), members=[2])
    np.testing.assert_allclose(some.predict(X).members[0], run.predict(X).members[2], atol=1e-6)
    # The base is in the folder once, and not in the members.
    base = de.from_file(tmp_path / "shared.safetensors", like=(MLP_PARAMS, ())).arrays
    assert_same(base[0], MLP_PARAMS)
    paths = export_members(tmp_path, tmp_path / "exported", member_ids=[2])
    arrays = load_file(paths[0])
    assert {*arrays} == {f"{n}/w.{part}" for n in (0, 1) for part in "ab"}
    np.testing.assert_array_equal(arrays["1/w.a"], resumed.state.params["1/w"]["a"][2])
    copy_members([tmp_path], tmp_path / "copy", member_ids=[1])
    assert (tmp_path / "copy" / "shared.safetensors").exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
import dist_ens as de, test_shared as here

def kill(info):
    if info.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints = de.Checkpoints(sys.argv[1], every_steps=2)
de.fit(here.adapters(layout=here.networks.layout_on((1, 1), 4)), here.DATA, steps=6, batch_size=8,
       steps_per_call=1, checkpoints=checkpoints, callbacks=[kill], progress=False)
"""


def test_a_run_with_a_base_whose_process_was_killed_ends_as_one_that_was_not(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    options = {"steps": 6, "batch_size": 8, "progress": False, "steps_per_call": 1}
    layout = networks.layout_on((1, 1), 4)
    resumed = de.fit(adapters(layout=layout), DATA, **options, checkpoints=de.Checkpoints(tmp_path))
    whole = de.fit(adapters(layout=layout), DATA, **options)
    assert_same(resumed.state.params, whole.state.params)


def test_another_base_than_that_of_the_run_is_refused(tmp_path):
    options = {"steps": 2, "batch_size": 8, "progress": False}
    checkpoints = de.Checkpoints(tmp_path / "run")
    np.savez(tmp_path / "base.npz", **{f"{n}.{k}": MLP_PARAMS[n][k] for n in (0, 1) for k in "bw"})
    base = de.from_file(tmp_path / "base.npz")
    de.fit(adapters().replace(shared=base), DATA, **options, checkpoints=checkpoints)
    assert not (tmp_path / "run" / "shared.safetensors").exists()
    record = json.loads((tmp_path / "run/checkpoints/2/manifest.json").read_text().split("\n")[0])
    assert record["run"]["shared_path"] == str(tmp_path / "base.npz")
    assert de.load(tmp_path / "run", ensemble=adapters()).step == 2
    others = jax.tree.map(lambda leaf: leaf + 1, MLP_PARAMS)
    changed = adapters().replace(shared=others)
    with pytest.raises(UserError, match="the digest of the shared arrays is .* there and .* here"):
        de.fit(changed, DATA, **options, checkpoints=checkpoints)
    with pytest.raises(UserError, match="the digest of the shared arrays"):
        de.load(tmp_path / "run", ensemble=changed)


def test_a_network_of_a_file_has_the_names_and_the_structure_asked_for(tmp_path):
    path = tmp_path / "net.safetensors"
    weights = {"model/layer.0.weight": np.ones((2, 3), np.float32), "other": np.zeros(1)}
    save_file(weights, path)
    nested = de.from_file(path).arrays
    assert nested["model"]["layer"][0]["weight"].shape == (2, 3)
    renamed = de.from_file(path, names={"model/layer.0.weight": "dense/kernel"}).arrays
    assert [*renamed] == ["dense"]
    with pytest.raises(UserError, match="names has none of the names"):
        de.from_file(path, names={"x": "y"})
    orbax = tmp_path / "orbax"
    ocp.StandardCheckpointer().save(orbax, {"dense": {"kernel": np.ones((2, 3), np.float32)}})
    wait_for(lambda: (orbax / "_METADATA").exists(), lambda: "no checkpoint")
    assert de.from_file(orbax).arrays["dense"]["kernel"].shape == (2, 3)


def test_two_networks_with_the_same_names_are_both_in_the_digest_and_in_the_file(tmp_path):
    def loss_fn(params, model_state, batch, key, shared):
        outputs = sum(batch["inputs"] @ each["w"] for each in shared)
        return ((outputs + params["b"] - 1) ** 2).mean(), (model_state, {})

    def ensemble(second):
        member = de.as_member(init=lambda key, inputs: ({"b": jnp.zeros(())}, ()))
        shared = ({"w": np.ones(6, np.float32)}, {"w": np.full(6, second, np.float32)})
        # A number has no axis, and another type than that of NumPy.
        shared[0]["scale"] = np.asarray(1.0, jnp.bfloat16)
        return de.Ensemble(member, optax.sgd(0.1), loss_fn, num_members=2, shared=shared)

    options = {"steps": 2, "batch_size": 8, "progress": False}
    checkpoints = de.Checkpoints(tmp_path)
    de.fit(ensemble(1), DATA, **options, checkpoints=checkpoints)
    kept = load_file(tmp_path / "shared.safetensors")
    assert {name: leaf.tolist() for name, leaf in kept.items()} == {
        "0.scale": 1.0,
        "0.w": [1.0] * 6,
        "1.w": [1.0] * 6,
    }
    with pytest.raises(UserError, match="the digest of the shared arrays"):
        de.fit(ensemble(2), DATA, **options, checkpoints=checkpoints)
    # With the consent of the user, the folder has the arrays that the newest members are on.
    anyway = de.Checkpoints(tmp_path, resume="anyway")
    de.fit(ensemble(2), DATA, **options | {"steps": 4}, checkpoints=anyway)
    assert load_file(tmp_path / "shared.safetensors")["1.w"].tolist() == [2.0] * 6


def test_a_step_of_ones_own_is_given_the_shared_arrays_wherever_it_is_called():
    base = {"w": np.full((6, 3), 0.5, np.float32)}

    def init(key, batch, shared):
        return {"b": jnp.zeros(shared["w"].shape[1])}

    def apply(state, inputs, shared):
        return inputs @ shared["w"] + state["b"][None]

    def step(state, batch, key, shared):
        error = apply(state, batch["inputs"], shared).mean(axis=0) - 1
        return {"b": state["b"] - 0.5 * error}, {"loss": (error**2).mean()}

    def eval_loss(state, batch, key, shared):
        error = apply(state, batch["inputs"], shared) - 1
        return (error**2).mean(), {}

    functions = {"init": init, "step": step, "apply": apply, "eval_loss": eval_loss}
    ensemble = de.Ensemble.from_step(**functions, num_members=2, shared=base)
    result = de.fit(ensemble, DATA, steps=1, batch_size=16, progress=False)
    by_hand = -0.5 * (X @ base["w"]).mean(axis=0) + 0.5
    np.testing.assert_allclose(result.state.params["b"][1], by_hand, atol=1e-6)
    expected = X @ base["w"] + by_hand
    np.testing.assert_allclose(ensemble.predict(result.state, X).members[0], expected, atol=1e-5)
    scores = de.evaluate(ensemble, result.state, DATA)
    assert scores.mean_member["loss"] == pytest.approx(((expected - 1) ** 2).mean(), rel=1e-5)


def test_adapters_keep_their_axes_where_training_uses_an_array_otherwise():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            w = self.param("w", nn.initializers.normal(), (6, 6))
            w = w * 1.0 if train else w
            return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))[:, :CLASSES]

    shared = de.as_member(Noisy()).init(jax.random.key(0), X)
    member = de.models.lora(Noisy(), rank=RANK)
    adapters, state = member.init(jax.random.key(1), X, shared)
    adapters = jax.tree.map(lambda leaf: RANDOM.normal(size=leaf.shape), adapters)
    found = [member.apply(adapters, state, X, None, train, shared=shared)[0] for train in (0, 1)]
    np.testing.assert_allclose(*found, rtol=1e-5)


CONFIG = """
import jax
import jax.numpy as jnp
import dist_ens as de

def get_config():
    return dict(num_members=2, steps=2, execution="loop", data=dict(source="digits", std=(16.0,)))

MLP = de.models.mlp((8, 8), 10, hidden_sizes=(8,))

def make_member(spec):
    return de.models.lora(MLP, rank=2)

def make_shared(spec):
    return MLP.init(jax.random.key({key}), jnp.zeros((1, 8, 8)))[0]
"""


@pytest.mark.long
def test_commands_work_on_a_run_with_a_base_and_refuse_another_base(tmp_path):
    configs = []
    for key in (7, 8):
        configs.append(f"--config={tmp_path / f'on_{key}.py'}")
        (tmp_path / f"on_{key}.py").write_text(CONFIG.format(key=key))
    own, other = configs
    run, workdir = tmp_path / "run", f"--workdir={tmp_path / 'run'}"
    exported = tmp_path / "exported"
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8)))
    files = [f"--input={tmp_path / 'x.npy'}", f"--output={tmp_path / 'p.npz'}"]
    for words in (
        ["plan", own],
        ["train", own, workdir],
        ["evaluate", own, workdir, "--shift"],
        ["predict", own, workdir, *files],
        ["replay", own, str(run), "--member=1"],
        ["members", str(run), "extend", "--ids=5", f"--to={tmp_path / 'more'}", own],
        ["members", str(run), "export", f"--to={exported}"],
        ["members", str(tmp_path / "new"), "import", str(exported), own],
    ):
        ended = dist_ens(*words)
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
    assert (tmp_path / "more" / "shared.safetensors").exists()
    assert (tmp_path / "new" / "shared.safetensors").exists()
    for words in (
        ["train", other, workdir],
        ["members", str(run), "extend", "--ids=6", f"--to={tmp_path / 'third'}", other],
        ["members", str(tmp_path / "fourth"), "import", str(exported), other],
    ):
        ended = dist_ens(*words)
        assert ended.returncode == 2, (words, ended.stdout, ended.stderr)
        assert "shared arrays" in ended.stderr


# Mistakes


def begin(member, shared=MLP_PARAMS, **options):
    objective = de.losses.categorical(CLASSES)
    de.Ensemble(member, optax.sgd(0.1), objective, num_members=2, shared=shared, **options).init(
        DATA
    )


def test_mistakes_are_told_where_they_are_made():
    with pytest.raises(UserError, match="'dense' fits no array .*: 0/w, 1/w"):
        begin(de.models.lora(MLP, 1, targets="dense"))
    with pytest.raises(UserError, match=r"rank is 9, and 0/w has the shape \[6, 8\].*at most 6"):
        begin(de.models.lora(MLP, 9))
    wider = de.models.mlp((6,), CLASSES, hidden_sizes=(9,))
    with pytest.raises(UserError, match=r"params\[0\]\['b'\] is \[8\] in shared, \[9\] in the"):
        begin(de.models.lora(wider, 1))
    with pytest.raises(UserError, match="has no shared arrays. Give Ensemble"):
        begin(de.models.heads(TRUNK, HEAD), shared=())
    with pytest.raises(UserError, match="targets is empty"):
        de.models.lora(MLP, 1, targets=[])
    with pytest.raises(UserError, match="heads takes a whole network .* is one on shared arrays"):
        de.models.heads(de.models.lora(MLP, 1), HEAD)
    with pytest.raises(UserError, match="batch_ensemble takes a whole network"):
        de.models.batch_ensemble(de.models.lora(MLP, 1), heads=2)
    with pytest.raises(UserError, match=r"Give a pytree of arrays, or dist_ens.from_file\(path\)"):
        begin(de.models.lora(MLP, 1), shared="base.safetensors")
    forgotten = adapters().replace(member=MLP)
    with pytest.raises(UserError, match="Nothing reads the shared arrays. Give"):
        de.fit(forgotten, DATA, steps=1, batch_size=8, progress=False)
    # Whole networks that begin as the base read it once.
    begun = de.as_member(init=lambda key, inputs, shared: (shared[0], ()), apply=MLP.apply)
    tuned = adapters().replace(member=begun)
    de.fit(tuned, DATA, steps=1, batch_size=8, progress=False)
    with pytest.raises(UserError, match="Argument 1 is donated, and its spec is 'shared'"):
        de.lift(
            lambda params, base: params,
            layout=networks.layout_on((1, 1), 2),
            in_specs=("members", "shared"),
            out_specs="members",
            donate_argnums=(0, 1),
        )
