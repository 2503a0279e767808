"""Plans of a run by the real compiler, against figures derived by hand."""

import dataclasses
import json
import re
import subprocess
from functools import partial

import jax
import pytest

import two_hosts
from commands import dist_ens, python
from dist_ens.data import Spec
from dist_ens.data.feed import Placement, TrainingSet
from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.config_file import NOTHING
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import ExitCode, RunError, UserError
from dist_ens.layout import Layout
from dist_ens.plan import Collective, PlannedMesh, Planner, Topology, planned, planner, planner_of
from dist_ens.processes import cluster
from marked import long

SMALL = ["--config=configs/digits.py", "--config.model.hidden_sizes=(32,)"]

# The MLP 64-32-10 in float32: two matrices and two vectors.
PARAMS = 4 * (64 * 32 + 32 + 32 * 10 + 10)
ADAM = 2 * PARAMS + 4  # two moments and a count
METRICS = 2 * 4  # loss and accuracy
# Products of matrices for 128 examples: forward, and the gradients of the weights; that of its
# inputs has the second layer only.
PRODUCTS = 128 * 2 * (2 * 64 * 32 + 3 * 32 * 10)

LINEAR = {"name": "mlp", "hidden_sizes": ()}  # compiled the fastest
LEAST = 3 * 4 * (64 * 10 + 10)  # bytes of its parameters and Adam's two moments

EXAMPLES = 1000
EXAMPLE = 64 * 4 + 4  # bytes of 64 floats and a label


def finished_plan(tmp_path, *arguments):
    """A `dist-ens plan` that ended well, and the plan that it wrote."""
    words = ("plan", *arguments, f"--json={tmp_path / 'plan.json'}")
    ended = dist_ens(*words, xla_flags="--xla_backend_optimization_level=0")
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads((tmp_path / "plan.json").read_text())


def small_planner(devices=4, shape=(8, 8), *, streamed=False, cores=False, say=str, **changes):
    values = {"num_members": 4, "steps": 1, "execution": "vmap", "data": {"global_batch_size": 128}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (32,)}}
    experiment = Experiment.from_dict(values | changes)
    run = Run(experiment, Spec(shape, "float32", (), 10), EXAMPLES)
    call_examples = experiment.data.global_batch_size * experiment.steps_per_call
    kept = None if streamed else TrainingSet(run.order, EXAMPLE, call_examples)
    per_member, make = run.order_rule.per_member, partial(build_ensemble, run)
    them = jax.devices()[:devices]
    return Planner(experiment, run.spec, kept, per_member, make, them, cores, say)


def of_data(mesh):
    return [c for c in mesh["collectives"] if c["axis"] != "none"]


def test_a_plan_says_what_each_mesh_needs_the_best_first(tmp_path):
    ended, plan = finished_plan(tmp_path, *SMALL, "--topology=cpu:8")
    shapes = [(s["mesh"]["ensemble"], s["mesh"]["data"]) for s in plan["shapes"]]
    # The fewer members a device has, the fewer of their optimizers' operations are done twice.
    assert shapes == [(8, 1), (4, 2), (2, 4), (1, 8)]
    for (rows, columns), shape in zip(shapes, plan["shapes"], strict=True):
        members = 8 // rows
        size = shape["bytes_per_device"]
        assert size["parameters"] == members * PARAMS
        assert size["optimizer"] == members * ADAM
        assert size["model_state"] == 0
        # The digits to train on, and for ten steps a call the places of its part of 128.
        assert shape["place"] == "replicated"
        assert size["training_set"] == 1437 * EXAMPLE
        assert size["batches"] == 10 * 128 // columns * 4
        assert size["total"] == sum(v for k, v in size.items() if k != "total")
        assert 0 <= size["other"] < 1000 * members
        assert shape["fits"]
        assert shape["max_steps_per_second"] is None
        # A device of any mesh has `members` members on 1 / `members` of the batch; Adam and the
        # activations' derivatives are less than a tenth for one member.
        assert PRODUCTS < shape["flops_per_device"] < (1 + 0.1 * members) * PRODUCTS
        crossing = {(c["kind"], c["axis"]) for c in of_data(shape)}
        assert crossing == ({("all-reduce", "data")} if columns > 1 else set())
        if columns > 1:
            assert sum(c["bytes"] for c in of_data(shape)) == members * (PARAMS + METRICS)
    assert plan["max_num_members"] % 8 == 0
    assert plan["max_num_members"] > 8
    following = f"{plan['max_num_members']:,}. Next: dist-ens train with the --config flags of this"
    assert f"{following} command, --config.layout.ensemble_axis=8 and a --workdir." in ended.stdout
    second = plan["shapes"][1]["execution"]
    kept = "the training set whole on every device"
    exchanged = f"1 all-reduce over data, {2 * (PARAMS + METRICS):,} bytes"
    assert f"4 x 2: {second}; {kept}; {exchanged}" in ended.stdout
    assert f"{kept}; nothing crosses an axis" in ended.stdout


