"""The compiled update of every shipped config, read from its HLO."""

import dataclasses
import functools
import itertools
import math
import pathlib
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import networks
from dist_ens.data import Spec
from dist_ens.data.feed import Placement, abstract_batches
from dist_ens.execution.heuristics import candidates
from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.layout import BATCH, Layout
from dist_ens.members import from_linen
from dist_ens.plan import Collective, collectives
from marked import long

pytestmark = pytest.mark.quick
CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))
SPECS = {
    "digits": Spec((8, 8), "float32", (), 10),
    "mnist_mlp": Spec((28, 28), "uint8", (), 10),
    "mnist_bn_dropout": Spec((28, 28), "uint8", (), 10),
    "mnist_lenet": Spec((28, 28), "uint8", (), 10),
    "cifar_resnet": Spec((32, 32, 3), "uint8", (), 10),
    "charlm": Spec((128,), "int32", (128,), 65),
    "table": Spec((13,), "float32", (), None),
    "uci": Spec((13,), "float32", (), None, num_groups=20),
}
SLOW = {"mnist_bn_dropout", "mnist_lenet", "cifar_resnet", "charlm"}  # seconds to compile


def compiled_update(config, num_members, rows, columns, batch_size, place=Placement.REPLICATED):
    """The update of a shipped config, compiled without a batch; its execution; and its state."""
    experiment = Experiment.from_dict(runpy.run_path(str(config))["get_config"]().to_dict())
    spec = SPECS[config.stem]
    layout = networks.layout_on((rows, columns), num_members)
    run = Run(experiment, spec, 1000)
    ensemble = build_ensemble(run, layout)
    state = ensemble.abstract_state(run.batch(batch_size // columns))
    batches = abstract_batches(
        layout,
        spec.example,
        experiment.steps_per_call,
        batch_size,
        place,
        order=dataclasses.replace(run.order, global_batch_size=batch_size),
        per_member=run.order_rule.per_member,
    )
    traced = ensemble.traced_update(state, batches)
    by_rule = candidates(layout, traced, experiment.steps_per_call)[0]
    ensemble = ensemble.replace(execution=by_rule)
    return ensemble.update_steps.lower(state, batches).compile(), by_rule, state


@functools.cache
def flops_of_one(config, batch_size, place):
    """Of one member alone, on one device."""
    compiled, *_ = compiled_update(config, 1, 1, 1, batch_size, place)
    return compiled.cost_analysis()["flops"]


def bytes_of_one(tree):
    """Of one member's part of a pytree."""
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ids(rows, columns):
    return np.arange(rows * columns).reshape(rows, columns)


def kinds_and_axes(hlo, rows, columns):
    return [(each.kind, each.axis) for each in collectives(hlo, ids(rows, columns))]


def test_every_shipped_config_is_read():
    assert {c.stem for c in CONFIGS} == set(SPECS)


MESHES = [(8, 1, Placement.REPLICATED), (4, 2, Placement.REPLICATED), (4, 2, Placement.STREAMED)]
MORE_MESHES = [(2, 2, Placement.STREAMED), (1, 4, Placement.REPLICATED)]


def cases():
    for config, (rows, columns, place) in itertools.product(CONFIGS, [*MESHES, *MORE_MESHES]):
        is_slow, name = config.stem in SLOW, f"{config.stem}-{rows}-{columns}-{place.name}"
        marks = [pytest.mark.slow] if is_slow else []
        if is_slow and ((rows, columns, place) != MESHES[1] or config.stem == "cifar_resnet"):
            marks.append(pytest.mark.long)
        if not is_slow or (rows, columns, place) in MESHES:
            yield pytest.param(config, rows, columns, place, marks=marks, id=name)


@pytest.mark.parametrize(("config", "rows", "columns", "place"), [*cases()])
def test_members_do_not_talk_and_cost_what_one_costs(config, rows, columns, place):
    # A device of every mesh has the same part: one program to compare. Of the smallest network as
    # many as its config says, for what 8 cost there is not much more than to draw them.
    # The optimizer of a small network costs much beside a few examples.
    batch_size = (100 if config.stem in ("table", "uci") else 8) * columns
    compiled, execution, state = compiled_update(config, 8, rows, columns, batch_size, place)
    text = compiled.as_text()
    assert text.startswith("HloModule jit_update,")
    assert "input_output_alias" in text.splitlines()[0]
    found = collectives(text, ids(rows, columns))
    # XLA counts the steps of a scan once, and those members once that are mapped.
    counted = 1 if execution.startswith("map") else 8 // rows
    sent = sum(each.bytes for each in found)
    if columns == 1:
        assert not found
    else:
        # Nothing of the batch is gathered. What is summed are the gradients, the loss and the
        # accuracy or the like, and two sums of each feature of a BatchNorm in the forward pass and
        # one or two in the backward pass: others are gradients of its scale and its bias.
        assert {(each.kind, each.axis) for each in found} == {("all-reduce", "data")}
        gradients, statistics = map(bytes_of_one, (state.params, state.model_state))
        expected = gradients + 2 * statistics + 2 * 4
        assert sent / counted == pytest.approx(expected, rel=0.02)
    # With as many examples as a device of the mesh has. XLA counts an addition for each number of
    # an all-reduce. Members of one device may draw their examples once for all of them.
    flops = compiled.cost_analysis()["flops"] - sent / 4
    of_one = flops_of_one(config, batch_size // columns, place)
    least = 0.98 if place is Placement.STREAMED else 0.9
    assert least <= flops / (counted * of_one) <= 1.02


class Convolutional(nn.Module):
    """Convolutions, BatchNorm, dropout and max-pooling, smooth so that rounding stays small."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.tanh(x))
        x = nn.Conv(20, (3, 3), strides=2)(nn.max_pool(x, (2, 2), (2, 2)))
        return nn.Dense(networks.CLASSES)(nn.tanh(x).reshape(len(x), -1))


def convolutional():
    return from_linen(Convolutional()), jax.ShapeDtypeStruct((16, 12, 12, 3), jnp.float32), ()


def small_update(network, execution, mesh):
    """The ensemble of four small members, its state, and the batches of a call."""
    options = {"execution": execution, "failure_policy": "skip"}
    layout = networks.layout_on(mesh, 4)
    ensemble, state, batches = networks.program(network, layout, **options)
    return ensemble, ensemble.with_record(state), batches


@functools.cache
def on_one_device(network):
    ensemble, state, batches = small_update(network, "unroll", (1, 1))
    return jax.device_get(ensemble.update_steps(state, batches))


CONVOLVING = ["vmap", "chunk:2+masks", "map+aligned+scanned", "map+patches+unrolled"]
MORE = ["vmap+apart+masks", "unroll+flat", "vmap+patches+masks", "vmap+canonical"]
ATTENDING = ["unroll+aligned", "map", "vmap+unrolled"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "execution", "mesh"),
    [
        *((convolutional, execution, (2, 2)) for execution in CONVOLVING),
        *((networks.transformer, execution, (2, 2)) for execution in ("vmap+flat", "chunk:2")),
        (convolutional, "map+canonical+masks", (1, 4)),
        *long(*((convolutional, execution, (2, 2)) for execution in MORE)),
        *long(*((networks.transformer, execution, (2, 2)) for execution in ATTENDING)),
        *long((convolutional, "vmap", (1, 4)), (networks.transformer, "vmap+flat", (1, 4))),
    ],
)
def test_every_execution_divides_the_batch(network, execution, mesh):
    ensemble, state, batches = small_update(network, execution, mesh)
    program = ensemble.update_steps.lower(state, batches).compile()
    assert set(kinds_and_axes(program.as_text(), *mesh)) == {("all-reduce", "data")}
    (found, metrics), (expected, losses) = program(state, batches), on_one_device(network)
    np.testing.assert_allclose(metrics["loss"], losses["loss"], rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6),
        (found.params, found.model_state),
        (expected.params, expected.model_state),
    )


def test_the_outputs_of_a_divided_batch_are_not_gathered():
    ensemble, state, batches = small_update(convolutional, "vmap", (2, 2))
    inputs = jax.ShapeDtypeStruct(
        batches["inputs"].shape[1:], jnp.float32, sharding=ensemble.layout.sharding(BATCH)
    )
    assert not kinds_and_axes(ensemble.outputs.lower(state, inputs).compile().as_text(), 2, 2)


def test_a_program_whose_members_talk_is_caught():
    layout = Layout.make(8, ensemble_axis=4)
    together = jax.jit(
        layout.shard_map(
            lambda x: jax.lax.pmean(x, "ensemble"),
            in_specs=jax.P("ensemble", "data"),
            out_specs=jax.P(None, "data"),
        )
    )
    text = together.lower(jax.ShapeDtypeStruct((8, 2), np.float32)).compile().as_text()
    assert ("all-reduce", "ensemble") in kinds_and_axes(text, 4, 2)


@pytest.mark.parametrize(
    ("devices", "axis"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "data"),
        ("{{0,2,4,6},{1,3,5,7}}", "ensemble"),
        ("[4,2]<=[8]", "data"),
        ("[2,4]<=[4,2]T(1,0)", "ensemble"),
        ("mesh['ensemble'=4,'data'=2] {'data'}", "data"),
        ("mesh['ensemble'=4,'data'=2] {'ensemble'}", "ensemble"),
        ("{}", "both"),
    ],
)
def test_every_way_of_writing_the_devices_is_read(devices, axis):
    line = f"%r = (f32[2], f32[3]) all-reduce(%a, %b), channel_id=1, replica_groups={devices}, x"
    assert kinds_and_axes(line, 4, 2) == [("all-reduce", axis)]
    with pytest.raises(ValueError, match="unknown"):
        collectives("%r = f32[2] all-reduce(%a), replica_groups=?", ids(4, 2))


F32 = "f32[8,128]{1,0:T(8,128)S(1)}"  # 8 * 128 * 4 bytes = 4096, with the tiles of a TPU


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (f"{F32} all-reduce(%a)", 4096),
        (f"({F32}, /*index=1*/bf16[3,5]{{1,0:T(8,128)(2,1)}}) all-reduce(%a, %b)", 4096 + 30),
        (f"({F32}, pred[7]{{0}}) all-reduce-start(%a, %b)", 4096 + 7),
        (f"(f32[4,128]{{1,0}}, {F32}) all-gather-start(%a)", 4096),
        (f"((f32[9]{{0}}, f32[9]{{0}}), ({F32}, s4[6]{{0}})) all-gather-start(%a)", 4096 + 3),
        (f"({F32}, {F32}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%a)", 4096),
        (f"((f32[16,128]{{1,0}}), {F32}) reduce-scatter-start(%a)", 4096),
        ("f32[] all-reduce(%a)", 4),
        ("f32[0,8] all-reduce(%a)", 0),
    ],
)
def test_the_bytes_of_a_collective_are_those_of_its_result(operation, size):
    (found,) = collectives(f"  %r.1 = {operation}, replica_groups={{{{0,1}},{{2,3}}}}", ids(4, 2))
    assert found.bytes == size


# As XLA:TPU has hosts carry a gradient of 96 * 128 numbers from slice to slice, shortened.
SENT = (
    "%s = (f32[12,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) send(%a, %b), channel_id=2, "
    "frontend_attributes={{_xla_megascale_target={target},_xla_megascale_transfer_type={kind}}}"
)
FOUR_SLICES = 100_000 * np.arange(1, 5)[:, None] + np.arange(2)


@pytest.mark.parametrize(
    ("target", "rows", "axis"),
    [
        ('"{1,2,3,4}x{0:1}"', 1, "data"),
        ('"{1,2,3,4}x{0:1}"', 4, "ensemble"),
        ('"{3,4}x{1}"', 1, "data"),
        ("{{100000,200000},{100001,200001},{300000,400000},{300001,400001}}", 2, "data"),
        ("{{100000,300000},{100001,300001}}", 2, "ensemble"),
        ("{{100000,300001}}", 2, "both"),
    ],
)
def test_what_hosts_carry_between_slices_is_a_collective(target, rows, axis):
    line = SENT.format(target=target, kind='"ALL_REDUCE"')
    (found,) = collectives(line, FOUR_SLICES.reshape(rows, -1))
    assert found == Collective("all-reduce", axis, 4 * 96 * 128)
    with pytest.raises(ValueError, match="unknown"):
        collectives(line.replace("_target", "_targets"), FOUR_SLICES)


def test_an_asynchronous_collective_counts_once():
    pair = f"""
      %s = ({F32}, {F32}) all-gather-start(%a), replica_groups=[4,2]<=[8], dimensions={{0}}
      %d = {F32} all-gather-done(%s)
    """
    assert kinds_and_axes(pair, 4, 2) == [("all-gather", "data")]
    # As XLA:TPU writes one fused with what it overlaps: three computations of one chain.
    part = f"%g = {F32} all-gather(%a), replica_groups=[4,2]<=[8], frontend_attributes={{chain_id="
    fused = "\n".join(f'{part}"{chain}"}}' for chain in (0, 0, 0, 1))
    assert len(collectives(fused, ids(4, 2))) == 2
