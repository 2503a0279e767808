"""Experiments on sweeps in one program: what they find, and what they cost.

    python -m benchmarks.sweeps --data=DIR --experiment=chosen
    python -m benchmarks.sweeps --data=DIR --experiment=halving --table=kin8nm --seeds=20
    python -m benchmarks.sweeps --data=DIR --experiment=stopping --seeds=2
    python -m benchmarks.sweeps --data=DIR --experiment=cost

DIR is a folder with `mnist/` in the original files and `uci/NAME.npz`.

- `chosen` trains 32 members with drawn settings. The five that `select` chooses are compared with
  the best member, and with five new members that have the settings of the best one.
- `halving` trains 64 members with `SuccessiveHalving` and without it. The five that are then chosen
  are compared. FLOPs are those of the update, compiled as `vmap` on one device for the number of
  members in the arrays, multiplied by the steps.
- `stopping` trains 16 LeNet-5, of which 8 stop after half of the steps, with `compact="auto"` and
  with `compact="never"`. Each run has a process of its own with empty caches. The seconds of the
  cores are those of all threads of the process, which other processes change less.
- `cost` compiles the update of 64 members with different settings and with one setting.

Members and settings are chosen on validation data, and all scores are those of the test data.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from absl import flags

import dist_ens as de
from dist_ens.data.idx import open_idx, open_idx_test
from dist_ens.ground.types import PyTree
from dist_ens.layout import BATCHES
from dist_ens.members import Member
from dist_ens.models.convolutional import lenet5
from launch import cli
from launch.path_flags import define_path

_DATA = define_path("data", os.environ.get("DIST_ENS_DATA"), "Folder of the data sets.")
_EXPERIMENT = flags.DEFINE_enum(
    "experiment", "chosen", ["chosen", "halving", "stopping", "cost"], "Experiment to run."
)
_TABLE = flags.DEFINE_string("table", None, "UCI table of `halving`. Default: MNIST.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Number of seeds, or of pairs.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 4000, "Steps of `stopping`.", lower_bound=4)
_EXECUTION = flags.DEFINE_string("execution", "auto", "Execution of `stopping`.")
_COMPACT = flags.DEFINE_enum(
    "compact", None, ["auto", "never"], "Time one run of `stopping` in this process; print JSON."
)

_SETTINGS = {
    "learning_rate": de.hyper.log_uniform(1e-4, 1e-1),
    "weight_decay": de.hyper.log_uniform(1e-5, 1e-1),
    "dropout": de.hyper.uniform(0.0, 0.5),
}
_NUM_TRAIN, _NUM_VALIDATION = 10_000, 2_000  # Images of MNIST.
_MNIST_STEPS = 480  # 6 epochs in batches of 128.
_TABLE_STEPS = 12_000  # Long enough that the last leaving spares more time than compiling takes.
_PARTS = 8  # Halving after 1, 2 and 3 of 8 parts takes 0.297 of all updates.


def main() -> None:
    """Prints a line for each seed or run, then the row of the table."""
    {"chosen": _chosen, "halving": _halving, "stopping": _stopping, "cost": _cost}[
        _EXPERIMENT.value
    ]()


class _Mlp(nn.Module):
    hidden_sizes: Sequence[int]
    num_outputs: int
    scale: float

    @nn.compact
    def __call__(
        self, x: jax.Array, train: bool, hyper: Mapping[str, jax.Array] | None = None
    ) -> jax.Array:
        x = x.reshape(len(x), -1) / self.scale
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size)(x))
            if train:
                rate = hyper["dropout"] if hyper else 0.1
                x = de.models.dropout(x, rate, self.make_rng("dropout"))
        return nn.Dense(self.num_outputs)(x)


def _adamw(hyper: Mapping[str, jax.Array]) -> optax.GradientTransformation:
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["weight_decay"])


def _sweep(objective: Any, num_members: int, hyper: Mapping[str, Any], seed: int) -> de.Ensemble:
    """Returns an ensemble of small MLPs, for images of MNIST or for a table."""
    num_outputs = objective.num_outputs
    mlp = _Mlp((128, 128), num_outputs, 255.0 if num_outputs == 10 else 1.0)
    return de.Ensemble(mlp, _adamw, objective, num_members=num_members, hyper=hyper, seed=seed)


def _images(seed: int) -> tuple[PyTree, PyTree, PyTree]:
    """Returns training and validation images that are drawn by a seed, and all test images."""
    folder = str(_DATA.value / "mnist")
    train, test = open_idx(folder).train, open_idx_test(folder)
    rows = np.random.default_rng(seed).permutation(len(train))
    return (
        train.take(rows[:_NUM_TRAIN]),
        train.take(rows[_NUM_TRAIN : _NUM_TRAIN + _NUM_VALIDATION]),
        test.take(np.arange(len(test))),
    )


def _rows(seed: int) -> tuple[PyTree, PyTree, PyTree]:
    """Returns training, validation and test rows of a split of a UCI table."""
    file = np.load(_DATA.value / "uci" / f"{_TABLE.value}.npz")
    inputs = file["data"][:, file["index_features"]].astype(np.float32)
    labels = file["data"][:, int(file["index_target"])].astype(np.float32)
    rows = np.random.default_rng(seed).permutation(file["train_idx"][seed])
    train, validation = rows[: -len(rows) // 5], rows[-len(rows) // 5 :]
    scale = inputs[train].std(axis=0)
    inputs = (inputs - inputs[train].mean(axis=0)) / np.where(scale > 0, scale, 1)
    parts = train, validation, file["test_idx"][seed]
    found = [{"inputs": inputs[part], "labels": labels[part]} for part in parts]
    return found[0], found[1], found[2]


def _trained(ensemble: de.Ensemble, data: PyTree, **options: Any) -> Any:
    """Returns the result of `fit`, and ends the process if a signal stopped the run."""
    result = de.fit(ensemble, data, **options)
    if result.signal is not None:
        raise SystemExit("A signal stopped the run, so nothing is compared.")
    return result


def _test_nll(ensemble: de.Ensemble, state: de.State, test: PyTree, **options: Any) -> float:
    return de.evaluate(ensemble, state, test, intervals=False, **options).ensemble["nll"]


def _chosen() -> None:
    """Compares five chosen members with the best one, and with five of the best settings."""
    objective, found = de.losses.categorical(10), []
    options: dict[str, Any] = {"steps": _MNIST_STEPS, "batch_size": 128, "progress": False}
    for seed in range(_SEEDS.value):
        train, validation, test = _images(seed)
        sweep = _sweep(objective, 32, _SETTINGS, seed)
        state = _trained(sweep, train, **options).state
        five = de.select(sweep, state, validation, size=5)
        best = de.select(sweep, state, validation, size=1)
        hyper = {name: float(values[0]) for name, values in best.ensemble.hyper.items()}
        same = _sweep(objective, 5, hyper, 1000 + seed)
        five_nll = _test_nll(five.ensemble, five.state, test, weights=np.array(five.weights))
        best_nll = _test_nll(best.ensemble, best.state, test)
        same_nll = _test_nll(same, _trained(same, train, **options).state, test)
        found.append((five_nll, best_nll, same_nll))
        print(f"seed {seed}: {five_nll:.4f}, best {best_nll:.4f}, 5 of its settings {same_nll:.4f}")
        print(f"  {dict(zip(five.member_ids, five.weights, strict=True))}, best settings {hyper}")
    nll = np.array(found)
    print(
        f"| 5 chosen of 32 | {nll[:, 0].mean():.4f} | {nll[:, 1].mean():.4f} "
        f"| {_difference(nll[:, 0] - nll[:, 1])} | {nll[:, 2].mean():.4f} "
        f"| {_difference(nll[:, 0] - nll[:, 2])} |"
    )


def _difference(values: np.ndarray) -> str:
    """Returns the mean of paired differences, with its 95 % interval of Student's t."""
    from scipy.stats import t

    if len(values) == 1:
        return f"{values.mean():+.4f}"
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return f"{values.mean():+.4f} ({values.mean() - half:+.4f} to {values.mean() + half:+.4f})"


