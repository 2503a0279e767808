"""What the trainer costs: its steps/s against a bare loop over the same compiled update.

    python -m benchmarks.trainer_pace --config=configs/mnist_mlp.py --config.data.source=idx:DIR
    python -m benchmarks.trainer_pace --workload=W4

The trainer draws, transfers, logs and saves; the bare loop updates on one call of batches, over and
over, from a set that lies on the device. They take turns of some calls in the middle of one run,
and a turn of the trainer is compared with the mean of the bare loops before and after it: a machine
that grows slower favours neither.
"""

import dataclasses
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from absl import flags

from benchmarks.workloads import WORKLOADS, Workload
from dist_ens import report
from dist_ens.config import CheckpointConfig, DataConfig, Experiment, LossConfig
from dist_ens.data import ArraySplit, Source, Spec, open_source, source_of_arrays
from dist_ens.errors import UserError
from dist_ens.experiment.train import Trained, train
from dist_ens.feed import feed
from dist_ens.losses import gaussian_nll
from dist_ens.members import Member
from launch import cli
from launch.config_file import ConfigFlags

# All but the one of text, whose labels are as many as its inputs.
_WORKLOAD = flags.DEFINE_enum(
    "workload",
    None,
    ["W1", "W2", "W3", "W4", "W4x16", "W5"],
    "In place of a config; saved every 100 steps.",
)
_PAIRS = flags.DEFINE_integer("pairs", 20, "Turns of each.", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 10, "Calls of the update in a turn.", lower_bound=1)
_CONFIG = ConfigFlags()


def main() -> None:
    """Prints a turn a line, then the median of the ratios and their range."""
    experiment, source, member = _asked_for()
    calls = _CALLS.value
    # Two turns more, in which everything is compiled and grows warm.
    steps = (_PAIRS.value + 2) * calls * experiment.steps_per_call
    experiment = dataclasses.replace(experiment, steps=steps, epochs=None)
    bare = _BareLoop(_trained_with(_StopsAtOnce, experiment, source, member), source)
    turns = _Turns(calls, lambda: bare.secs(calls))
    run = _trained_with(turns.reporter, experiment, source, member).run
    if (run.execution, run.num_devices) != (bare.run.execution, bare.run.num_devices):
        raise UserError(
            "The trainer and the bare loop run members alike. Received: "
            f"{run.execution} on {run.num_devices} devices and {bare.run.execution} on "
            f"{bare.run.num_devices}. Set --config.execution, or raise --pairs."
        )
    ratios = []
    for secs, before, after in zip(
        turns.trainer_secs[1:], turns.bare_secs[:-1], turns.bare_secs[1:], strict=True
    ):
        ratios.append(statistics.mean((before, after)) / secs)
        print(
            f"{1e3 * secs / calls:,.1f} ms a call of the trainer, {1e3 * before / calls:,.1f} and "
            f"{1e3 * after / calls:,.1f} of the bare loop before and after it"
        )
    print(
        f"median {statistics.median(ratios):.3f} of {len(ratios)} ({min(ratios):.3f} to "
        f"{max(ratios):.3f})"
    )


def _asked_for() -> tuple[Experiment, Source, Member | None]:
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


def _trained_with(
    reporter: type[report.TrainingReporter],
    experiment: Experiment,
    source: Source,
    member: Member | None,
) -> Trained:
    """What the trainer leaves that tells its calls to this reporter."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("dist_ens.report.TrainingReporter", reporter),
    ):
        return train(experiment, folder, member=member, source=source)


class _StopsAtOnce(report.TrainingReporter):
    """Ends a run after its first call, as Ctrl-C does."""

    def updated(self, *args: Any) -> None:
        super().updated(*args)
        signal.raise_signal(signal.SIGINT)


class _BareLoop:
    """The update of a run's ensemble, again and again."""

    def __init__(self, trained: Trained, source: Source) -> None:
        self.run = trained.run
        self._ensemble, self._state = trained.ensemble, trained.state
        steps = self.run.experiment.steps_per_call
        self._batches = next(
            feed(
                source,
                self.run.order,
                trained.ensemble.layout,
                seed=0,
                first_step=0,
                last_step=steps,
                steps_per_call=steps,
            )
        )

    def secs(self, num_calls: int) -> float:
        """That some calls take, queued one after another."""
        since = time.perf_counter()
        for _ in range(num_calls):
            self._state, _ = self._ensemble.update_steps(self._state, self._batches)
        jax.block_until_ready(self._state)
        return time.perf_counter() - since


class _Turns:
    """Seconds of the trainer's turns, each of which ends with one of the bare loop.

    Args:
        num_calls: Of the update, in a turn.
        bare_turn: Gives the seconds of the bare loop's.
    """

    def __init__(self, num_calls: int, bare_turn: Callable[[], float]) -> None:
        self.trainer_secs: list[float] = []
        self.bare_secs: list[float] = []
        turns = self

        class Reporter(report.TrainingReporter):
            """Is told of every call when it is dispatched, before what it leaves is saved."""

            _num_calls = 0
            _since: float | None = None

            def updated(self, previous_step: int, step: int, metrics: Any) -> None:
                super().updated(previous_step, step, metrics)
                self._num_calls += 1
                if self._num_calls % num_calls:
                    return
                jax.block_until_ready(metrics)
                if self._since is not None:
                    turns.trainer_secs.append(time.perf_counter() - self._since)
                    turns.bare_secs.append(bare_turn())
                self._since = time.perf_counter()

        self.reporter = Reporter


if __name__ == "__main__":
    cli.run(main, _CONFIG.prepare)
