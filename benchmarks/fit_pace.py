"""Benchmark of `fit`: its steps/s against the best of the loops written by hand.

    python -m benchmarks.fit_pace --workload=W1

All of them train the same ensemble on the same arrays. The rival of W1 and W2 is one `lax.scan` for
each member. The other workloads also have a loop over members and steps, and `jit(vmap)`. They are
timed inside one run of `fit`: a callback runs a turn of each rival after some calls of the update.
A turn of `fit` is compared with the mean of the best rival's turns before and after it. So a
machine that becomes slower favours neither. Checkpoints are saved at the default interval.
"""

import statistics
import tempfile
import time
from typing import Any

import jax
from absl import flags

import dist_ens as de
from benchmarks.peers.jax_loop import JaxLoop
from benchmarks.peers.jax_scan import JaxScan
from benchmarks.peers.jax_vmap import JaxVmap
from benchmarks.workloads import WORKLOADS
from dist_ens.experiment import make_optimizer
from launch import cli

_WORKLOAD = flags.DEFINE_enum("workload", "W1", ["W1", "W2", "W3", "W4"], "Workload to train.")
_PAIRS = flags.DEFINE_integer("pairs", 20, "Number of rounds.", lower_bound=1)
_TURN_SECS = 0.5


def main() -> None:
    """Prints a line for each round, then the median of the ratios and their range."""
    workload = WORKLOADS[_WORKLOAD.value]()
    rivals: dict[str, Any] = {"jax_scan": JaxScan(workload)}
    if _WORKLOAD.value not in ("W1", "W2"):
        rivals = {"jax_loop": JaxLoop(workload), "jax_vmap": JaxVmap(workload), **rivals}
    turns = _Turns({name: _calibrated(rival) for name, rival in rivals.items()}, _PAIRS.value)
    ensemble = de.Ensemble(
        workload.member,
        make_optimizer(workload.optimizer),
        workload.objective,
        num_members=workload.num_members,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = de.fit(
            ensemble,
            {"inputs": workload.inputs, "labels": workload.labels},
            steps=10**7,
            batch_size=workload.batch_size,
            order=de.data.permuted() if workload.own_batches else de.data.shared(),
            callbacks=[turns],
            checkpoints=de.Checkpoints(folder),
            progress=False,
        )
    best = min(turns.rival_ms, key=lambda name: statistics.median(turns.rival_ms[name]))
    ratios = []
    pairs = zip(turns.fit_ms, turns.rival_ms[best][:-1], turns.rival_ms[best][1:], strict=True)
    for ms, before, after in pairs:
        ratios.append(statistics.mean((before, after)) / ms)
        print(
            f"fit: {ms:.4g} ms per step; {best} before and after it: {before:.4g} and "
            f"{after:.4g} ms per step"
        )
    print(
        f"{workload.name}: fit ({result.ensemble.execution}, mesh {result.ensemble.layout}) has "
        f"{statistics.median(ratios):.3f} of the steps/s of {best} (median of {len(ratios)} "
        f"rounds, {min(ratios):.3f} to {max(ratios):.3f})"
    )


def _calibrated(rival: Any) -> tuple[Any, int]:
    """Returns a rival and the number of its steps in a turn. Its program has been compiled."""
    steps = 1
    while True:
        rival.run(steps)
        started = time.perf_counter()
        rival.run(steps)
        secs = time.perf_counter() - started
        if secs >= _TURN_SECS:
            return rival, steps
        steps = max(steps + 1, int(1.2 * steps * _TURN_SECS / secs))


class _Turns:
    """A callback that ends a turn of `fit` after some time, and then runs a turn of each rival.

    Args:
        rivals: Rivals by name, each with the number of its steps in a turn.
        num_pairs: Number of rounds after which the run ends.
    """

    def __init__(self, rivals: dict[str, tuple[Any, int]], num_pairs: int) -> None:
        self._rivals, self._num_pairs = rivals, num_pairs
        self.fit_ms: list[float] = []
        self.rival_ms: dict[str, list[float]] = {name: [] for name in rivals}
        self._num_calls = 0
        self._started: tuple[float, int] | None = None

    def __call__(self, info: de.callbacks.StepInfo) -> Any:
        """Ends a turn that has taken long enough, and ends the run after the last turn."""
        self._num_calls += 1
        if self._num_calls < 5:  # The first calls compile and warm up.
            return None
        if self._started is None:
            jax.block_until_ready(info.state)
            self._take_turns()
            self._started = (time.perf_counter(), info.step)
            return None
        started, step = self._started
        if time.perf_counter() - started < _TURN_SECS:
            return None
        jax.block_until_ready(info.state)
        self.fit_ms.append(1e3 * (time.perf_counter() - started) / (info.step - step))
        self._take_turns()
        self._started = (time.perf_counter(), info.step)
        return de.callbacks.STOP if len(self.fit_ms) >= self._num_pairs else None

    def _take_turns(self) -> None:
        for name, (rival, steps) in self._rivals.items():
            started = time.perf_counter()
            rival.run(steps)
            self.rival_ms[name].append(1e3 * (time.perf_counter() - started) / steps)


if __name__ == "__main__":
    cli.run(main)
