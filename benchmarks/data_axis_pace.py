"""Benchmark of the update on a data axis: the time of a step over that of another checkout.

    python -m benchmarks.data_axis_pace --other=FOLDER --workloads=W3,W4,W6 --meshes=1x2,2x2

Both checkouts repeat the update of the same batches on the same fake CPU devices, each in a process
of its own. The processes are timed in interleaved rounds, and each sleeps during the other's turn.
The median of the ratios and their range are printed. Below 1, this checkout is faster.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import IO, cast

from absl import flags

_OTHER = flags.DEFINE_string("other", None, "Folder of the other checkout.", required=True)
_WORKLOADS = flags.DEFINE_list("workloads", ["W3", "W4", "W6"], "Workloads to train.")
_MESHES = flags.DEFINE_list("meshes", ["1x2", "2x2"], "Meshes, ensemble x data.")
_PAIRS = flags.DEFINE_integer("pairs", 7, "Number of rounds.", lower_bound=1)
_EXECUTIONS = {"W3": "unroll", "W4": "unroll+canonical+masks", "W6": "unroll+flat"}
_THIS = pathlib.Path(__file__).resolve()
_TURN_SECS = 1.0


def main() -> None:
    """Prints a line for each workload and mesh."""
    for name in _WORKLOADS.value:
        for mesh in _MESHES.value:
            ways = [_Process(folder, name, mesh) for folder in (_THIS.parents[1], _OTHER.value)]
            ratios = []
            for _ in range(_PAIRS.value):
                mine, other = (way.secs() for way in ways)
                ratios.append(mine / other)
            for way in ways:
                way.end()
            print(
                f"{name}, {mesh}, {_EXECUTIONS[name]}: {statistics.median(ratios):.3f} of the time "
                f"of the other checkout (median of {len(ratios)} rounds, {min(ratios):.3f} to "
                f"{max(ratios):.3f}); {1e3 * other:.4g} ms per step there",
                flush=True,
            )


class _Process:
    """A process that trains a workload with the code of a checkout, a turn at a time."""

    def __init__(self, folder: str | pathlib.Path, workload: str, mesh: str) -> None:
        rows, columns = map(int, mesh.split("x"))
        devices = f"--xla_force_host_platform_device_count={rows * columns}"
        # Without `-P`, Python would look for modules in the folder of this file first.
        self._process = subprocess.Popen(
            [sys.executable, "-P", _THIS, workload, str(rows), str(columns)],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._questions = cast(IO[str], self._process.stdin)
        self._answers = cast(IO[str], self._process.stdout)
        self.secs()  # It compiles and warms up.

    def secs(self) -> float:
        """Returns the seconds of a step in one turn."""
        print(file=self._questions, flush=True)
        return float(self._answers.readline())

    def end(self) -> None:
        """Ends the process."""
        self._questions.close()
        self._process.wait()


def take_turns(name: str, rows: int, columns: int) -> None:
    """Trains for a turn for each line of standard input, and prints the seconds of a step."""
    import jax
    import numpy as np

    import dist_ens as de
    from benchmarks.workloads import WORKLOADS
    from dist_ens.experiment import make_optimizer
    from dist_ens.layout import BATCHES

    workload = WORKLOADS[name]()
    layout = de.Layout.make(
        workload.num_members, ensemble_axis=rows, devices=jax.devices()[: rows * columns]
    )
    ensemble = de.Ensemble(
        workload.member,
        make_optimizer(workload.optimizer),
        workload.objective,
        num_members=workload.num_members,
        layout=layout,
        execution=_EXECUTIONS[name],
    )
    shape = (workload.steps_per_call, workload.batch_size)
    order = np.random.default_rng(0).integers(len(workload.inputs), size=shape)
    batches = {"inputs": workload.inputs[order], "labels": workload.labels[order]}
    state = ensemble.init(jax.tree.map(lambda leaf: leaf[0], batches))
    batches = layout.put(batches, BATCHES)
    for _ in sys.stdin:
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < _TURN_SECS:
            # A few calls in flight at most: the collectives of a CPU may hang with many.
            state, _ = ensemble.update_steps(state, batches)
            jax.block_until_ready(state)
            steps += workload.steps_per_call
        print((time.perf_counter() - started) / steps, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("--"):
        take_turns(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        from launch import cli

        cli.run(main)