@pytest.mark.parametrize("execution", ["map", "loop+scanned", *long("chunk:3", "unroll+single")])
def test_operations_are_counted_for_every_member_whatever_the_execution(execution):
    by_unroll = small_planner(streamed=True, execution="unroll").plan_mesh(8, 2)  # no loop
    planned = small_planner(streamed=True, execution=execution).plan_mesh(8, 2)
    assert planned.execution == execution
    assert planned.flops_per_device == pytest.approx(by_unroll.flops_per_device, rel=0.001)
    assert planned.exchanged_bytes == by_unroll.exchanged_bytes == 4 * (PARAMS + METRICS)
    assert planned.bytes_per_device["parameters"] == 4 * PARAMS
    if execution.startswith("loop"):  # a copy of one member is beside all four, and its activations
        size = planned.bytes_per_device
        assert size["activations"] < by_unroll.bytes_per_device["activations"]
        states = 5 * (PARAMS + ADAM)
        assert states < size["total"] < states + size["batches"] + size["activations"] + 500


@pytest.mark.long
def test_the_gradients_of_kernels_are_counted_for_every_example():
    lenet = {"model": {"name": "lenet5"}, "data": {"global_batch_size": 16}}
    # With one member on each device there are no other loops.
    plain, masked = (
        small_planner(2, (28, 28), execution=execution, **lenet).plan_mesh(2, 2)
        for execution in ("unroll", "unroll+canonical+masks")
    )
    # The masks add comparisons.
    assert masked.flops_per_device == pytest.approx(plain.flops_per_device, rel=0.02)


def test_parts_of_a_batch_and_steps_of_a_call_take_memory_and_no_fewer_operations():
    whole = small_planner(execution="unroll").plan_mesh(4, 4)
    parts = small_planner(execution="unroll", compute={"microbatches": 4}).plan_mesh(4, 4)
    assert parts.flops_per_device == pytest.approx(whole.flops_per_device, rel=0.001)
    # 128 examples over 1 device a column; a mesh that has no such parts is not planned.
    meshes = small_planner(compute={"microbatches": 64}, model=LINEAR).plan().meshes
    assert [(m.ensemble_axis, m.data_axis) for m in meshes] == [(4, 1), (2, 2)]
    # An example that is sent has its place with it.
    for streamed, one_step in ((True, 128 * (EXAMPLE + 4)), (False, 128 * 4)):
        own = {"streamed": streamed, "model": LINEAR}
        one, ten = (small_planner(steps_per_call=n, **own).plan_mesh(4, 4) for n in (1, 10))
        assert one.flops_per_device == ten.flops_per_device
        more = ten.bytes_per_device["total"] - one.bytes_per_device["total"]
        assert more == 9 * one_step


