"""Figures of the page "How far it scales": compiled programs, input, evaluation and checkpoints.

    python -m benchmarks.scale --table=programs --config=configs/charlm.py
    python -m benchmarks.scale --table=input --config=configs/charlm.py
    python -m benchmarks.scale --table=evaluation --config=configs/charlm.py
    python -m benchmarks.scale --table=checkpoints --workload=W6

The first three tables need the extra `[tpu-plan]`. XLA compiles the programs of the first table for
TPUs that need not be here. The next two are computed from the layout and the data set. The last one
is measured on this machine with the code that saves and restores a run.
"""

import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import jax
from absl import flags

from benchmarks.moved_bytes import exchanged_bytes, host_input_bytes, slices_of
from benchmarks.workloads import WORKLOADS, Workload
from dist_ens import Checkpoints, Ensemble
from dist_ens.checkpoint import OpenCheckpoints, Snapshot, StepRecord, leaves_off_devices
from dist_ens.data.feed import Placement, TrainingSet
from dist_ens.evaluation import Evaluator
from dist_ens.experiment import make_optimizer
from dist_ens.ground.errors import UserError
from dist_ens.ground.types import Shapes
from dist_ens.layout import Layout
from dist_ens.losses import Objective
from dist_ens.plan import PlannedMesh, Planner, Topology
from launch import cli
from launch.config_flags import ConfigFlags
from launch.plan import make_planner

PROGRAMS, INPUT, EVALUATION, CHECKPOINTS = "programs", "input", "evaluation", "checkpoints"

_TABLE = flags.DEFINE_enum(
    "table", PROGRAMS, [PROGRAMS, INPUT, EVALUATION, CHECKPOINTS], "Table to print."
)
_TOPOLOGIES = flags.DEFINE_list(
    "topologies",
    ["v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5e:16x16*2", "v5e:16x16*4"],
    "TPU topologies of the first three tables.",
)
_COLUMNS = flags.DEFINE_integer(
    "columns", 4, "Number of chips in each row of the mesh, which share a batch.", lower_bound=1
)
_MEMBERS = flags.DEFINE_integer(
    "members", None, "Number of members. Default: one for each row of the mesh.", lower_bound=1
)
_WORKLOAD = flags.DEFINE_enum(
    "workload", "W6", ["W5", "W6"], "Workload whose members the table of checkpoints saves."
)
_CONFIG = ConfigFlags()

_SAVED_MEMBERS = (1, 64)
_SCALED_MEMBERS = (1, 64, 4096, 10_240)
_TEST_EXAMPLES = 10_000
_ROUNDS = 5
_MIB = 2**20


def main() -> None:
    """Prints the table that is asked for."""
    if _TABLE.value == CHECKPOINTS:
        print_checkpoints(WORKLOADS[_WORKLOAD.value]())
        return
    planners = [make_planner(_CONFIG, Topology.parse(text)) for text in _TOPOLOGIES.value]
    {PROGRAMS: print_programs, INPUT: print_input, EVALUATION: print_evaluation}[_TABLE.value](
        planners
    )


def print_programs(planners: Iterable[Planner]) -> None:
    """Prints a row for the program of each topology, compiled by XLA."""
    print(
        "| topology | mesh | members per chip | execution | state MiB | total MiB | GFLOPs "
        "| ICI bytes | DCN bytes | compile s |\n" + "| --- " * 10 + "|"
    )
    for text, planner in zip(_TOPOLOGIES.value, planners, strict=True):
        layout = layout_of(planner)
        started = time.perf_counter()
        mesh = planner.plan_mesh(layout.num_members, layout.ensemble_axis)
        secs = time.perf_counter() - started
        if mesh.flops_per_device is None:
            raise UserError(
                f"{mesh.num_members} members on {text} could not be compiled: {mesh.refusal} Use "
                "fewer --members."
            )
        ici, dcn = exchanged_bytes(mesh.collectives, slices_of(layout))
        print(
            f"| {text} | {mesh.ensemble_axis} x {mesh.data_axis} | {mesh.members_per_device} "
            f"| {mesh.execution} | {state_bytes(mesh) / _MIB:.1f} "
            f"| {mesh.bytes_per_device['total'] / _MIB:.1f} "
            f"| {mesh.flops_per_device / 1e9:.2f} | {ici:,} | {dcn:,} | {secs:.0f} |",
            flush=True,
        )