def _halving() -> None:
    """Compares five members chosen after successive halving with five chosen of all."""
    is_table = _TABLE.value is not None
    objective = de.losses.gaussian(standardize=True) if is_table else de.losses.categorical(10)
    steps, batch_size = (_TABLE_STEPS, 100) if is_table else (5 * _MNIST_STEPS, 128)
    every = steps // _PARTS
    num_inside = num_better = 0
    shares, differences, secs = [], [], []
    flops: dict[int, float] = {}  # Of an update, by the number of members.
    for seed in range(_SEEDS.value):
        train, validation, test = _rows(seed) if is_table else _images(seed)
        scores = {}
        for name in ("all", "halved"):
            sweep = _sweep(objective, 64, _SETTINGS, seed)
            halving = de.callbacks.SuccessiveHalving("nll", every=every, least=8)
            started = time.perf_counter()
            result = _trained(
                sweep,
                train,
                steps=steps,
                batch_size=batch_size,
                eval_data=validation,
                eval_every=every,
                callbacks=[halving] if name == "halved" else [],
                progress=False,
            )
            secs.append(time.perf_counter() - started)
            five = de.select(sweep, result.state, validation, size=5)
            scores[name] = de.evaluate(
                five.ensemble, five.state, test, weights=np.array(five.weights)
            )
        batch = {name: leaf[:batch_size] for name, leaf in train.items()}
        of_run = 0.0
        for first, last in itertools.pairwise([*result.num_computed, steps]):
            count = result.num_computed[first]
            if count not in flops:
                some = _sweep(objective, count, _SETTINGS, 0)
                flops[count] = _cost_of(some, batch)["flops"]
            of_run += flops[count] * (last - first)
        shares.append(of_run / (flops[64] * steps))
        nll = {name: each.ensemble["nll"] for name, each in scores.items()}
        low, high = (scores["all"].intervals or {})["ensemble"]["nll"]
        num_inside += low <= nll["halved"] <= high
        num_better += nll["halved"] < low
        differences.append(nll["halved"] - nll["all"])
        print(
            f"seed {seed}: {nll['halved']:.4f}, of all {nll['all']:.4f} ({low:.4f} to {high:.4f}); "
            f"{secs[-1]:.1f} s, all {secs[-2]:.1f} s; members {dict(result.num_computed)}",
            flush=True,
        )
    print(
        f"| {_TABLE.value or 'MNIST'} | {np.mean(shares):.3f} ({min(shares):.3f} to "
        f"{max(shares):.3f}) | {num_inside} of {_SEEDS.value} "
        f"| {num_better} | {_difference(np.array(differences))} "
        f"| {np.median(np.divide(secs[1::2], secs[::2])):.2f} |"
    )