def test_the_training_set_takes_memory_where_it_is_kept(monkeypatch):
    # Two rows of four columns, two members a device, beside whose state a quarter of what is free
    # is to hold 1,000 examples; or the 250 of a column, and beside them what is dealt to it of an
    # epoch and a step of 128 at most, 282, each with its place; or less.
    state = 2 * (PARAMS + ADAM)
    whole, parts = EXAMPLES * EXAMPLE, 250 * EXAMPLE + 282 * (EXAMPLE + 4)
    totals = {}
    for memory, place, kept in (
        (4 * whole + state, Placement.REPLICATED, whole),
        (4 * whole + state - 1, Placement.SHARDED, parts),
        (4 * parts + state - 1, Placement.STREAMED, 0),
    ):
        monkeypatch.setattr(planner, "memory_bytes", lambda device, memory=memory: memory)
        planned = small_planner(8).plan_mesh(4, 2)
        size = planned.bytes_per_device
        assert (planned.place, size["training_set"]) == (place, kept)
        assert size["batches"] == 32 * (4 if place is Placement.REPLICATED else EXAMPLE + 4)
        totals[place] = size["total"]
    assert totals[Placement.SHARDED] - totals[Placement.STREAMED] == parts
    more = totals[Placement.REPLICATED] - totals[Placement.SHARDED]
    assert more == pytest.approx(whole - parts, abs=32 * EXAMPLE)  # a batch, drawn or given


