"""Lakshminarayanan et al. (2017), Figures 2 and 3: MNIST by ensembles of MLPs, and notMNIST.

    python -m benchmarks.papers.mnist --data=DIR --ood=DIR [--json=FILE]

One run trains 15 MLPs with BatchNorm and three layers of 200 units. Ensembles of the first 1, 5, 10
and 15 members are scored on MNIST's test split. They are also scored by how well their uncertainty
separates notMNIST from MNIST. Both folders hold IDX files.

Source: https://arxiv.org/abs/1612.01474.
"""

import dataclasses
import pathlib
import tempfile
import time
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dist_ens.ensemble import Ensemble
from dist_ens.experiment import (
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    open_source,
)
from dist_ens.experiment.assessment import (
    EvaluationRequest,
    assess,
)
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.record import Run
from dist_ens.experiment.train import train
from dist_ens.ground.state import State
from dist_ens.layout import Layout
from dist_ens.report.files import to_json
from launch import cli
from launch.path_flags import define_file, define_path

_DATA = define_path("data", None, "Folder of MNIST's IDX files.")
_OOD = define_path("ood", None, "Folder of notMNIST's IDX files.")
_EPOCHS = flags.DEFINE_float("epochs", 10.0, "Number of training epochs.", lower_bound=0.01)
_JSON = define_file("json", None, "JSON file to write the results to.")
_SIZES = (1, 5, 10, 15)


def main() -> None:
    """Trains the members, and prints a table with a row for each size of ensemble."""
    experiment = Experiment(
        num_members=max(_SIZES),
        epochs=_EPOCHS.value,
        steps_per_call=10,
        data=DataConfig(
            source=f"idx:{cli.required(_DATA, 'data/mnist')}",
            global_batch_size=100,
            examples="permuted",
            std=(255.0,),
        ),
        model=ModelConfig(
            name="mlp_bn_dropout",
            options={"hidden_sizes": (200, 200, 200), "dropout_rate": 0.0},
        ),
        optimizer=OptimizerConfig(name="adam", learning_rate=1e-3),
    )
    source, ood = open_source(experiment.data), f"idx:{cli.required(_OOD, 'data/notmnist')}"
    cli.check_outputs(_JSON)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        train(experiment, pathlib.Path(workdir), source=source)
        seconds = time.monotonic() - started
        finished = open_finished(pathlib.Path(workdir))
        for size in _SIZES:
            ensemble, part = _first(finished.config_run, finished.state, size)
            evaluator = finished.config_run.evaluator(ensemble)
            told = assess(
                finished.config_run, evaluator, part, source, EvaluationRequest(ood=ood)
            ).to_dict()
            names = ("test", "mean_member", "ood", "ood_interval")
            found.append({"num_members": size, **{name: told[name] for name in names}})
    console = Console(markup=False, highlight=False, width=110)
    console.print(_table(found))
    console.print(f"Trained {max(_SIZES)} members in {seconds:.0f} s.")
    if _JSON.value is not None:
        cli.write_file(_JSON, to_json({"sizes": found}, indent=2) + "\n")


def _first(run: Run, state: State, size: int) -> tuple[Ensemble, State]:
    """Returns the ensemble and the state of the first members, on one device."""
    layout = Layout.make(size, ensemble_axis=1, devices=jax.devices()[:1])
    experiment = dataclasses.replace(run.experiment, num_members=size)
    ensemble = build_ensemble(dataclasses.replace(run, experiment=experiment), layout)
    part = jax.tree.map(lambda leaf: leaf[:size], state._replace(opt_state=()))
    return ensemble, layout.put(part, "members")


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(title="MNIST, and notMNIST out of distribution", title_justify="left")
    columns = (
        "members",
        "error",
        "NLL",
        "Brier",
        "ECE",
        "entropy",
        "on notMNIST",
        "AUROC by entropy",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for each in found:
        test, told = each["test"], each["ood"]["ensemble"]["entropy"]
        table.add_row(
            str(each["num_members"]),
            f"{1 - test['accuracy']:.2%}",
            *(f"{test[name]:.4f}" for name in ("nll", "brier", "ece", "entropy")),
            *(f"{told[name]:.4f}" for name in ("mean_out", "auroc")),
        )
    return table


if __name__ == "__main__":
    cli.run(main)
