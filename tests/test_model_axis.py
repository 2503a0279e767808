"""Members that several devices share: the same members, on parts of their arrays."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import dist_ens as de
from dist_ens.ensemble.update_steps import dispatched
from dist_ens.execution import loop
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import UserError
from dist_ens.layout import MEMBERS, to_host
from dist_ens.layout.rows import layout_of_row
from dist_ens.plan.collectives import collectives

NUM_MEMBERS, BATCH = 4, 16
random = np.random.default_rng(0)
IMAGES = {
    "inputs": random.normal(size=(BATCH, 8, 8, 4)).astype(np.float32),
    "labels": random.integers(0, 8, BATCH),
}
TOKENS = {
    "inputs": random.integers(0, 16, (BATCH, 8)),
    "labels": random.integers(0, 16, (BATCH, 8)),
}


class Dense(nn.Module):
    """Layers with statistics of the batch and dropout, which are those of the whole batch."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(32)(x.reshape(len(x), -1)))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(8)(nn.tanh(nn.Dense(16)(x)))


class Wide(nn.Module):
    """A network whose FLOPs are almost all those of its matrix products."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(3):
            x = nn.tanh(nn.Dense(256)(x))
        return nn.Dense(8)(x)


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(nn.tanh(nn.Conv(8, (3, 3), strides=2)(x)), (2, 2), (2, 2))
        return nn.Dense(8)(x.reshape(len(x), -1))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(256, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x.reshape(len(x), -1))))


class OfEquinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first, self.last = (
            eqx.nn.Linear(256, 16, key=keys[0]),
            eqx.nn.Linear(16, 8, key=keys[1]),
        )

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x.ravel())))


class NamedLinen(nn.Module):
    """The axes of its kernels have names."""

    @nn.compact
    def __call__(self, x):
        init = nn.linear.default_kernel_init
        columns, rows = (
            nn.with_partitioning(init, axes) for axes in ((None, "model"), ("model", "data"))
        )
        x = nn.tanh(nn.Dense(16, kernel_init=columns)(x.reshape(len(x), -1)))
        return nn.Dense(8, kernel_init=rows)(x)


class NamedNnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        columns, rows = (
            nnx.with_partitioning(init, axes) for axes in ((None, "model"), ("model", "data"))
        )
        self.first = nnx.Linear(256, 16, kernel_init=columns, rngs=rngs)
        self.last = nnx.Linear(16, 8, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x.reshape(len(x), -1))))


ATTENTION = de.models.transformer((8,), 16, num_blocks=1, width=16, num_heads=2, mlp_size=32)
NETWORKS = {
    "dense": (Dense(), IMAGES),
    "convolution": (Convolution(), IMAGES),
    "attention": (ATTENTION, TOKENS),
    "nnx": (OfNnx, IMAGES),
    "equinox": (OfEquinox, IMAGES),
    "named linen": (NamedLinen(), IMAGES),
    "named nnx": (NamedNnx, IMAGES),
}
ROWS = {
    "inputs": random.normal(size=(128, 256)).astype(np.float32),
    "labels": random.integers(0, 8, 128),
}
TENSOR = {
    "dense": [
        ("Dense_2/*", ()),
        ("Dense_0/kernel", (None, "model")),
        ("Dense_1/kernel", ("model",)),
    ],
    "convolution": [("Conv_*/kernel", (None, None, None, "model"))],
    "attention": [("*Dense_0/kernel", (None, "model")), ("*", ())],
    "nnx": [("first/kernel", (None, "model")), ("last/kernel", ("model",))],
    "equinox": [("first/weight", ("model",)), ("last/weight", (None, "model"))],
    "named linen": "tensor",
    "named nnx": "tensor",
}
MESHES = [(name, (2, 2)) for name in NETWORKS] + [("dense", (1, 4)), ("dense", (4, 2))]
NETWORKS["wide"] = (Wide(), ROWS)
TENSOR["wide"] = [
    ("Dense_[02]/kernel", (None, "model")),
    ("Dense_[13]/kernel", ("model",)),
    ("Dense_[02]/bias", ("model",)),
]


def ensemble_of(name, layout, optimizer=None, **options):
    network, batch = NETWORKS[name]
    num_classes = 16 if batch is TOKENS else 8
    return de.Ensemble(
        network,
        optimizer or optax.sgd(0.1, momentum=0.9),
        de.losses.categorical(num_classes),
        num_members=NUM_MEMBERS,
        layout=layout,
        **options,
    )


def divided(name, rows=2, model_axis=2, rules="fsdp"):
    rules = TENSOR[name] if rules == "tensor" else rules
    return de.Layout.make(NUM_MEMBERS, ensemble_axis=rows, model_axis=model_axis, model_rules=rules)


def trained(ensemble, batch, steps=3):
    state = ensemble.init(batch)
    for _ in range(steps):
        state, metrics = ensemble.update(state, batch)
    return state, metrics


@pytest.fixture(scope="module")
def alone():
    """Results on one device, by the name of a network."""
    layout = de.Layout.make(NUM_MEMBERS, devices=jax.devices()[:1])
    found = {}

    def of(name):
        if name not in found:
            batch = NETWORKS[name][1]
            ensemble = ensemble_of(name, layout)
            state, metrics = trained(ensemble, batch)
            found[name] = to_host((state, metrics, ensemble.predict(state, batch["inputs"])))
        return found[name]

    return of


@pytest.mark.parametrize("rules", ["fsdp", "tensor"])
@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_members_that_share_devices_are_those_of_one_device(alone, name, rules, mesh):
    layout, batch = divided(name, *mesh, rules), NETWORKS[name][1]
    ensemble = ensemble_of(name, layout)
    state, metrics = trained(ensemble, batch)
    prediction = ensemble.predict(state, batch["inputs"])
    expected_state, expected_metrics, expected_prediction = alone(name)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6, atol=1e-6)
    for of_all, of_one in zip(
        jax.tree.leaves((to_host(state.params), to_host(state.model_state))),
        jax.tree.leaves((expected_state.params, expected_state.model_state)),
        strict=True,
    ):
        # The bias of attention's keys has no gradient, so that it holds rounding errors alone.
        size = max(np.abs(of_one).max(), 1e-2)
        np.testing.assert_allclose(of_all, of_one, rtol=0, atol=1e-5 * size)
    for of_all, of_one in zip(
        jax.tree.leaves(to_host(prediction)), jax.tree.leaves(expected_prediction), strict=True
    ):
        np.testing.assert_allclose(of_all, of_one, atol=1e-5)


def shardings_of(state):
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("named linen", ["Dense_0", "Dense_1"]), ("named nnx", ["first", "last"])],
)
def test_the_metadata_of_a_network_says_how_it_is_divided(name, kernels):
    state = ensemble_of(name, divided(name, rules="tensor"), optax.adam(1e-3)).init(IMAGES)
    moments = state.opt_state[0].mu
    for params in (state.params, moments):
        found = [jax.tree.leaves(params[each]["kernel"])[0].sharding.spec for each in kernels]
        assert found == [P("ensemble", None, "model"), P("ensemble", "model")]
        assert {jax.tree.leaves(params[each]["bias"])[0].sharding.spec for each in kernels} == {
            P("ensemble")
        }


class OfNames(eqx.Module):
    """An array of the user's own may be called `value`, as that of a variable of Flax."""

    value: jax.Array

    def __init__(self, key):
        self.value = jax.random.normal(key, (256, 8)) / 16

    def __call__(self, x):
        return x.ravel() @ self.value