class _StopsHalf:
    """A callback that stops the members 0, 2, 4, … after half of the steps."""

    stops_members = True

    def __init__(self, num_members: int, steps: int) -> None:
        self._ids, self.every = range(0, num_members, 2), steps // 2

    def __call__(self, info: de.callbacks.StepInfo) -> Any:
        return de.callbacks.stop_members(self._ids) if info.step < 2 * self.every else None


def _stopping() -> None:
    """Compares the time of a run whose stopped members leave with that of one where they stay."""
    if _COMPACT.value is not None:
        print(json.dumps(_stopping_run(_COMPACT.value)))
        return
    ratios: dict[str, list[float]] = {"secs": [], "core_secs": []}
    for pair in range(_SEEDS.value):
        # Which of the two comes first alternates, so a machine that becomes slower favours neither.
        order = ("never", "auto") if pair % 2 == 0 else ("auto", "never")
        found = {compact: _in_new_process(compact) for compact in order}
        for name, values in ratios.items():
            values.append(found["auto"][name] / found["never"][name])
        equal = found["auto"]["others"] == found["never"]["others"]
        print(
            f"auto {found['auto']['secs']:.1f} s, never {found['never']['secs']:.1f} s; of the "
            f"cores auto {found['auto']['core_secs']:.1f} s, never "
            f"{found['never']['core_secs']:.1f} s; bits of the others "
            f"{'equal' if equal else 'differ'}",
            flush=True,
        )
    columns = " | ".join(
        f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for values in ratios.values()
    )
    print(f"| 16 x LeNet-5, `{_EXECUTION.value}` | {_SEEDS.value} | {columns} |")


