"""What the trainer costs: its steps/s against a bare loop over the same compiled update.

    python -m benchmarks.trainer_pace --config=configs/mnist_mlp.py --config.data.source=idx:DIR

The trainer draws, transfers, logs and evaluates; the bare loop updates on one call of batches, over
and over, from a set that lies on the device. They take turns in one process, and the ratios are of
neighbours.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time

import jax
from absl import flags

from dist_ens.config import Experiment
from dist_ens.data import Source, open_source
from dist_ens.feed import feed
from dist_ens.methods import Order
from dist_ens.report import SUMMARY
from dist_ens.train import train
from launch import front
from launch.config_file import ConfigFlags

_PAIRS = flags.DEFINE_integer("pairs", 5, "Turns of each.")
_CALLS = flags.DEFINE_integer("calls", 20, "Calls of the update in a turn.")
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a pair a line, then the median of the ratios and their range."""
    experiment = _CONFIG.experiment()
    source = open_source(experiment.data)
    steps = (_CALLS.value + 1) * experiment.steps_per_call
    experiment = dataclasses.replace(experiment, steps=steps, epochs=None)
    ratios: dict[str, list[float]] = {}
    for _ in range(_PAIRS.value):
        trainer, bare = turn(experiment, source)
        for way, pace in bare.items():
            ratios.setdefault(way, []).append(trainer / pace)
        told = ", ".join(f"{way} {pace:,.1f}" for way, pace in bare.items())
        print(f"trainer {trainer:,.1f} steps/s; bare loop {told}")
    # Of the two, the one that is the faster over all turns; the faster of each turn would be the
    # luckier.
    medians = {way: statistics.median(values) for way, values in ratios.items()}
    way = min(medians, key=medians.__getitem__)
    print(
        f"median {medians[way]:.3f} of {len(ratios[way])} ({min(ratios[way]):.3f} to "
        f"{max(ratios[way]):.3f}), beside a bare loop whose calls are {way}"
    )


def turn(experiment: Experiment, source: Source) -> tuple[float, dict[str, float]]:
    """Steps/s of the trainer, without its first call, and of the bare loops after it."""
    with tempfile.TemporaryDirectory() as folder:
        trained = train(experiment, folder, source=source)
        summary = json.loads((pathlib.Path(folder) / SUMMARY).read_text())
    batch_size = experiment.data.global_batch_size
    trainer = summary["member_examples_per_second"] / (batch_size * experiment.num_members)

    layout = trained.ensemble.layout
    order = Order(len(source.train), batch_size, experiment.data.shuffle)
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