def test_only_the_array_of_a_flax_variable_has_no_name_of_its_own():
    layout = divided("dense", rules=[("value", (None, "model"))])
    ensemble = ensemble_of("dense", layout).replace(member=OfNames)
    assert ensemble.init(IMAGES).params.value.sharding.spec == P("ensemble", None, "model")


class NamedStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        init = nn.with_partitioning(lambda: jnp.zeros(8), (("data", "model"),))
        mean = self.variable("batch_stats", "mean", init)
        kernel = nn.with_partitioning(nn.linear.default_kernel_init, (None, ("data", "model")))
        x = nn.Dense(8, kernel_init=kernel)(x.reshape(len(x), -1))
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return x - mean.value[None]


@pytest.mark.parametrize("rules", ["fsdp", "tensor"])
def test_statistics_may_have_metadata_too(rules):
    layout = divided("named linen", rules=rules)
    ensemble = ensemble_of("named linen", layout)
    state, metrics = trained(ensemble.replace(member=NamedStatistics()), IMAGES)
    assert state.params["Dense_0"]["kernel"].value.sharding.spec[-1] == "model"
    assert np.isfinite(metrics["loss"]).all()


@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2)])
def test_a_network_with_metadata_needs_no_model_axis(alone, mesh):
    rows, columns = mesh
    devices = jax.devices()[: rows * columns]
    layout = de.Layout.make(NUM_MEMBERS, ensemble_axis=rows, devices=devices)
    network = NamedLinen()

    def loss_fn(params, model_state, batch, key):
        outputs = network.apply({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
        return losses.mean(), (model_state, {})

    optimizer = optax.sgd(0.1, momentum=0.9)
    for loss in (loss_fn, de.losses.categorical(8)):
        ensemble = de.Ensemble(network, optimizer, loss, num_members=NUM_MEMBERS, layout=layout)
        _, metrics = trained(ensemble, IMAGES)
        np.testing.assert_allclose(metrics["loss"], alone("named linen")[1]["loss"], rtol=1e-5)
    _, metrics = trained(ensemble_of("named nnx", layout), IMAGES)
    np.testing.assert_allclose(metrics["loss"], alone("named nnx")[1]["loss"], rtol=1e-5)


@pytest.mark.parametrize("rules", ["fsdp", "tensor"])
def test_a_state_keeps_its_parts_through_a_step_a_prediction_and_a_file(rules, tmp_path):
    layout = divided("dense", rules=rules)
    ensemble = ensemble_of("dense", layout, optax.adam(1e-3))
    state = ensemble.init(IMAGES)
    before = shardings_of(state)
    kernel = "Dense_0"
    assert state.params[kernel]["kernel"].sharding.shard_shape((4, 256, 32))[0] == 2
    # A moment of Adam is divided as its parameter is.
    moment = state.opt_state[0].mu[kernel]["kernel"]
    assert moment.sharding == state.params[kernel]["kernel"].sharding
    state, _ = ensemble.update(state, IMAGES)
    ensemble.predict(state, IMAGES["inputs"])
    assert shardings_of(state) == before
    options = {"steps": 2, "batch_size": BATCH, "progress": False}
    result = de.fit(ensemble, IMAGES, checkpoints=de.Checkpoints(str(tmp_path)), **options)
    loaded = de.load(tmp_path, ensemble=ensemble)
    assert shardings_of(result.state) == shardings_of(loaded.state)
    assert shardings_of(loaded.state) == before


@pytest.mark.parametrize("model_axis", [1, 2])
def test_the_only_member_of_a_row_is_updated_where_it_is(model_axis, alone, monkeypatch):
    # As on accelerators, where this saves a copy of the state.
    monkeypatch.setattr(loop, "takes_states", lambda layout: layout.members_per_device > 1)
    monkeypatch.setattr(loop, "_taken", None)
    batch, devices = NETWORKS["dense"][1], jax.devices()[: 4 * model_axis]
    layout = de.Layout.make(NUM_MEMBERS, ensemble_axis=4, model_axis=model_axis, devices=devices)
    ensemble = ensemble_of("dense", layout, execution="loop")
    begun = ensemble.init(batch)
    before = shardings_of(begun)
    state, metrics = ensemble.update(begun, batch)
    assert shardings_of(state) == before
    for _ in range(2):
        state, metrics = ensemble.update(state, batch)
    np.testing.assert_allclose(metrics["loss"], alone("dense")[1]["loss"], rtol=1e-6)


def test_a_step_returns_the_parts_of_a_state_and_not_the_whole():
    layout = divided("dense")
    state = ensemble_of("dense", layout).abstract_state(IMAGES)
    alone = layout.leaf_specs(MEMBERS, state)
    assert P("ensemble", "model") in alone
    loss = jax.ShapeDtypeStruct((NUM_MEMBERS,), np.float32)
    assert layout.leaf_specs(MEMBERS, (state, {"loss": loss})) == [*alone, P("ensemble")]


@pytest.mark.parametrize("model_axis", [2, 4])
def test_a_device_holds_its_part_of_a_member(model_axis):
    def bytes_of(layout):
        state = ensemble_of("dense", layout, optax.adam(1e-3)).abstract_state(IMAGES)
        arrays = jax.tree.leaves((state.params, state.opt_state))
        return sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            for leaf in arrays
        )

    rows = 2
    whole = bytes_of(de.Layout.make(NUM_MEMBERS, ensemble_axis=rows))
    part = bytes_of(divided("dense", rows, model_axis))
    assert whole / part >= 0.9 * model_axis


@pytest.mark.parametrize("mesh", [(2, 2), (2, 1), (1, 1), (1, 4), (4, 1)])
def test_a_saved_state_has_the_same_bits_on_another_mesh(mesh, tmp_path):
    ensemble = ensemble_of("dense", divided("dense"))
    options = {"steps": 3, "batch_size": BATCH, "progress": False}
    result = de.fit(ensemble, IMAGES, checkpoints=de.Checkpoints(str(tmp_path)), **options)
    loaded = de.load(tmp_path, ensemble=ensemble_of("dense", divided("dense", *mesh)))
    jax.tree.map(
        np.testing.assert_array_equal,
        to_host(loaded.state.params),
        to_host(result.state.params),
    )


def test_a_run_that_is_resumed_has_the_bits_of_one_never_stopped(tmp_path):
    options = {"batch_size": 8, "progress": False, "eval_data": IMAGES, "eval_every": 2}
    ensemble = ensemble_of("dense", divided("dense"))
    whole = de.fit(ensemble, IMAGES, steps=6, **options)
    assert whole.ensemble.execution == "loop"
    for steps in (2, 6):
        kept = de.Checkpoints(str(tmp_path))
        result = de.fit(ensemble, IMAGES, steps=steps, checkpoints=kept, **options)
    jax.tree.map(
        np.testing.assert_array_equal, to_host(result.state.params), to_host(whole.state.params)
    )
    alone = ensemble_of("dense", de.Layout.make(NUM_MEMBERS, devices=jax.devices()[:1]))
    expected = de.fit(alone, IMAGES, steps=6, **options)
    assert result.scores.ensemble["nll"] == pytest.approx(expected.scores.ensemble["nll"], rel=1e-5)


def compiled_row(name, layout):
    """The compiled update of one member on the first row, and the row's layout."""
    row, batch = layout_of_row(layout, 0, num_members=1), NETWORKS[name][1]
    ensemble = ensemble_of(name, layout).replace(layout=row, num_members=1, execution="loop")
    update = dispatched(ensemble.programs.step, row, Execution.parse("unroll"))
    batches = {key: jnp.asarray(leaf)[None] for key, leaf in batch.items()}
    placed = row.put(batches, jax.P(None, "data"))
    return update.lower(ensemble.init(batch), placed).compile(), row, ensemble


def test_with_fsdp_the_parameters_are_gathered_for_each_pass_that_needs_them():
    compiled, row, _ = compiled_row("wide", divided("wide", 2, 4))
    found = collectives(compiled.as_text(), row.mesh.device_ids)
    gathered = sum(each.bytes for each in found if each.kind == "all-gather")
    assert {each.axis for each in found} == {"model"}
    kernels, biases = 3 * 256 * 256 + 256 * 8, 3 * 256 + 8
    # The backward pass needs no bias, and the inputs of the first layer have no gradient.
    assert gathered == 4 * (2 * kernels - 256 * 256 + biases)


def test_with_tensor_rules_no_parameter_is_gathered():
    compiled, row, _ = compiled_row("dense", divided("dense", 1, 4, "tensor"))
    found = collectives(compiled.as_text(), row.mesh.device_ids)
    kernel = 4 * 256 * 32
    assert not [each for each in found if each.kind == "all-gather" and each.bytes >= kernel]
    assert {each.axis for each in found} <= {"data", "model", "data+model"}


@pytest.mark.parametrize("rules", ["fsdp", "tensor"])
def test_the_devices_of_a_row_share_the_work_of_a_member(rules):
    alone = de.Layout.make(NUM_MEMBERS, ensemble_axis=4, devices=jax.devices()[:4])
    whole, *_ = compiled_row("wide", alone)
    part, row, _ = compiled_row("wide", divided("wide", 2, 2, rules))
    assert row.mesh.shape == {"ensemble": 1, "data": 2, "model": 2}
    flops = part.cost_analysis()["flops"] * row.mesh.size
    assert flops == pytest.approx(whole.cost_analysis()["flops"], rel=0.02)


def test_parameters_of_numpy_and_whole_ones_on_the_mesh_are_divided():
    layout = divided("dense")
    ensemble = ensemble_of("dense", layout)
    state = ensemble.init(IMAGES)
    before = shardings_of(state)
    expected = to_host(ensemble.update(ensemble.init(IMAGES), IMAGES)[0].params)
    whole = jax.device_put(state.params, layout.sharding(jax.P("ensemble")))
    for params in (to_host(state.params), whole):
        given = ensemble.init(IMAGES)._replace(params=params)
        ensemble.predict(given, IMAGES["inputs"])
        updated, _ = ensemble.update(given, IMAGES)
        assert shardings_of(updated) == before
        jax.tree.map(np.testing.assert_array_equal, to_host(updated.params), expected)


def test_some_members_stay_divided():
    ensemble = ensemble_of("dense", divided("dense"))
    state = ensemble.init(IMAGES)
    two, of_two = ensemble.at(state.select([1, 3]))
    assert two.layout.model_axis == 2
    kernel = of_two.params["Dense_0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[1] == 128
    of_all = to_host(ensemble.apply(state, IMAGES["inputs"]))
    np.testing.assert_allclose(two.apply(of_two, IMAGES["inputs"]), of_all[[1, 3]], atol=1e-6)


def test_a_loss_function_and_a_step_of_ones_own_take_divided_members():
    def loss_fn(params, model_state, batch, key):
        outputs = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return ((outputs - batch["y"]) ** 2).mean(), (model_state, {"size": (outputs**2).mean()})

    def init(key, inputs):
        keys = jax.random.split(key)
        return {
            "w": jax.random.normal(keys[0], (4, 8)),
            "v": jax.random.normal(keys[1], (8, 2)),
        }, ()

    def apply(params, model_state, inputs, key, train):
        return jnp.tanh(inputs @ params["w"]) @ params["v"], model_state

    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}
    found = []
    for layout in (de.Layout.make(4, devices=jax.devices()[:1]), divided("dense")):
        ensemble = de.Ensemble(
            (init, apply), optax.adam(0.1), loss_fn, num_members=4, layout=layout
        )
        result = de.fit(ensemble, batch, steps=3, batch_size=8, eval_data=batch, progress=False)
        found.append(result.scores.mean_member)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model_axis": 3}, "model_axis=3 for 8 devices"),
        ({"model_axis": 2, "ensemble_axis": 8}, "Use ensemble_axis=1 or 2 or 4"),
        ({"model_axis": 2, "model_rules": "zero"}, "model_rules is 'zero'"),
        ({"model_axis": 2, "model_rules": [("*", ("data",))]}, r"the axes \('data',\)"),
        ({"model_axis": 2, "model_rules": [("*", "model")]}, "a tuple of axes"),
    ],
)
def test_a_layout_says_which_axis_or_rule_does_not_fit(options, told):
    with pytest.raises(UserError, match=told):
        de.Layout.make(8, **options)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([("Densee/*", ("model",))], "fits no parameter: Dense_0/kernel"),
        (
            [("Dense_0/bias", (None, "model"))],
            r"has 2 axes, and Dense_0/bias has the shape \[32\]",
        ),
        ([("*", ())], "No parameter is divided over the model axis of 2"),
        ("metadata", "Name 'model' in the metadata, by flax.linen.with_partitioning"),
        ([("*/bias", (None, "model", None))], r"has 3 axes, and \S+ has the shape \[\d+\]"),
    ],
)
def test_rules_that_do_not_fit_the_network_are_told_with_its_parameters(rules, told):
    rules = "tensor" if rules == "metadata" else rules
    layout = de.Layout.make(NUM_MEMBERS, model_axis=2, model_rules=rules)
    with pytest.raises(UserError, match=told):
        ensemble_of("dense", layout).init(IMAGES)


@pytest.mark.parametrize("options", [{"execution": "vmap"}, {"execution": "chunk:2"}, {"waves": 2}])
def test_divided_members_are_taken_one_after_another(options):
    with pytest.raises(UserError, match="one member after another"):
        ensemble_of("dense", divided("dense"), **options)