@pytest.mark.parametrize(
    ("execution", "waves"),
    [("loop", 1), ("vmap", 2), *long(("vmap", 1), ("map", 1), ("loop", 2), ("map", 2))],
)
def test_batches_of_the_members_own_are_counted_for_each(execution, waves):
    own = {"data": {"global_batch_size": 128, "examples": "permuted"}}
    for streamed, example in ((True, EXAMPLE + 4), (False, 4)):
        planned = small_planner(
            streamed=streamed, execution=execution, layout={"waves": waves}, **own
        ).plan_mesh(4, 2)
        # Two members a device, each with its part of 128 examples, or the places of those, which
        # are drawn when a wave's turn comes.
        size = planned.bytes_per_device
        assert size["batches"] == (2 if streamed else 2 // waves) * 64 * example
        assert planned.place is (Placement.STREAMED if streamed else Placement.REPLICATED)
        # A member or a wave whose turn it is has a copy of what is sent.
        copies = 1 if streamed and (execution == "loop" or waves == 2) else 0
        assert size["other"] >= copies * 64 * example


def test_examples_that_are_weighed_have_their_places_with_them():
    for examples in ("shared", "bootstrap"):
        data = {"global_batch_size": 128, "examples": examples}
        size = small_planner(streamed=True, data=data).plan_mesh(4, 4).bytes_per_device
        assert size["batches"] == 128 * (EXAMPLE + 4)
        assert 0 <= size["other"] < 300  # the places, 512 bytes, are not there twice


@pytest.mark.long
def test_a_split_of_every_group_is_counted_and_members_are_of_all_groups(tmp_path):
    two_hosts.write_table(tmp_path)  # four splits of 40 rows of three numbers and a target
    words = f"data.source=uci:{tmp_path / 'table.npz'} data.global_batch_size=8"
    words += " members_per_group=2 execution=unroll layout.waves=2"
    flags = ["--config=configs/uci.py", *(f"--config.{word}" for word in words.split())]
    ended, plan = finished_plan(tmp_path, *flags, "--topology=cpu:1")
    (shape,) = plan["shapes"]
    assert shape["bytes_per_device"]["training_set"] == 4 * 40 * (3 + 1) * 4
    assert plan["max_num_members"] % 4 == 0
    assert "1 x 1: unroll in 2 waves; the training set whole on every device" in ended.stdout
    assert f"that fits on it is about {plan['max_num_members']:,}. Next" in ended.stdout


def test_the_most_copies_of_a_member_are_estimated_without_compiling_them(monkeypatch):
    monkeypatch.setattr(planner, "memory_bytes", lambda device: 10_000_000)
    most = {}
    for execution in ("unroll", "vmap"):
        compiled = []
        own = {"streamed": True, "execution": execution, "model": LINEAR}
        plan = small_planner(1, say=compiled.append, **own).plan()
        most[execution] = plan.max_num_members
        assert plan.max_is_compiled == (execution == "vmap")
        assert execution == "vmap" or len(compiled) == 2  # of 4 and 2 members
    assert most["unroll"] < 10_000_000 / LEAST
    assert most["unroll"] == pytest.approx(most["vmap"], rel=0.3)


def refusing(monkeypatch, is_too_large):
    """Makes the compiler refuse programs as XLA:TPU does."""
    measured = Planner._measured

    def refuse(self, planned, ensemble, state):
        result = measured(self, planned, ensemble, state)
        if is_too_large(result):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM.")
        return result

    monkeypatch.setattr(Planner, "_measured", refuse)


@pytest.mark.parametrize("members", [1, 4, *long(2)])
def test_what_the_compiler_refuses_is_no_reason_to_say_that_nothing_fits(monkeypatch, members):
    refusing(monkeypatch, lambda planned: planned.members_at_once > 1)
    it = small_planner(1, num_members=members, execution="unroll", model=LINEAR)
    assert it.plan().max_num_members == 1


def mesh_of(rows, flops=1.0, sent=0, fits=True):
    """A planned mesh of 8 members on 8 devices."""
    place, each = Placement.STREAMED, Collective("all-reduce", "data", sent)
    size = {"total": 1000}
    return PlannedMesh(rows, 8 // rows, 8, 1, "tpu", "vmap", place, size, flops, (each,), fits)


def test_the_mesh_over_which_less_is_sent_is_better_than_one_of_a_few_operations_less():
    meshes = [mesh_of(1, 100.0, 9), mesh_of(2, 101.0, 5), mesh_of(4, 103.0)]
    meshes.append(mesh_of(8, 50.0, fits=False))
    # 101 is within two percent of 100, and 103 is not; what does not fit comes last.
    assert [mesh.ensemble_axis for mesh in planned.best_first(meshes)] == [2, 1, 4, 8]


@pytest.mark.parametrize("begin", [4, 400])
def test_the_largest_number_of_members_fits_and_one_more_per_device_does_not(monkeypatch, begin):
    memory, compiled = 1_000_000, []
    monkeypatch.setattr(planner, "memory_bytes", lambda device: memory)
    own = {"num_members": begin, "layout": {"ensemble_axis": 4}, "model": LINEAR}
    it = small_planner(say=compiled.append, **own)
    plan = it.plan()
    best, most = plan.meshes[0].ensemble_axis, plan.max_num_members
    assert it.plan_mesh(most, best).bytes_per_device["total"] <= memory
    assert it.plan_mesh(most + best, best).bytes_per_device["total"] > memory
    assert 4 < most // best < memory / LEAST
    assert len(compiled) < 12
    if begin == 400:
        assert not plan.meshes[0].fits
        way_out = rf"400 members does not fit on 4 .*Try .*num_members={most}, or more devices\."
        with pytest.raises(UserError, match=way_out):
            plan.check_fits()
        # On a TPU other waves have room. 184 fit: a device's 100 are four equal parts that do.
        on_tpu = (dataclasses.replace(plan.meshes[0], platform="tpu"),)
        with pytest.raises(UserError, match=r", or --config.layout.waves=4 to keep only"):
            dataclasses.replace(plan, meshes=on_tpu).check_fits()
    else:
        plan.check_fits()


@pytest.mark.long
def test_more_members_than_are_ever_compiled_are_estimated(monkeypatch):
    monkeypatch.setattr(planner, "memory_bytes", lambda device: 10_000_000)
    it, compiled = small_planner(layout={"ensemble_axis": 4}, model=LINEAR), []
    found = it.plan()
    monkeypatch.setattr(planner, "_MOST_COMPILED", 400)
    estimate = dataclasses.replace(it, say=compiled.append).plan()
    members = re.findall(r"(\d+) members a device", " ".join(compiled))
    assert members == ["1", "2", "100"]  # Four devices have 400.
    assert (found.max_is_compiled, estimate.max_is_compiled) == (True, False)
    assert estimate.max_num_members == pytest.approx(found.max_num_members, rel=0.01)


def test_members_in_waves_take_the_memory_of_one_and_the_operations_of_all(monkeypatch):
    monkeypatch.setattr(planner, "memory_bytes", lambda device: 1_000_000)
    at_once = small_planner(model=LINEAR, layout={"ensemble_axis": 2})
    in_waves = small_planner(num_members=12, model=LINEAR, layout={"ensemble_axis": 2, "waves": 3})
    one, three = at_once.plan(), in_waves.plan()
    (of_one,), (of_three,) = one.meshes, three.meshes
    assert (of_three.waves, of_three.members_per_device, of_three.members_at_once) == (3, 6, 2)
    # On a CPU all of them are in the same memory, before their update and after.
    waiting = 2 * 3 * 2 * 3 * (4 * (64 * 10 + 10)) + 2 * 3 * 2 * 4
    wave = {**of_one.bytes_per_device, "waiting": waiting}
    assert of_three.bytes_per_device == wave | {"total": wave["total"] + waiting}
    assert of_three.flops_per_device == 3 * of_one.flops_per_device
    assert of_three.exchanged_bytes == 3 * of_one.exchanged_bytes > 0
    assert three.max_num_members % 6 == 0
    assert 12 <= three.max_num_members < one.max_num_members


def test_a_program_that_the_compiler_refuses_is_a_mesh_that_does_not_fit(monkeypatch):
    memory, limit = 1_000_000, 700_000  # a compiler may refuse well before the memory is full
    compiled, own = [], {"num_members": 400, "layout": {"ensemble_axis": 4}, "model": LINEAR}
    it = small_planner(say=compiled.append, **own)
    monkeypatch.setattr(planner, "memory_bytes", lambda device: limit)
    by_bytes = it.plan()
    compiled.clear()
    monkeypatch.setattr(planner, "memory_bytes", lambda device: memory)
    refusing(monkeypatch, lambda planned: planned.bytes_per_device["total"] > limit)
    by_refusal = it.plan()
    assert by_refusal.max_num_members == by_bytes.max_num_members > 4
    assert len(compiled) < 12  # halving a hundred takes seven
    (refused,) = by_refusal.meshes
    assert not refused.fits
    assert refused.flops_per_device is None
    with pytest.raises(UserError, match="Ran out of memory on HBM. Try --config.num_members="):
        by_refusal.check_fits()


def test_a_mesh_for_which_xla_does_not_compile_is_left_out(monkeypatch):
    def crossing_slices(self, planned, ensemble, state):
        """Stands for XLA:TPU on two slices, between which it does not exchange gradients."""
        if planned.ensemble_axis % 2:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: an all-reduce over two slices.\nAt …")
        return mesh_of(planned.ensemble_axis)

    monkeypatch.setattr(Planner, "_measured", crossing_slices)
    lines = []
    it = small_planner(model=LINEAR, say=lines.append)
    assert [mesh.ensemble_axis for mesh in it.meshes()] == [4, 2]
    assert len([line for line in lines if line.startswith("This mesh is left out")]) == 1
    it = small_planner(layout={"ensemble_axis": 1}, model=LINEAR)
    with pytest.raises(UserError, match="compile .* the mesh 1 x 4 .*over two slices") as raised:
        it.plan()
    assert raised.value.exit_code == ExitCode.IMPOSSIBLE_LAYOUT


def test_a_mesh_divides_members_and_batch():
    # 8 devices, 2 members, 6 examples: 2 rows of 4 do not divide 6. 4 members, or 8 examples, do.
    with pytest.raises(
        UserError, match=r"^8 devices cannot all .* Try --config.num_members=4, .*batch_size=8"
    ):
        small_planner(8, num_members=2, data={"global_batch_size": 6}).plan()
    assert small_planner(8, num_members=4, data={"global_batch_size": 6})._ensemble_axes() == [4]
    assert small_planner(8, num_members=2, data={"global_batch_size": 8})._ensemble_axes() == [2, 1]
    assert small_planner(layout={"ensemble_axis": 2})._ensemble_axes() == [2]
    with pytest.raises(UserError, match="The ensemble axis must divide the number"):
        small_planner(layout={"ensemble_axis": 3}).plan()


@pytest.mark.parametrize(
    ("num_members", "rows"), [(11, [1]), (16, [8, 4, 2, 1]), *long((6, [6, 3, 2, 1]))]
)
def test_cores_are_planned_for_as_a_run_takes_them(monkeypatch, num_members, rows):
    monkeypatch.setattr(cluster, "_cores_are_devices", True)
    # 129 examples divide over no two columns, of which cores have one.
    own = {"model": LINEAR, "num_members": num_members, "data": {"global_batch_size": 129}}
    monkeypatch.setattr(planner, "memory_bytes", lambda device: 2**20)
    plan = small_planner(8, cores=True, **own).plan()
    assert [(m.ensemble_axis, m.data_axis) for m in plan.meshes] == [(k, 1) for k in rows]
    taken = Layout.make(num_members, devices=cluster.devices_for(num_members))
    assert taken.mesh.shape == {"ensemble": rows[0], "data": 1}
    # Those left out leave their share of the memory.
    assert plan.memory_bytes == 8 * 2**20 // rows[0]
    alone = small_planner(8, cores=True, layout={"ensemble_axis": rows[0]}, **own)
    assert alone.plan() == dataclasses.replace(plan, meshes=plan.meshes[:1])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("v5ee:4x4", "Did you mean 'v5e'?"),
        ("gpu:4", "or here, which plans for the GPUs of this machine"),
        *((text, "is not a topology. Use cpu:N") for text in ("cpu:0", "cpu:2*2", "v5e:4x4*0")),
        *((text, "such as v4:4x4x4, v5e:4x4,") for text in ("v5e", "v5e:4x4x4", "v5p:4x4")),
    ],
)
def test_an_unknown_topology_is_refused(text, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        Topology.parse(text)


@pytest.mark.quick
def test_a_compiler_that_is_missing_or_ends_its_process_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs libtpu.*dist-ens\[tpu-plan\]"):
        Topology.parse("v5e:4x4").run_module("launch.plan", [])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -6))
    with pytest.raises(RunError, match="signal 6 while it compiled for cpu:4"):
        Topology.parse("cpu:4").run_module("launch.plan", [])


