"""Trains an ensemble: dist-ens train --config=FILE --workdir=DIR [--config.FIELD=VALUE …].

With --rows=4 --row=0 it trains the first quarter of the members alone, in the folder rows/0_of_4 of
the run. Such rows do not wait for each other. When all are done, --rows=4 without --row puts their
members together and scores the ensemble. `dist-ens local --rows=4` does all of this.
"""

import jax
import numpy as np
from absl import flags

from dist_ens import report
from dist_ens.checkpoint import FOLDER, saved_steps
from dist_ens.data import Source
from dist_ens.evaluation import Scores
from dist_ens.execution.spec import AUTO
from dist_ens.experiment import leaves
from dist_ens.experiment.assessment import EvaluationRequest, assess
from dist_ens.experiment.loaded_run import keep
from dist_ens.experiment.record import Run
from dist_ens.experiment.rows import experiment_of_row, folder_of_row
from dist_ens.experiment.train import Trained, train
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.ground.terminal import PlainConsole
from dist_ens.metrics.catalogue import formatted, headlines
from dist_ens.plan import planner_of
from dist_ens.processes import cluster, watchdog
from dist_ens.processes.peers import Peers
from dist_ens.storage import Place
from launch import cli, hosts, signals, stdio
from launch.config_flags import ConfigFlags
from launch.path_flags import define_folder

_WORKDIR = define_folder("workdir", None, "Folder of the run. A run in this folder is resumed.")
_RESUME = flags.DEFINE_enum(
    "resume",
    "same",
    ["same", "strict"],
    "What to do if the newest checkpoint is damaged: same sets it aside and resumes from the one "
    "before it; strict ends with exit code 44.",
)
_STACKS_AFTER_SECS = flags.DEFINE_float(
    "stacks_after_secs",
    600.0,
    "Seconds without a step after which the stacks of all threads are printed; 0 for never.",
    lower_bound=0.0,
)
_STUCK_AFTER_SECS = flags.DEFINE_float(
    "stuck_after_secs",
    1800.0,
    "Seconds without a step after which the process ends with exit code 134, so that a launcher "
    "starts it again; 0 for never. Compiling and a batch of an evaluation must take less.",
    lower_bound=0.0,
)
_ROWS = flags.DEFINE_integer(
    "rows", None, "Number of rows that train a part of the members each.", lower_bound=1
)
_ROW = flags.DEFINE_integer("row", None, "Number of this row, from 0; needs --rows.", lower_bound=0)
_CONFIG = ConfigFlags()


def main() -> int:
    """Trains and returns the exit code."""
    workdir = cli.required(_WORKDIR, "runs/digits")
    watchdog.begin(_STACKS_AFTER_SECS.value, _STUCK_AFTER_SECS.value, hosts.leave)
    experiment = _CONFIG.experiment()
    if Peers.current is not None:
        Peers.current.agree(dict(leaves(experiment.to_dict())), cli.START_TIMEOUT_SECS.value)
    source = _CONFIG.file.open_source(experiment.data)
    parts = _CONFIG.file.own_parts(source.spec)
    if is_row := _ROW.value is not None:
        if _ROWS.value is None:
            raise UserError(f"--row={_ROW.value} is one of how many? Give --rows=NUMBER too.")
        ids = experiment.member_ids or range(experiment.total_members(source.spec.num_groups))
        if saved_steps(workdir):
            stdio.say(f"{quoted(workdir)} holds all members as one run, which no row trains alone.")
            return ExitCode.DONE
        experiment = experiment_of_row(experiment, ids, _ROW.value, _ROWS.value)
        workdir = folder_of_row(workdir, _ROW.value, _ROWS.value)
    if experiment.layout.model_axis == AUTO:
        planner = planner_of(
            Run(experiment, source.spec, source.num_train_examples, _CONFIG.file.path),
            parts,
            jax.devices(),
            in_memory=source.train.in_memory,
            are_cores=cluster.cores_are_devices(),
            say=lambda line: stdio.say(line) if cluster.is_main() else None,
        )
        experiment = planner.experiment
    trained = train(
        experiment,
        workdir,
        parts=parts,
        member_file=_CONFIG.file.path,
        source=source,
        resume=_RESUME.value,
        rows=None if is_row else _ROWS.value,
    )
    if trained.scores is not None and trained.evaluation is not None:
        _leave_report(trained, trained.scores, source, workdir)
    if trained.signal is not None:
        return signals.exit_code(trained.signal)
    return ExitCode.DIVERGED if trained.all_failed else ExitCode.DONE


def _leave_report(trained: Trained, scores: Scores, source: Source, workdir: Place) -> None:
    """Writes the report, and prints the scores and the next command."""
    evaluator = trained.run.evaluator(trained.ensemble, metrics=trained.parts.metrics)
    found = assess(
        trained.run, evaluator, trained.state, source, EvaluationRequest(), trained.evaluation
    )
    if not cluster.is_main():
        return
    keep(workdir, trained.step, {report.SCORES: found.scores_to_dict()})
    report.write_report(workdir, found.to_dict(), found.curves, found.pictures)
    shown = headlines(scores.mean_member)[:2]
    files = {"workdir": workdir, "config": trained.run.member_file}
    told = [f"In {quoted(workdir)}: {report.PAGE}, {report.SUMMARY}, {report.METRICS}, {FOLDER}/."]
    if not np.isnan([scores.ensemble[metric.name] for metric in shown]).any():
        told = [*_compared(scores), *told]
        of_table = ("new.csv", "p.csv")
        input_, output = of_table if trained.run.spec.table else ("x.npy", "p.npz")
        command = command_line("dist-ens", "predict", **files, input=input_, output=output)
        told.append(f"Next: {command}")
    elif len(found.broken) < len(scores.members) and len(scores.groups) == 1:
        command = command_line("dist-ens", "evaluate", **files, leave_out_broken=True)
        told.append(f"Next: {command}")
    PlainConsole().print(" ".join(told), soft_wrap=True)


def _compared(scores: Scores) -> list[str]:
    """Returns a sentence with some scores of the ensemble and of its mean member, if any."""
    shown = headlines(scores.mean_member)[:2]
    if not shown:
        return []
    ensemble, mean, count = scores.ensemble, scores.mean_member, len(scores.groups)
    scored = " and its ".join(
        f"{metric.label}{'' if place else ' is'} {formatted(ensemble, metric.name)}"
        for place, metric in enumerate(shown)
    )
    verb = "are" if len(shown) > 1 else "is"
    of_mean = " and ".join(formatted(mean, metric.name) for metric in shown)
    over_groups = f" (means over {count} groups)" if count > 1 else ""
    return [f"The ensemble's {scored}; its mean member's {verb} {of_mean}{over_groups}."]


run = cli.command(main, _CONFIG.prepare)

if __name__ == "__main__":
    run()