def layout_of(planner: Planner) -> Layout:
    """Returns the layout that the flags ask for on the devices of a planner."""
    rows = len(planner.devices) // _COLUMNS.value
    return Layout.make(_MEMBERS.value or rows, ensemble_axis=rows, devices=planner.devices)


def state_bytes(mesh: PlannedMesh) -> int:
    """Returns the bytes of the states of the members that one device holds at a time."""
    parts = mesh.bytes_per_device
    return parts["parameters"] + parts["model_state"] + parts["optimizer"]


def print_input(planners: Iterable[Planner]) -> None:
    """Prints the bytes that the hosts read from the data set for each placement of it."""
    print(
        "| topology | mesh | hosts | order | resident, at the start | sharded, at the start "
        "| streamed, a step | all hosts, a step |\n" + "| --- " * 8 + "|"
    )
    for text, planner in zip(_TOPOLOGIES.value, planners, strict=True):
        layout, training_set = layout_of(planner), _training_set(planner)
        hosts = len({device.process_index for device in layout.mesh.devices.flat})
        batch_size = planner.experiment.data.global_batch_size
        for order, per_member in (("shared", False), ("own", True)):
            read = host_input_bytes(training_set, layout, batch_size, per_member=per_member)
            sharded = f"{read[Placement.SHARDED]:,}" if Placement.SHARDED in read else "none"
            print(
                f"| {text} | {layout.ensemble_axis} x {layout.data_axis} | {hosts} | {order} "
                f"| {read[Placement.REPLICATED]:,} | {sharded} | {read[Placement.STREAMED]:,} "
                f"| {hosts * read[Placement.STREAMED]:,} |"
            )


def _training_set(planner: Planner) -> TrainingSet:
    if planner.training_set is None:
        raise UserError(
            "The number of training examples is not known, or the run is too short to keep the "
            "set. Give more --config.steps, or a --config.data.source whose length is known."
        )
    return planner.training_set


def print_evaluation(planners: Iterable[Planner]) -> None:
    """Prints the bytes that an evaluation of 10,000 test examples needs on a device and a host."""
    print(
        "| topology | mesh | members | batch | outputs of a batch on a device "
        "| row statistics on each host | member predictions in a file |\n" + "| --- " * 7 + "|"
    )
    for text, planner in zip(_TOPOLOGIES.value, planners, strict=True):
        layout = layout_of(planner)
        outputs, kept = (layout.num_members * each for each in member_evaluation_bytes(planner))
        batch_size = planner.experiment.evaluation.global_batch_size
        batches = _TEST_EXAMPLES / batch_size
        print(
            f"| {text} | {layout.ensemble_axis} x {layout.data_axis} | {layout.num_members:,} "
            f"| {batch_size} | {outputs // layout.data_axis:,} | {int(kept * batches):,} "
            f"| {int(outputs * batches):,} |"
        )


def member_evaluation_bytes(planner: Planner) -> tuple[int, int]:
    """Returns the bytes of one member's outputs for an evaluation batch, and of their statistics.

    Every device of a column gathers the outputs of all members for its part of the batch. Every
    host keeps the statistics of each row of the test split until all batches are scored.

    Args:
        planner: Planner of the experiment.
    """
    ensemble = planner.make_ensemble(Layout.make(1, devices=jax.devices()[:1]))
    spec, batch_size = planner.spec, planner.experiment.evaluation.global_batch_size
    batch = {
        name: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype)
        for name, leaf in spec.example.items()
    }
    # An experiment names its objective, so that its ensemble has one.
    objective = cast(Objective, ensemble.objective)
    evaluator = Evaluator(ensemble, batch_size, spec, objective.distribution)
    state, mask = ensemble.abstract_state(batch), jax.ShapeDtypeStruct((batch_size,), bool)
    outputs = evaluator.outputs_shape(state, batch[Objective.INPUTS])
    scored = jax.eval_shape(evaluator.programs.score, outputs, batch[Objective.LABELS], mask, None)
    _, (members, _) = scored
    return _bytes(outputs), _bytes(members)


