"""Trains an ensemble: dist-ens train --config=FILE --workdir=DIR [--config.FIELD=VALUE …]."""

import pathlib

import numpy as np
from rich.console import Console

from dist_ens import cluster, report
from dist_ens.checkpoint import FOLDER
from dist_ens.commands import command_line, quoted
from dist_ens.data import Source, open_source
from dist_ens.evaluation import Scores
from dist_ens.experiment.assess import Questions, assess
from dist_ens.experiment.train import Trained, train
from launch import cli
from launch.config_file import ConfigFlags
from launch.path_flags import define_path

_WORKDIR = define_path("workdir", None, "Folder of the run; one that holds it goes on.")
_CONFIG = ConfigFlags()
# The first two that a run has are told at its end.
_TOLD = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL", "pinball": "pinball", "mae": "MAE"}


def main() -> int:
    """Trains; 128 + the signal's number if one stopped it."""
    workdir = cli.required(_WORKDIR)
    experiment = _CONFIG.experiment()
    source = open_source(experiment.data)
    member = _CONFIG.make_member(source.spec)
    member_file = _CONFIG.file.path if member and _CONFIG.file else None
    trained = train(experiment, workdir, member=member, member_file=member_file, source=source)
    if trained.scores is not None:
        _leave_report(trained, trained.scores, source, workdir, member_file)
    return 0 if trained.signal is None else 128 + trained.signal


def _leave_report(
    trained: Trained, scores: Scores, source: Source, workdir: pathlib.Path, member_file: str | None
) -> None:
    found = assess(trained.run, trained.evaluator, trained.state, source, Questions())
    if not cluster.is_main():
        return
    report.write_report(workdir, found.to_dict(), found.curves, found.pictures)
    ensemble, mean, count = scores.ensemble, scores.mean_member, len(scores.groups)
    first, second = [name for name in _TOLD if name in mean][:2]
    told, over_groups = report.told, f" (means over {count} groups)" if count > 1 else ""
    console = Console(markup=False, highlight=False)
    left = f"In {quoted(workdir)}: {report.PAGE}, {report.SUMMARY}, {report.METRICS}, {FOLDER}/."
    if np.isnan([ensemble[first], ensemble[second]]).any():  # what is the matter has been said
        if len(found.broken) < len(scores.members) and count == 1:
            again = command_line(
                "dist-ens", "evaluate", workdir=workdir, config=member_file, leave_out_broken=True
            )
            left += f" Next: {again}"
        console.print(left, soft_wrap=True)
        return
    predict = command_line(
        "dist-ens",
        "predict",
        workdir=workdir,
        config=member_file,
        input="x.npy",
        output="p.npz",
    )
    console.print(
        f"The ensemble's {_TOLD[first]} is {told(ensemble, first)} and its {_TOLD[second]} "
        f"{told(ensemble, second)}; its mean member's are {told(mean, first)} and "
        f"{told(mean, second)}{over_groups}. {left} Next: {predict}",
        soft_wrap=True,
    )


def run() -> None:
    """The whole command."""
    cli.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
