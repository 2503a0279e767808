"""Lakshminarayanan et al. (2017), Table 1: regression on UCI tables, ensembles of five.

    python -m benchmarks.papers.uci --data=DIR [--adversarial] [--json=FILE]

Each table is one run of `dist-ens train` with `configs/uci.py`: 5 members on each of 20 splits (5
splits for the protein table), trained as one program for 40 epochs. `DIR` holds the tables as
NAME.npz.

Source: https://arxiv.org/abs/1612.01474.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
from rich.console import Console
from rich.table import Table

from dist_ens.ground.errors import RunError
from dist_ens.report.files import to_json
from launch import cli
from launch.path_flags import define_file, define_path

_DATA = define_path("data", None, "Folder of the tables.")
_TABLES = flags.DEFINE_list("tables", None, "Tables to train; all if not given.")
_ADVERSARIAL = flags.DEFINE_bool("adversarial", False, "Train on adversarial examples too.")
_JSON = define_file("json", None, "JSON file to write the results to.")
_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "uci.py"


class Published(NamedTuple):
    """The published results of a table, and the settings that differ for it.

    Attributes:
        rmse: Published RMSE, in the unit of the target.
        nll: Published NLL, in nats.
        changes: Flags of `dist-ens train` that this table needs.
    """

    rmse: float
    nll: float
    changes: tuple[str, ...] = ()


PUBLISHED = {
    "bostonHousing": Published(3.28, 2.41),
    "concrete": Published(6.03, 3.06),
    "energy": Published(2.09, 1.38),
    "kin8nm": Published(0.09, -1.20),
    "naval-propulsion-plant": Published(0.00, -5.63, ("--config.optimizer.learning_rate=0.003",)),
    "protein-tertiary-structure": Published(4.71, 2.83, ("--config.model.hidden_sizes=(100,)",)),
    "yacht": Published(1.58, 1.18),
}


def main() -> None:
    """Trains the tables one after another, and prints their results beside the published ones."""
    folder = cli.required(_DATA, "data/uci")
    console = Console(markup=False, highlight=False, width=110)
    names = list(PUBLISHED)
    if _TABLES.value is not None:
        names = cli.names(_TABLES, PUBLISHED)
    cli.check_outputs(_JSON)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as workdirs:
        for name in names:
            started = time.monotonic()
            summary = _trained(name, folder / f"{name}.npz", pathlib.Path(workdirs) / name)
            found[name] = {
                "seconds": time.monotonic() - started,
                "num_members": summary["num_members"],
                **{key: summary[key] for key in ("test", "test_std", "mean_member")},
            }
            told = found[name]
            console.print(f"{name}: {told['num_members']} members, {told['seconds']:.0f} s")
    console.print(_table(found))
    total = sum(each["seconds"] for each in found.values())
    members = sum(each["num_members"] for each in found.values())
    console.print(f"{members} members in {total:.0f} s.")
    if _JSON.value is not None:
        cli.write_file(_JSON, to_json(found, indent=2) + "\n")


def _trained(name: str, table: pathlib.Path, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains on one table, and returns the summary of the run.

    Args:
        name: Name of the table.
        table: File of the table.
        workdir: Folder of the run.

    Raises:
        RunError: If training fails.
    """
    changes = [*PUBLISHED[name].changes]
    if _ADVERSARIAL.value:
        changes.append("--config.loss.adversarial=0.01")
    command = [
        *(sys.executable, "-m", "launch.train", f"--config={_CONFIG}", f"--workdir={workdir}"),
        *(f"--config.data.source=uci:{table}", *changes),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RunError(
            f"Training on the table {name} failed with exit code {ended.returncode}: "
            f"{ended.stderr} Correct the error and run the command again, with --tables={name}."
        )
    return json.loads((workdir / "summary.json").read_text(encoding="utf-8"))


def _table(found: dict[str, Any]) -> Table:
    table = Table(
        title="Means over the splits, +- the standard deviation over the splits",
        title_justify="left",
    )
    columns = ("", "RMSE", "published", "NLL", "published", "NLL of a member", "CRPS", "seconds")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, each in found.items():
        test, std, published = each["test"], each["test_std"], PUBLISHED[name]
        table.add_row(
            name,
            f"{test['rmse']:.3g} +- {std['rmse']:.2g}",
            f"{published.rmse:.2f}",
            f"{test['nll']:.3f} +- {std['nll']:.2f}",
            f"{published.nll:.2f}",
            f"{each['mean_member']['nll']:.3f}",
            f"{test['crps']:.3g}",
            f"{each['seconds']:.0f}",
        )
    return table


if __name__ == "__main__":
    cli.run(main)
