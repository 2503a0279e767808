"""Benchmark of `fit`, `update` and `predict`: their time over that of another checkout.

    python -m benchmarks.checkout_pace --other=FOLDER --what=fit,update,predict
    python -m benchmarks.checkout_pace --other=FOLDER --what=update --meshes=1x2,2x2

Both checkouts repeat the same work on the same fake CPU devices, each in a process of its own. The
processes are timed in interleaved rounds, and each sleeps during the other's turn. The median of
the ratios and their range are printed. Below 1, this checkout is faster.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, cast

from absl import flags

_OTHER = flags.DEFINE_string("other", None, "Folder of the other checkout.", required=True)
_WHAT = flags.DEFINE_list("what", ["fit", "update", "predict"], "What to time.")
_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W3", "W6"], "Workloads to train.")
_MESHES = flags.DEFINE_list("meshes", ["1x1"], "Meshes, ensemble x data.")
_PAIRS = flags.DEFINE_integer("pairs", 9, "Number of rounds.", lower_bound=1)
_EXECUTIONS = {
    "W1": "vmap",
    "W2": "vmap",
    "W3": "unroll",
    "W4": "unroll+canonical+masks",
    "W6": "unroll+flat",
}
_THIS = pathlib.Path(__file__).resolve()
_TURN_SECS = 1.0


def main() -> None:
    """Prints a line for each function, workload and mesh."""
    for what in _WHAT.value:
        for workload in _WORKLOADS.value:
            for mesh in _MESHES.value:
                _compare(what, workload, mesh)


def _compare(what: str, workload: str, mesh: str) -> None:
    """Times both checkouts in turns, and prints the ratio."""
    checkouts = [
        _Process(folder, what, workload, mesh) for folder in (_THIS.parents[1], _OTHER.value)
    ]
    rounds = [[checkout.secs() for checkout in checkouts] for _ in range(_PAIRS.value)]
    for checkout in checkouts:
        checkout.end()
    ratios = [mine / other for mine, other in rounds]
    print(
        f"{what}, {workload}, {mesh}, {_EXECUTIONS[workload]}: {statistics.median(ratios):.3f} of "
        f"the time of the other checkout (median of {len(ratios)} rounds, {min(ratios):.3f} to "
        f"{max(ratios):.3f}); {1e3 * rounds[-1][1]:.4g} ms there",
        flush=True,
    )


class _Process:
    """A process that repeats the work with the code of a checkout, a turn at a time."""

    def __init__(self, folder: str | pathlib.Path, what: str, workload: str, mesh: str) -> None:
        rows, columns = mesh.split("x")
        devices = f"--xla_force_host_platform_device_count={int(rows) * int(columns)}"
        # Without `-P`, Python would look for modules in the folder of this file first.
        self._process = subprocess.Popen(
            [sys.executable, "-P", _THIS, what, workload, rows, columns],
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
        """Returns the seconds of a step or a prediction in one turn."""
        print(file=self._questions, flush=True)
        return float(self._answers.readline())

    def end(self) -> None:
        """Ends the process."""
        self._questions.close()
        self._process.wait()


def take_turns(what: str, name: str, rows: int, columns: int) -> None:
    """Works for a turn for each line of standard input, and prints the seconds of a step."""
    import jax
    import numpy as np
    import optax

    import dist_ens as de
    from benchmarks.workloads import WORKLOADS
    from dist_ens.layout import BATCHES

    workload = WORKLOADS[name]()
    layout = de.Layout.make(
        workload.num_members, ensemble_axis=rows, devices=jax.devices()[: rows * columns]
    )
    ensemble = de.Ensemble(
        workload.member,
        optax.adam(1e-3),
        workload.objective,
        num_members=workload.num_members,
        layout=layout,
        execution=_EXECUTIONS[name],
    )
    if what == "fit":
        data = {"inputs": workload.inputs, "labels": workload.labels}
        options: dict[str, Any] = {"batch_size": workload.batch_size, "progress": False}
        de.fit(ensemble, data, steps=10**7, callbacks=[_Turns()], **options)
        return
    shape = (workload.steps_per_call, workload.batch_size)
    order = np.random.default_rng(0).integers(len(workload.inputs), size=shape)
    batches = {"inputs": workload.inputs[order], "labels": workload.labels[order]}
    state = ensemble.init(jax.tree.map(lambda leaf: leaf[0], batches))
    if what == "predict":
        inputs = workload.inputs[:32]
        _repeat(lambda: jax.block_until_ready(ensemble.predict(state, inputs).mean), 1)
        return
    batches = layout.put(batches, BATCHES)

    def update() -> None:
        nonlocal state
        # A few calls in flight at most: the collectives of a CPU may hang with many.
        state, _ = ensemble.update_steps(state, batches)
        jax.block_until_ready(state)

    _repeat(update, workload.steps_per_call)


def _repeat(work: Callable[[], Any], steps_of_a_call: int) -> None:
    """Repeats a function for a turn for each line of standard input."""
    for _ in sys.stdin:
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < _TURN_SECS:
            work()
            steps += steps_of_a_call
        print((time.perf_counter() - started) / steps, flush=True)


class _Turns:
    """A callback that ends a turn after some time, and waits for the next one."""

    def __init__(self) -> None:
        self._started: tuple[float, int] | None = None

    def __call__(self, info: Any) -> Any:
        """Prints the seconds of a step when a turn ends. The end of the input ends the run."""
        import jax

        from dist_ens.callbacks import STOP

        if self._started is not None:
            started, step = self._started
            if time.perf_counter() - started < _TURN_SECS:
                return None
            jax.block_until_ready(info.state)
            print((time.perf_counter() - started) / (info.step - step), flush=True)
        else:
            jax.block_until_ready(info.state)
        if not sys.stdin.readline():
            return STOP
        self._started = (time.perf_counter(), info.step)
        return None


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("--"):
        take_turns(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        from launch import cli

        cli.run(main)
