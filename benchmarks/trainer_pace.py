"""What the trainer costs: its steps/s against a bare loop over the same compiled update.

    python -m benchmarks.trainer_pace --config=configs/mnist_mlp.py --config.data.source=idx:DIR
    python -m benchmarks.trainer_pace --workload=W4 --calls=120

The trainer draws, transfers, logs and saves; the bare loop updates on one call of batches, over and
over, from a set that lies on the device. They take turns in one process, and a turn of the trainer
is compared with the mean of the bare loops before and after it: a machine that grows slower favours
neither.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time

import jax
from absl import flags

from benchmarks.workloads import WORKLOADS, Workload
from dist_ens.config import CheckpointConfig, DataConfig, Experiment, LossConfig
from dist_ens.data import ArraySplit, Source, Spec, open_source, source_of_arrays
from dist_ens.errors import UserError
from dist_ens.feed import feed
from dist_ens.losses import gaussian_nll
from dist_ens.member import Member
from dist_ens.report import SUMMARY
from dist_ens.run import Run
from dist_ens.train import train
from launch import front
from launch.config_file import ConfigFlags

# All but the one of text, whose labels are as many as its inputs.
_WORKLOAD = flags.DEFINE_enum(
    "workload",
    None,
    ["W1", "W2", "W3", "W4", "W4x16", "W5"],
    "In place of a config; saved every 100 steps.",
)
_PAIRS = flags.DEFINE_integer("pairs", 5, "Turns of each.")
_CALLS = flags.DEFINE_integer("calls", 20, "Calls of the update in a turn.")
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a turn a line, then for each bare loop the median of the ratios and their range."""
    experiment, source, member = _trained()
    steps = (_CALLS.value + 1) * experiment.steps_per_call
    experiment = dataclasses.replace(experiment, steps=steps, epochs=None)
    _, before = turn(experiment, source, member)  # it compiles, and warms the machine
    ratios: dict[str, list[float]] = {way: [] for way in before}
    for _ in range(_PAIRS.value):
        trainer, after = turn(experiment, source, member)
        for way, of_way in ratios.items():
            of_way.append(trainer / statistics.mean((before[way], after[way])))
        told = ", ".join(f"{way} {before[way]:,.1f} and {after[way]:,.1f}" for way in after)
        print(f"trainer {trainer:,.1f} steps/s; the bare loop before and after: {told}", flush=True)
        before = after
    for way, of_way in ratios.items():
        print(
            f"median {statistics.median(of_way):.3f} of {len(of_way)} ({min(of_way):.3f} to "
            f"{max(of_way):.3f}), beside a bare loop whose calls are {way}"
        )


def _trained() -> tuple[Experiment, Source, Member | None]:
    """What the flags name, and its network where no config says it."""
    if _WORKLOAD.value is not None:
        if _CONFIG.file is not None:
            raise UserError(
                "A config or a workload is timed. Received: --config and --workload. Leave one out."
            )
        return of_workload(WORKLOADS[_WORKLOAD.value]())
    experiment = _CONFIG.experiment()
    source = open_source(experiment.data)
    return experiment, source, _CONFIG.make_member(source.spec)


def of_workload(workload: Workload) -> tuple[Experiment, Source, Member]:
    """A workload as a run: the experiment, its data, and the network."""
    experiment = Experiment(
        num_members=workload.num_members,
        steps=1,
        steps_per_call=workload.steps_per_call,
        loss=LossConfig(name=workload.loss.__name__),
        data=DataConfig(
            global_batch_size=workload.batch_size,
            examples="permuted" if workload.own_batches else "shared",
            mean=workload.mean,
            std=workload.std,
        ),
        optimizer=workload.optimizer,
        checkpoint=CheckpointConfig(every_steps=100),
    )
    examples = workload.inputs, workload.labels
    test = workload.inputs[:1000], workload.labels[:1000]
    if workload.loss is gaussian_nll:
        spec = Spec(workload.inputs.shape[1:], workload.inputs.dtype.name, (), None)
        source = Source(spec, train=ArraySplit(*examples), test=ArraySplit(*test))
    else:
        source = source_of_arrays(examples, test)
    return experiment, source, workload.bare_member


def turn(
    experiment: Experiment, source: Source, member: Member | None
) -> tuple[float, dict[str, float]]:
    """Steps/s of the trainer, without its first call, and of the bare loops after it."""
    with tempfile.TemporaryDirectory() as folder:
        trained = train(experiment, folder, member=member, source=source)
        summary = json.loads((pathlib.Path(folder) / SUMMARY).read_text())
    batch_size = experiment.data.global_batch_size
    trainer = summary["member_examples_per_second"] / (batch_size * summary["num_members"])

    layout = trained.ensemble.layout
    order = Run(experiment, source.spec, source.num_train_examples).order
    steps = experiment.steps_per_call
    batches = next(
        feed(source, order, layout, seed=0, first_step=0, last_step=steps, steps_per_call=steps)
    )
    state = trained.state
    paces = {}
    for way in ("queued", "waited for"):
        state, _ = jax.block_until_ready(trained.ensemble.update(state, batches))
        since = time.perf_counter()
        for _ in range(_CALLS.value):
            state, metrics = trained.ensemble.update(state, batches)
            if way == "waited for":
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)
        paces[way] = _CALLS.value * steps / (time.perf_counter() - since)
    return trainer, paces


if __name__ == "__main__":
    front.run(main, _CONFIG.prepare)