def _in_new_process(compact: str) -> dict[str, Any]:
    """Returns what a run in a process of its own prints, without what other runs have cached."""
    flags_of_run = [
        f"--{name}={flags.FLAGS[name].value}" for name in ("data", "steps", "execution")
    ]
    command = [sys.executable, "-m", "benchmarks.sweeps", "--experiment=stopping", *flags_of_run]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [*command, f"--compact={compact}"],
            env=os.environ | {"XDG_CACHE_HOME": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    *said, last = ended.stdout.splitlines()
    print("\n".join(f"  {compact}: {line}" for line in said), flush=True)
    return json.loads(last)


def _stopping_run(compact: str) -> dict[str, Any]:
    import hashlib

    train, _, _ = _images(0)
    images = train["inputs"] / np.float32(255)
    member: Member = lenet5((28, 28), 10)
    started, core_started = time.perf_counter(), time.process_time()
    ensemble = de.Ensemble(
        member,
        optax.adam(1e-3),
        de.losses.categorical(10),
        num_members=16,
        execution=_EXECUTION.value,
    )
    result = _trained(
        ensemble,
        {"inputs": images, "labels": train["labels"]},
        steps=_STEPS.value,
        batch_size=64,
        callbacks=[_StopsHalf(16, _STEPS.value)],
        log_every=_STEPS.value,
        compact=compact,
    )
    jax.block_until_ready(result.state)
    found: dict[str, Any] = {
        "secs": time.perf_counter() - started,
        "core_secs": time.process_time() - core_started,
    }
    others = jax.tree.leaves(result.state.select([*range(1, 16, 2)]).params)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in others))
    return found | {"others": digest.hexdigest()}


def _cost() -> None:
    """Compares the compiled update of 64 members of different settings with that of equal ones."""
    train, _, _ = _images(0)
    batch = {name: leaf[:128] for name, leaf in train.items()}
    objective = de.losses.categorical(10)
    shared = de.Ensemble(
        _Mlp((128, 128), 10, 255.0),
        optax.adamw(1e-3, weight_decay=1e-4),
        objective,
        num_members=64,
        execution="vmap",
    )
    of_each = _cost_of(_sweep(objective, 64, _SETTINGS, 0), batch)
    of_one = _cost_of(shared, batch)
    ratios = [of_each[name] / of_one[name] for name in ("flops", "bytes accessed")]
    print(f"different settings: {of_each}\none setting: {of_one}")
    print(f"| 64 x MLP 784-128-128-10 | {ratios[0]:.4f} | {ratios[1]:.4f} |")


def _cost_of(ensemble: de.Ensemble, batch: PyTree) -> dict[str, float]:
    layout = de.Layout.make(ensemble.num_members, devices=jax.devices()[:1])
    ensemble = ensemble.on(layout, "vmap")
    batches = jax.tree.map(lambda leaf: leaf[None], batch)  # One step in a call.
    update: Any = ensemble.update_steps
    lowered = update.lower(ensemble.init(batch), ensemble.layout.put(batches, BATCHES))
    found = lowered.compile().cost_analysis()
    return {name: float(found[name]) for name in ("flops", "bytes accessed")}


if __name__ == "__main__":
    cli.run(main)