@pytest.mark.tpu_plan
def test_a_tpu_is_planned_for_without_one(tmp_path):
    words = ("--topology=v5e:2x4", "--config.layout.ensemble_axis=4")
    ended, plan = finished_plan(tmp_path, *SMALL, *words)
    (shape,) = plan["shapes"]
    assert shape["mesh"] == {"ensemble": 4, "data": 2}
    assert shape["bytes_per_device"]["parameters"] == 2 * PARAMS
    assert sum(c["bytes"] for c in of_data(shape)) == 2 * (PARAMS + METRICS)
    assert {(c["kind"], c["axis"]) for c in of_data(shape)} == {("all-reduce", "data")}
    assert shape["flops_per_device"] == pytest.approx(PRODUCTS, rel=0.3)
    assert shape["max_steps_per_second"] == pytest.approx(197e12 / shape["flops_per_device"])
    # A member takes at least its parameters, gradients and Adam.
    assert 4 * 1000 < plan["max_num_members"] < 4 * 15.75 * 2**30 / (4 * PARAMS)
    assert "W11" not in ended.stderr


@pytest.mark.tpu_plan
def test_members_that_wait_for_their_wave_are_not_in_a_tpus_memory(tmp_path):
    words = ("--topology=v5e:1x1", "--config.num_members=2", "--config.layout.waves=2")
    ended, plan = finished_plan(tmp_path, *SMALL, *words)
    (shape,) = plan["shapes"]
    assert shape["bytes_per_device"]["parameters"] == PARAMS
    assert shape["bytes_per_device"]["waiting"] == 0
    assert "in 2 waves" in ended.stdout


