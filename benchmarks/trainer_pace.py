"""Benchmark of the trainer: its steps/s against a bare loop over the same compiled update.

    python -m benchmarks.trainer_pace --config=configs/mnist_mlp.py --config.data.source=idx:DIR
    python -m benchmarks.trainer_pace --workload=W4

The trainer draws and transfers batches, logs and saves. The bare loop only repeats the update with
the same batches, from a set on the device. Both are timed in interleaved rounds of some calls,
inside one run. A turn of the trainer is compared with the mean of the bare loop's turns before and
after it. So a machine that becomes slower favours neither.
"""

import dataclasses
import signal
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
from absl import flags

from benchmarks.workloads import WORKLOADS, Workload
from dist_ens.callbacks import StepInfo
from dist_ens.data import (
    ArraySplit,
    Source,
    Spec,
    source_of_arrays,
)
from dist_ens.data.feed import feed
from dist_ens.experiment import (
    CheckpointConfig,
    DataConfig,
    Experiment,
    LossConfig,
    OwnParts,
    open_source,
)
from dist_ens.experiment.train import Trained, train
from dist_ens.ground.errors import UserError
from launch import cli
from launch.config_flags import ConfigFlags

# W6 is missing: it is text, whose examples have a label for each character.
_WORKLOAD = flags.DEFINE_enum(
    "workload",
    None,
    ["W1", "W2", "W3", "W4", "W4x16", "W5"],
    "Workload to train, instead of a config. It is saved every 100 steps.",
)
_PAIRS = flags.DEFINE_integer("pairs", 20, "Number of rounds.", lower_bound=1)
_CALLS = flags.DEFINE_integer(
    "calls", 10, "Number of calls of the update in a turn.", lower_bound=1
)
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a line for each round, then the median of the ratios and their range."""
    experiment, source, parts = _asked_for()
    calls = _CALLS.value
    # In two more turns, everything is compiled and warms up.
    steps = (_PAIRS.value + 2) * calls * experiment.steps_per_call
    experiment = dataclasses.replace(experiment, steps=steps, epochs=None)
    bare = _BareLoop(_trained_with(_stop_at_once, experiment, source, parts), source)
    turns = _Turns(calls, lambda: bare.secs(calls))
    run = _trained_with(turns, experiment, source, parts).run
    num_devices, bare_devices = (each.saved_record.num_devices for each in (run, bare.run))
    if (run.execution, num_devices) != (bare.run.execution, bare_devices):
        raise UserError(
            f"The trainer and the bare loop cannot be compared: the trainer ran {run.execution} on "
            f"{num_devices} devices, and the bare loop {bare.run.execution} on "
            f"{bare_devices}. Set --config.execution, or raise --pairs."
        )
    ratios = []
    for secs, before, after in zip(
        turns.trainer_secs[1:], turns.bare_secs[:-1], turns.bare_secs[1:], strict=True
    ):
        ratios.append(statistics.mean((before, after)) / secs)
        print(
            f"trainer: {1e3 * secs / calls:,.1f} ms per call; bare loop before and after it: "
            f"{1e3 * before / calls:,.1f} and {1e3 * after / calls:,.1f} ms per call"
        )
    print(
        f"The trainer has {statistics.median(ratios):.3f} of the bare loop's steps/s (median of "
        f"{len(ratios)} rounds, {min(ratios):.3f} to {max(ratios):.3f})."
    )


def _asked_for() -> tuple[Experiment, Source, OwnParts]:
    """Returns the experiment that the flags name, its data, and its parts.

    Raises:
        UserError: If both a config and a workload are given.
    """
    if _WORKLOAD.value is not None:
        if _CONFIG.file.path is not None:
            raise UserError(
                "--config and --workload were both given, and only one of them can be timed. Leave "
                "one out."
            )
        return of_workload(WORKLOADS[_WORKLOAD.value]())
    experiment = _CONFIG.experiment()
    source = open_source(experiment.data)
    return experiment, source, _CONFIG.file.own_parts(source.spec)


def of_workload(workload: Workload) -> tuple[Experiment, Source, OwnParts]:
    """Returns the experiment of a workload, its data, and its network."""
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
    if workload.objective.num_classes is None:
        spec = Spec(workload.inputs.shape[1:], workload.inputs.dtype.name, (), None)
        source = Source(spec, train=ArraySplit(*examples), test=ArraySplit(*test))
    else:
        source = source_of_arrays(examples, test)
    return experiment, source, OwnParts(member=workload.bare_member)


def _trained_with(
    callback: Callable[[StepInfo], None], experiment: Experiment, source: Source, parts: OwnParts
) -> Trained:
    """Trains with one more callback, and returns the result."""
    parts = dataclasses.replace(parts, callbacks=[*parts.callbacks, callback])
    with tempfile.TemporaryDirectory() as folder:
        return train(experiment, folder, parts=parts, source=source)


def _stop_at_once(info: StepInfo) -> None:
    """Ends the run after its first call of the update, as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class _BareLoop:
    """A loop that repeats the update of a run's ensemble with the same batches."""

    def __init__(self, trained: Trained, source: Source) -> None:
        self.run = trained.run
        self._ensemble, self._state = trained.ensemble, trained.state
        steps = self.run.experiment.steps_per_call
        self._batches = next(
            feed(
                source.train,
                self.run.order,
                trained.ensemble.layout,
                seed=0,
                first_step=0,
                last_step=steps,
                steps_per_call=steps,
            )
        )

    def secs(self, num_calls: int) -> float:
        """Returns the seconds that some calls take, dispatched one after another."""
        since = time.perf_counter()
        for _ in range(num_calls):
            self._state, _ = self._ensemble.update_steps(self._state, self._batches)
        jax.block_until_ready(self._state)
        return time.perf_counter() - since


class _Turns:
    """A callback that times the turns of the trainer, and runs the bare loop after each of them.

    It is called when a call of the update is dispatched, before the new state is saved.

    Args:
        num_calls: Number of calls of the update in a turn.
        bare_turn: Function that runs a turn of the bare loop and returns its seconds.
    """

    def __init__(self, num_calls: int, bare_turn: Callable[[], float]) -> None:
        self.trainer_secs: list[float] = []
        self.bare_secs: list[float] = []
        self._num_calls, self._bare_turn = num_calls, bare_turn
        self._calls = 0
        self._since: float | None = None

    def __call__(self, info: StepInfo) -> None:
        """Ends a turn after its last call."""
        self._calls += 1
        if self._calls % self._num_calls:
            return
        jax.block_until_ready(info.state)
        if self._since is not None:
            self.trainer_secs.append(time.perf_counter() - self._since)
            self.bare_secs.append(self._bare_turn())
        self._since = time.perf_counter()


if __name__ == "__main__":
    cli.run(main, _CONFIG.prepare)
