"""Benchmark of many members: compilation, a step, evaluation, a checkpoint and the report.

    python -m benchmarks.many_members --plot=benchmarks/many_members.png

Ensembles of 8, 64, 512 and 4096 MLPs 13-50-2 are trained on random regression data, with the
execution that `fit` chooses for 10,000 steps. Each ensemble has its own process without a
compilation cache, so every program is compiled.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from dist_ens.storage import Disk
from launch import cli
from launch.path_flags import define_path

_PLOT = define_path("plot", None, "PNG file to write the plot to.")
_MEMBERS = flags.DEFINE_multi_integer("members", [8, 64, 512, 4096], "Sizes of the ensembles.")
_ONE = flags.DEFINE_integer("one", 0, "Measure one size in this process, and print JSON.")
_COLUMNS = ("compile s", "step ms", "evaluate s", "save s", "save MB", "report s", "report MB")
_STEPS = 50
_RUN_STEPS = 10_000


def main() -> None:
    """Prints a line for each size, and draws the plot."""
    if _ONE.value:
        print(json.dumps(_measured(_ONE.value)))
        return
    found: dict[int, dict[str, Any]] = {}
    print("members " + " ".join(f"{name:>10}" for name in _COLUMNS) + "  execution")
    for size in _MEMBERS.value:
        command = [sys.executable, "-m", "benchmarks.many_members", f"--one={size}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        found[size] = json.loads(ended.stdout.splitlines()[-1])
        figures = " ".join(f"{found[size][name]:>10.3g}" for name in _COLUMNS)
        print(f"{size:>7} {figures}  {found[size]['execution']}")
    if _PLOT.value is not None:
        _draw(found, _PLOT.value)


def _measured(num_members: int) -> dict[str, Any]:
    import jax
    import numpy as np
    import optax

    import dist_ens as de
    from dist_ens import report
    from dist_ens.checkpoint import Snapshot, leaves_off_devices
    from dist_ens.data import ArraySplit
    from dist_ens.data.feed import ResidentFeed, put_whole
    from dist_ens.ensemble import Drawn
    from dist_ens.ensemble.select_execution import choose
    from dist_ens.evaluation import Evaluator, curves_of
    from dist_ens.models.mlp import mlp
    from dist_ens.sampling import Order

    jax.config.update("jax_enable_compilation_cache", False)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(455, 13)).astype("f4"), random.normal(size=455).astype("f4")
    split = ArraySplit(x, y)
    ensemble = de.Ensemble(
        mlp((13,), 2, hidden_sizes=(50,)),
        optax.adam(1e-2),
        de.losses.gaussian(),
        num_members=num_members,
    )
    state = ensemble.init({"inputs": x[:100]})
    order = Order(455, 100)
    feed = ResidentFeed(put_whole(split, ensemble.layout), order, ensemble.layout, 0)
    batches: Drawn = feed(range(_STEPS))
    chosen, choice = choose(ensemble, state, batches, _RUN_STEPS, may_move=False)
    ensemble = chosen.on(chosen.layout, chosen.execution)  # A program that was not compiled before.
    found: dict[str, Any] = {"execution": choice.option}
    started = time.perf_counter()
    update: Any = ensemble.update_steps  # Without waves it is a jitted program.
    compiled = update.lower(state, batches).compile()
    found["compile s"] = time.perf_counter() - started
    state, _ = jax.block_until_ready(compiled(state, batches))
    started = time.perf_counter()
    state, _ = jax.block_until_ready(compiled(state, batches))
    found["step ms"] = 1e3 * (time.perf_counter() - started) / _STEPS
    evaluator = Evaluator(ensemble, 64, None, de.losses.gaussian().distribution)
    evaluator.evaluate(state, split, by_size=True)  # The first evaluation compiles.
    started = time.perf_counter()
    evaluation = evaluator.evaluate(state, split, by_size=True)
    scores = evaluation.scores(intervals=True)
    found["evaluate s"] = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        record = _record(num_members)
        with de.Checkpoints(workdir / "run").open(record) as opened:
            opened.save(Snapshot(1, leaves_off_devices(state), record))
            opened.wait()
            started = time.perf_counter()
            opened.save(Snapshot(2, leaves_off_devices(state), record))
            opened.wait()
            found["save s"] = time.perf_counter() - started
            newest = workdir / "run" / "checkpoints" / "2"
            found["save MB"] = _megabytes(newest)
        summary = {"test": scores.ensemble, "mean_member": scores.mean_member, **scores.to_dict()}
        started = time.perf_counter()
        report.write_report(Disk(workdir), summary, curves_of(evaluation), [])
        found["report s"] = time.perf_counter() - started
        found["report MB"] = (workdir / report.PAGE).stat().st_size / 1e6
    return found


def _record(num_members: int) -> dict[str, object]:
    from dist_ens.checkpoint import StepRecord

    return StepRecord(
        member="mlp",
        optimizer="adam",
        loss="gaussian",
        methods=(),
        num_members=num_members,
        member_ids=tuple(range(num_members)),
        seed=0,
        batch="",
        fingerprint=None,
        versions={},
    ).to_dict()


def _megabytes(folder: pathlib.Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _draw(found: dict[int, dict[str, Any]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name in _COLUMNS:
        axis = axes[int(name.endswith("MB"))]
        axis.loglog([*found], [each[name] for each in found.values()], marker="o", label=name)
    for axis, label in zip(axes, ("seconds, or ms a step", "MB"), strict=True):
        axis.set_xlabel("members")
        axis.set_ylabel(label)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    cli.run(main)