@pytest.mark.tpu_plan
def test_what_two_slices_exchange_is_planned(tmp_path):
    words = ("--topology=v5e:1x1*2", "--config.num_members=2")
    _, plan = finished_plan(tmp_path, *SMALL, *words)
    shapes = {shape["mesh"]["ensemble"]: shape for shape in plan["shapes"]}
    one_a_slice, over_both = shapes[2], shapes[1]
    assert not of_data(one_a_slice)
    assert {(c["kind"], c["axis"]) for c in of_data(over_both)} == {("all-reduce", "data")}
    # Two members' gradients and metrics, in whole tiles of 4 KiB.
    exchanged = sum(c["bytes"] for c in of_data(over_both))
    assert 2 * (PARAMS + METRICS) <= exchanged < 2 * (PARAMS + METRICS) + 8 * 4096


@pytest.mark.tpu_plan
@pytest.mark.parametrize(
    ("text", "devices"), [("v5e:1x1", 1), ("v4:2x2x2", 8), ("v6e:2x2*2", 8), ("v5p:8x8x16", 1024)]
)
def test_the_devices_of_a_topology_are_its_chips(text, devices):
    code = f"""if True:
        from dist_ens.plan import Topology
        from dist_ens.plan.topology import CHIPS, chip_of
        found = Topology.parse("{text}").devices()
        chip, = {{chip_of(device) for device in found}}
        print(len(found), next(name for name in CHIPS if CHIPS[name] is chip))
    """
    ended = python("-c", code, **Topology.parse(text)._environment())
    assert ended.stdout.split() == [str(devices), text.partition(":")[0]], ended.stderr


