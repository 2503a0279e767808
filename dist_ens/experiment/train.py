"""Training of an experiment up to a finished folder, as a story that reads from top to bottom."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

from rich.console import Console

from dist_ens import cluster, report
from dist_ens.callbacks import JsonLines, ProgressBar, RunInfo
from dist_ens.checkpoint import FOLDER, Checkpoints
from dist_ens.checkpoint.causes import explained
from dist_ens.commands import quoted
from dist_ens.data import Source
from dist_ens.ensemble import Ensemble
from dist_ens.errors import RunError, UserError, code_of_write, counted, kind_of
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.execution.decision_cache import CHOICES
from dist_ens.experiment.build import NOTHING, Built, build
from dist_ens.experiment.config_file import EXPERIMENT
from dist_ens.experiment.experiment import Experiment
from dist_ens.experiment.own_parts import OwnParts
from dist_ens.experiment.record import Run
from dist_ens.file_writing import require_regular_files
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import DATA, ENSEMBLE
from dist_ens.metrics.catalogue import headlines
from dist_ens.metrics.table import print_table
from dist_ens.paths import given_path
from dist_ens.report.files import REPORT_FILES, to_json
from dist_ens.report.metrics_file import METRICS
from dist_ens.run_digests import write_run_file
from dist_ens.state import State
from dist_ens.terminal import PlainConsole
from dist_ens.training import Door, FitArguments, FitResult, run_fit


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        run: Record of the run.
        ensemble: Ensemble with the execution and the layout that were used.
        state: State of the ensemble.
        step: Number of updates that the state has seen.
        scores: Scores of the test split; None if a signal stopped the run before its end.
        signal: Number of the signal that stopped the run; None without one.
        evaluation: Evaluation behind the scores; None without scores or without an objective.
        parts: Parts of the run that its experiment does not name.
        all_failed: Whether all members failed for good.
    """

    run: Run
    ensemble: Ensemble
    state: State
    step: int
    scores: Scores | None
    signal: int | None
    evaluation: Evaluation | None = None
    parts: OwnParts = NOTHING
    all_failed: bool = False


def train(
    experiment: Experiment,
    workdir: str | pathlib.Path,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
    resume: str = "same",
) -> Trained:
    """Trains an ensemble, or resumes the run in the folder.

    Args:
        experiment: Description of the run.
        workdir: Folder for checkpoints, `metrics.jsonl` and `summary.json`. On several hosts, all
            of them must see the same folder.
        parts: Parts in place of those that the experiment names.
        member_file: Path of the config file that gave parts. It is stored in the record of the run.
        source: Data of the run. Default: the data that `experiment.data` names.
        resume: "same" sets a damaged newest checkpoint aside and resumes from the one before it.
            "strict" raises a `RunError` instead.

    Returns:
        The state and its scores on the test split.

    Raises:
        UserError: If an argument cannot be used, or the folder holds another run. Nothing is
            written then.
        RunError: If a checkpoint or a file of metrics cannot be read or written.
    """
    workdir = given_path(workdir, "workdir")
    console = PlainConsole(quiet=not cluster.is_main())
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment is {kind_of(experiment)}, not a dist_ens.experiment.Experiment. Make "
            "one with Experiment.from_dict."
        )
    require_regular_files(workdir, (*REPORT_FILES, METRICS, EXPERIMENT, CHOICES))
    built = build(experiment, parts=parts, member_file=member_file, source=source)
    before: list[Run] = []

    def check_resume(saved: Mapping[str, Json]) -> None:
        """Keeps the saved record, and raises a `UserError` if it is of another run."""
        before.append(Run.from_dict(dict(saved)))
        built.run.check_resumes(before[-1], workdir)

    evaluation = experiment.evaluation
    arguments = FitArguments(
        ensemble=built.ensemble,
        data=built.data,
        steps=experiment.steps,
        epochs=experiment.epochs,
        callbacks=[
            _Announcement(built, console, before),
            *([] if built.run.has_own_parts else [_StoredExperiment(experiment, workdir)]),
            ProgressBar(console),
            JsonLines(workdir / METRICS),
            *parts.callbacks,
        ],
        checkpoints=Checkpoints(
            workdir, **dataclasses.asdict(experiment.checkpoint), resume=resume
        ),
        eval_data=built.eval_data,
        eval_every="epoch" if evaluation.every_epoch else evaluation.every_steps,
        steps_per_call=experiment.steps_per_call,
        log_every=experiment.logging.every_steps,
        progress=False,
    )
    door = Door(
        record=built.run,
        say=lambda sentence: console.print(sentence, soft_wrap=True),
        check_resume=check_resume,
    )
    result = run_fit(arguments, door)
    ensemble = result.ensemble
    run = built.run.chosen(ensemble.execution, ensemble.layout.mesh.size, experiment.steps_per_call)
    if result.signal is not None:
        _say_where_it_stopped(console, result, built, workdir)
    elif result.scores is not None and cluster.is_main():
        report.write_summary(workdir, _summary(built, result, result.scores, workdir))
        _print_scores(console, result.scores)
    return Trained(
        run,
        ensemble,
        result.state,
        result.step,
        result.scores,
        result.signal,
        result.evaluation,
        parts,
        result.all_failed or _are_all_diverged(result.scores),
    )