def _bytes(tree: Shapes) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def print_checkpoints(workload: Workload) -> None:
    """Prints what saving and restoring take here, then the same for more members by their bytes."""
    print(
        "| members | MB | save s, median (range) | restore s, median (range) | save MB/s "
        "| restore MB/s |\n" + "| --- " * 6 + "|"
    )
    for num_members in _SAVED_MEMBERS:
        size, saved, restored = measured_checkpoint(workload, num_members)
        print(
            f"| {num_members} | {size / 1e6:,.1f} | {_range(saved)} | {_range(restored)} "
            f"| {size / 1e6 / statistics.median(saved):.0f} "
            f"| {size / 1e6 / statistics.median(restored):.0f} |"
        )
    save_pace, restore_pace = size / statistics.median(saved), size / statistics.median(restored)
    print("\n| members | GB | save s | restore s |\n" + "| --- " * 4 + "|")
    for more in _SCALED_MEMBERS:
        scaled = size / num_members * more
        print(
            f"| {more:,} | {scaled / 1e9:.3g} | {scaled / save_pace:.3g} "
            f"| {scaled / restore_pace:.3g} |"
        )


def measured_checkpoint(
    workload: Workload, num_members: int
) -> tuple[int, list[float], list[float]]:
    """Saves and restores the members of a workload on this machine.

    Args:
        workload: Workload whose members are saved.
        num_members: Number of members.

    Returns:
        The bytes of a checkpoint, and the seconds of each save and of each restore.
    """
    ensemble = Ensemble(
        workload.member,
        make_optimizer(workload.optimizer),
        workload.objective,
        num_members=num_members,
        layout=Layout.make(num_members, devices=jax.devices()[:1]),
        execution="vmap",
    )
    state = jax.block_until_ready(ensemble.init({"inputs": workload.inputs[:1]}))
    abstract = ensemble.abstract_state(workload.batch)
    record = StepRecord(
        member=workload.name,
        optimizer=workload.optimizer.name,
        loss="categorical",
        methods=(),
        num_members=num_members,
        member_ids=tuple(range(num_members)),
        seed=0,
        batch="",
        fingerprint=None,
        versions={},
    ).to_dict()
    saved, restored = [], []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, _ROUNDS + 1):
            with Checkpoints(folder, keep=1).open(record) as opened:
                leaves = leaves_off_devices(state)
                saved.append(_secs(partial(_save, opened, Snapshot(step, leaves, record))))
            with Checkpoints(folder, keep=1).open(record) as opened:
                restored.append(
                    _secs(lambda: jax.block_until_ready(opened.restore_state(abstract)))
                )
        newest = pathlib.Path(folder) / "checkpoints" / str(_ROUNDS)
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return size, saved, restored


def _save(opened: OpenCheckpoints, snapshot: Snapshot) -> None:
    """Saves a state, and waits until it is on the disk."""
    opened.save(snapshot)
    opened.wait()


def _secs(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _range(secs: list[float]) -> str:
    return f"{statistics.median(secs):.3g} ({min(secs):.3g} to {max(secs):.3g})"


def _prepare(argv: list[str]) -> list[str]:
    if _TABLE.value == CHECKPOINTS:
        return argv
    if not _TOPOLOGIES.value:
        raise UserError(
            "--topologies is empty. Give at least one topology, such as v5e:2x4, or leave the flag "
            "out to compare 8 to 1024 chips."
        )
    topology = Topology.parse(_TOPOLOGIES.value[-1])
    if not topology.is_at_hand():
        sys.exit(topology.run_module("benchmarks.scale", argv[1:]))
    return _CONFIG.prepare(argv)


if __name__ == "__main__":
    cli.run(main, _prepare, joins_cluster=lambda: False)