@pytest.mark.tpu_plan
def test_a_topology_that_no_cloud_has_is_refused():
    ended = dist_ens("plan", *SMALL, "--topology=v5e:3x3")
    assert ended.returncode == 2, ended.stderr
    assert "--topology=v5e:3x3 does not exist: " in ended.stderr


def fitted_axis(monkeypatch, memory, **changes):
    """The model axis that is found on 4 devices with so much memory, and what was said."""
    monkeypatch.setattr(planner, "memory_bytes", lambda device: memory)
    values = {"num_members": 4, "steps": 1, "data": {"global_batch_size": 16}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (512, 512)}, "execution": "loop"}
    values |= {"layout": {"model_axis": "auto", "ensemble_axis": 1}}
    run = Run(Experiment.from_dict(values | changes), Spec((8, 8), "float32", (), 10), EXAMPLES)
    lines = []
    found = planner_of(
        run, NOTHING, jax.devices()[:4], in_memory=True, are_cores=False, say=lines.append
    )
    return found.experiment.layout.model_axis, lines


@pytest.mark.parametrize(("share", "axis"), [(1.2, 1), (0.8, 2), (0.5, 4)])
def test_the_smallest_model_axis_with_which_a_run_fits_is_found(share, axis, monkeypatch):
    # Weights and moments of 4 members, and the copy of one of them, its gradients and its update.
    state = 4 * (64 * 512 + 512 * 512 + 512 * 10 + 2 * 512 + 10) * (3 * 4 + 3 + 2)
    found, lines = fitted_axis(monkeypatch, int(share * state))
    assert found == axis
    assert f"layout.model_axis is {axis}, the smallest" in lines[-1]


def test_a_run_that_fits_with_no_model_axis_is_told(monkeypatch):
    with pytest.raises(UserError, match="fits on 4 devices with no model axis"):
        fitted_axis(monkeypatch, 10_000)


@pytest.mark.long
def test_a_run_is_trained_with_the_model_axis_that_is_found(tmp_path):
    axis = ["--config.layout.model_axis=auto", "--config.steps=2"]
    ended = dist_ens("train", *SMALL, *axis, f"--workdir={tmp_path}", devices=2)
    assert ended.returncode == 0, ended.stderr
    assert "layout.model_axis is 1, the smallest" in ended.stderr
    assert json.loads((tmp_path / "experiment.json").read_text())["layout"]["model_axis"] == 1
