"""The compiled update of every shipped config, read from its HLO."""

import dataclasses
import functools
import pathlib
import runpy

import jax
import numpy as np
import pytest

from dist_ens.config import Experiment
from dist_ens.data import Spec
from dist_ens.execution.heuristics import candidates
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.feed import Placement, abstract_batches
from dist_ens.layout import Layout
from dist_ens.plan import Collective, collectives

pytestmark = pytest.mark.quick
CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))
SPECS = {
    "digits": Spec((8, 8), "float32", (), 10),
    "mnist_mlp": Spec((28, 28), "uint8", (), 10),
    "mnist_bn_dropout": Spec((28, 28), "uint8", (), 10),
    "mnist_lenet": Spec((28, 28), "uint8", (), 10),
    "cifar_resnet": Spec((32, 32, 3), "uint8", (), 10),
    "charlm": Spec((128,), "int32", (128,), 65),
    "uci": Spec((13,), "float32", (), None, num_groups=20),
}
SLOW = {"mnist_bn_dropout", "mnist_lenet", "cifar_resnet", "charlm"}  # seconds to compile


def compiled_update(config, num_members, rows, columns, batch_size, place=Placement.REPLICATED):
    """The update of a shipped config, compiled without a batch; and its execution."""
    experiment = Experiment.from_dict(runpy.run_path(str(config))["get_config"]().to_dict())
    spec = SPECS[config.stem]
    layout = Layout.make(num_members, ensemble_axis=rows, devices=jax.devices()[: rows * columns])
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
        per_member=run.per_member,
    )
    traced = ensemble.traced_update(state, batches)
    by_rule = candidates(layout, traced, experiment.steps_per_call)[0]
    ensemble = dataclasses.replace(ensemble, execution=by_rule)
    return ensemble.update_steps.lower(state, batches).compile(), by_rule


@functools.cache
def flops_of_one(config, batch_size, place):
    """Of one member alone, on one device."""
    compiled, _ = compiled_update(config, 1, 1, 1, batch_size, place)
    return compiled.cost_analysis()["flops"]


def ids(rows, columns):
    return np.arange(rows * columns).reshape(rows, columns)


def kinds_and_axes(hlo, rows, columns):
    return [(each.kind, each.axis) for each in collectives(hlo, ids(rows, columns))]


def test_every_shipped_config_is_read():
    assert {c.stem for c in CONFIGS} == set(SPECS)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each.stem in SLOW else [], id=each.stem)
        for each in CONFIGS
    ],
)
@pytest.mark.parametrize(
    ("rows", "columns", "place"),
    [(8, 1, Placement.REPLICATED), (4, 2, Placement.REPLICATED), (4, 2, Placement.STREAMED)],
)
def test_members_do_not_talk_and_cost_what_one_costs(config, rows, columns, place):
    # A device of either mesh has the same part: one program to compare. Of the smallest network as
    # many as its config says, for what 8 cost there is not much more than to draw them.
    batch_size = (100 if config.stem == "uci" else 8) * columns
    compiled, execution = compiled_update(config, 8, rows, columns, batch_size, place)
    text = compiled.as_text()
    assert text.startswith("HloModule jit_update,")
    found = kinds_and_axes(text, rows, columns)
    if columns == 1:
        assert not found
    else:
        assert set(found) == {("all-reduce", "data")}
    # With as many examples as a device of the mesh has. XLA counts the steps of a scan once, on
    # both sides, and those members once that are mapped.
    counted, of_one = 8 // rows, flops_of_one(config, batch_size // columns, place)
    if execution.startswith("map"):
        counted = 1
    flops = compiled.cost_analysis()["flops"]
    assert flops / (counted * of_one) == pytest.approx(1.0, abs=0.05)


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