class _Announcement:
    """A callback that describes the run on the terminal when it begins.

    Args:
        built: Parts of the run.
        console: Console to print on.
        before: Records of the saved run that were read, the resumed one last; empty for a new run.
    """

    def __init__(self, built: Built, console: Console, before: list[Run]) -> None:
        self._built, self._console, self._before = built, console, before

    def begin(self, run: RunInfo) -> None:
        """Prints a sentence, and the notes on the data."""
        ensemble, layout = run.ensemble, run.ensemble.layout
        resumes = f", resuming from step {run.first_step:,}" if run.first_step else ""
        batch_size = self._built.data.order.global_batch_size
        in_waves = f", in {ensemble.waves} waves" if ensemble.waves > 1 else ""
        self._console.print(
            f"Training {counted(ensemble.num_members, 'member')} for "
            f"{counted(run.last_step, 'step')} of {counted(batch_size, 'example')} "
            f"({self._built.source.spec}) on "
            f"{counted(layout.mesh.size, f'{layout.platform} device')}, mesh "
            f"{layout}{in_waves}{resumes}.",
            soft_wrap=True,
        )
        other = self._built.run.other_versions(self._before[-1]) if self._before else None
        if other:
            self._console.print(other, soft_wrap=True)


class _StoredExperiment:
    """A callback that stores the experiment in the folder of the run, when the run begins.

    `dist-ens train --experiment=FILE` trains it anew. A run with parts that the experiment does not
    name would then be another one, so it stores none.

    Args:
        experiment: Experiment of the run.
        workdir: Folder of the run.
    """

    def __init__(self, experiment: Experiment, workdir: pathlib.Path) -> None:
        self._experiment, self._path = experiment, workdir / EXPERIMENT

    def begin(self, run: RunInfo) -> None:
        """Writes the file.

        Raises:
            RunError: If the system cannot write it.
        """
        if not cluster.is_main():
            return
        try:
            write_run_file(self._path, to_json(self._experiment.to_dict(), indent=2) + "\n")
        except OSError as error:
            why = explained(error)
            raise RunError(
                f"The experiment could not be written to {quoted(self._path)}: {why.what}. "
                f"{why.remedy}, and run the same command again.",
                exit_code=code_of_write(error),
            ) from error


def _say_where_it_stopped(
    console: Console,
    result: FitResult,
    built: Built,
    workdir: pathlib.Path,
) -> None:
    """Prints the step at which a signal stopped the run, and how to resume it."""
    last_step = built.run.num_steps
    console.print(
        f"Stopped at step {result.step:,} of {last_step:,}; it is saved in "
        f"{quoted(workdir / FOLDER)}. Run the same command again to resume."
        if result.step
        else f"Stopped before the first of {counted(last_step, 'step')}; nothing is saved. Run the "
        "same command again to start.",
        soft_wrap=True,
    )


def _summary(built: Built, result: FitResult, scores: Scores, workdir: pathlib.Path) -> JsonDict:
    """Returns the content of `summary.json`."""
    run, ensemble = built.run, result.ensemble
    layout, per_step = ensemble.layout, ensemble.num_members * built.run.order.global_batch_size
    pace: dict[str, float] = {
        "seconds": result.seconds,
        "member_examples_per_second": result.steps_per_second * per_step,
    }
    if result.steps_per_second == 0:  # No step was trained, so the earlier pace is kept.
        pace |= report.pace_before(workdir, result.step)
    return {
        "network": _network(run, ensemble),
        "steps": result.step,
        "num_members": layout.num_members,
        "mesh": {ENSEMBLE: layout.ensemble_axis, DATA: layout.data_axis},
        "execution": ensemble.execution,
        "waves": ensemble.waves,
        **pace,
        "failures": {
            "policy": run.experiment.failures.policy,
            "members": [member._asdict() for member in result.failures],
        },
        "groups": len(scores.groups),
        "left_out_members": list(scores.left_out),
        **scores.to_dict(),
        "mean_member": scores.mean_member,
        **({"class_names": list(run.spec.class_names)} if run.spec.class_names else {}),
        "experiment": run.experiment.to_dict(),
    }


def _network(run: Run, ensemble: Ensemble) -> str:
    """Returns a readable name of the network, with its options."""
    if run.network is not None:
        return f"{run.network} of {run.member_file}" if run.member_file else run.network
    model = run.experiment.model
    options = ", ".join(f"{name}={value}" for name, value in model.options.items())
    return f"{model.name}({options})"


def diverged_members(scores: Scores) -> list[int]:
    """Returns the ids of the members whose scores are not finite."""
    return [
        int(member["member_id"])
        for member in scores.members
        if not all(math.isfinite(member[metric.name]) for metric in headlines(member))
    ]


def _are_all_diverged(scores: Scores | None) -> bool:
    """Returns whether there are scores, and those of no member are finite."""
    return scores is not None and len(diverged_members(scores)) == len(scores.members)


def _print_scores(console: Console, scores: Scores) -> None:
    """Prints the table of scores, and a note if members have diverged."""
    print_table(console, scores.table())
    diverged = diverged_members(scores)
    if diverged:
        console.print(
            f"Members {diverged} have diverged: their scores are not finite, and neither are the "
            "averages over all members. Try a lower --config.optimizer.learning_rate, or "
            "--config.optimizer.clip_norm=1.0.",
            soft_wrap=True,
        )
