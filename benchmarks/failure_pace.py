"""Benchmark of the checks for failed updates: the time of a step with them over that without.

    python -m benchmarks.failure_pace --workload=W3

Two ensembles of the same members repeat the update of the same batches, which are on the devices.
One has a policy for failed updates, the other has none. They are timed in interleaved rounds. The
median of the ratios and their range are printed, for each execution.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

import dist_ens as de
from benchmarks.workloads import WORKLOADS, Workload
from dist_ens.experiment import make_optimizer
from dist_ens.layout import BATCHES
from launch import cli

_WORKLOAD = flags.DEFINE_enum("workload", "W3", ["W3", "W4", "W5"], "Workload to train.")
_EXECUTIONS = flags.DEFINE_list("executions", ["vmap", "map"], "Executions to time, in this order.")
_POLICY = flags.DEFINE_string("policy", "skip", "Policy of the ensemble that checks its updates.")
_PAIRS = flags.DEFINE_integer("pairs", 15, "Number of rounds.", lower_bound=1)
_TURN_SECS = 0.5


def main() -> None:
    """Prints a line for each execution."""
    workload = WORKLOADS[_WORKLOAD.value]()
    for execution in _EXECUTIONS.value:
        ways = [_Training(workload, execution, failures) for failures in (_POLICY.value, None)]
        counts = [way.calls_of_a_turn() for way in ways]
        ratios = []
        for _ in range(_PAIRS.value):
            checked, plain = (way.secs(count) for way, count in zip(ways, counts, strict=True))
            ratios.append(checked / plain)
        print(
            f"{workload.name}, {execution}, {_POLICY.value}: {statistics.median(ratios):.3f} of "
            f"the time without checks (median of {len(ratios)} rounds, {min(ratios):.3f} to "
            f"{max(ratios):.3f}); {1e3 * plain:.4g} ms per step without"
        )


class _Training:
    """An ensemble that repeats one call of its update.

    Args:
        workload: The ensemble to train, and its data.
        execution: Execution of the ensemble.
        failures: Policy for failed updates; None for no checks.
    """

    def __init__(self, workload: Workload, execution: str, failures: str | None) -> None:
        layout = de.Layout.make(workload.num_members, devices=jax.devices()[:1])
        ensemble = de.Ensemble(
            workload.member,
            make_optimizer(workload.optimizer),
            workload.objective,
            num_members=workload.num_members,
            layout=layout,
            execution=execution,
            failure_policy=failures,
        )
        shape = (workload.steps_per_call, workload.batch_size)
        order = np.random.default_rng(0).integers(len(workload.inputs), size=shape)
        batches = {"inputs": workload.inputs[order], "labels": workload.labels[order]}
        self._state = ensemble.init(jax.tree.map(lambda leaf: leaf[0], batches))
        self._batches = layout.put(batches, BATCHES)
        self._update: Callable = ensemble.update_steps
        self._steps_per_call = workload.steps_per_call

    def calls_of_a_turn(self) -> int:
        """Returns the number of calls that take a turn's time. It compiles and warms up."""
        self.secs(3)
        return max(1, int(_TURN_SECS / (self.secs(3) * self._steps_per_call)))

    def secs(self, calls: int) -> float:
        """Returns the seconds of a step in some calls."""
        started = time.perf_counter()
        for _ in range(calls):
            self._state, _ = self._update(self._state, self._batches)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - started) / (calls * self._steps_per_call)


if __name__ == "__main__":
    cli.run(main)
