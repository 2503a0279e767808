"""Training of an experiment up to a finished folder, as a story that reads from top to bottom."""

import dataclasses
import math

from rich.console import Console

from dist_ens import report
from dist_ens.callbacks import (
    EarlyStopping,
    JsonLines,
    ProgressBar,
    RunInfo,
    SuccessiveHalving,
)
from dist_ens.callbacks.protocol import name_of_callback
from dist_ens.callbacks.summary import summary_of
from dist_ens.checkpoint import FOLDER, Checkpoints
from dist_ens.data import Source
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.select_execution import CHOICES
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.experiment.build import Built, build
from dist_ens.experiment.config_file import EXPERIMENT, NOTHING, OwnParts, store_experiment
from dist_ens.experiment.loggers import loggers_below
from dist_ens.experiment.reading import words_of_a_config
from dist_ens.experiment.record import Run
from dist_ens.experiment.rows import join_rows
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, code_of_write, counted
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.terminal import PlainConsole, print_table
from dist_ens.metrics.catalogue import headlines
from dist_ens.processes import cluster
from dist_ens.report.files import METRICS, REPORT_FILES
from dist_ens.storage import Folder, Place, place_of
from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.ending import FitResult
from dist_ens.training.fitting import run_fit

_CHOOSING = (EarlyStopping, SuccessiveHalving)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of training.

    `scores` are those of the test split, None if a signal stopped the run. `evaluation` is None
    without an objective. `all_failed` says that all members have failed for good, or
    that none has finite scores.
    """

    run: Run
    ensemble: Ensemble
    state: State
    step: int
    scores: Scores | None
    signal: int | None
    evaluation: Evaluation | None
    parts: OwnParts
    all_failed: bool


@words_of_a_config()
def train(
    experiment: Experiment,
    folder: Folder,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
    resume: str = "same",
    rows: int | None = None,
) -> Trained:
    """Trains an ensemble, or resumes the run in the folder.

    With a number of `rows`, members that as many rows have trained become this run first.
    """
    workdir = place_of(folder, "workdir")
    console = PlainConsole(quiet=not cluster.is_main())
    if cluster.is_main():
        names = (*REPORT_FILES, METRICS, EXPERIMENT, CHOICES)
        workdir.require_writable(names, is_new=True)
    built = build(experiment, parts=parts, member_file=member_file, source=source)
    run = built.run
    of_run = built.arguments
    joined = join_rows(run, workdir, rows) if rows is not None else None
    if joined is not None:
        console.print(f"The members of {rows} rows are one run now.", soft_wrap=True)
        of_run |= {"steps": joined.step, "epochs": None}
    _say_what_chooses(console, built)
    arguments = FitArguments(
        ensemble=built.ensemble,
        **of_run,
        callbacks=[
            _Beginning(built, console, workdir),
            ProgressBar(console),
            JsonLines(f"{workdir}/{METRICS}"),
            *loggers_below(workdir, experiment),
            *parts.callbacks,
        ],
        checkpoints=Checkpoints(
            str(workdir), **dataclasses.asdict(experiment.checkpoint), resume=resume
        ),
        progress=False,
    )
    door = Door(
        record=run.saved_record,
        say=lambda sentence: console.print(sentence, soft_wrap=True),
        check_resume=lambda saved: run.check_resumes(saved, workdir),
    )
    result = run_fit(arguments, door)
    scores = result.scores
    if result.signal is not None:
        _say_where_it_stopped(console, result, run, workdir)
    elif scores is not None and cluster.is_main():
        of_rows = {} if joined is None else joined.summary
        report.write_summary(workdir, _summary(run, result, scores, workdir) | of_rows)
        _print_scores(console, scores)
    ensemble = result.ensemble
    size, num_steps = ensemble.layout.mesh.size, experiment.steps_per_call
    record = run.record and run.record.chosen(ensemble.execution, size, num_steps)
    return Trained(
        dataclasses.replace(run, record=record),
        ensemble,
        result.state,
        result.step,
        scores,
        result.signal,
        result.evaluation,
        parts,
        result.all_failed
        or (
            scores is not None
            and len(diverged_members(scores)) + len(scores.left_out) == len(scores.members)
        ),
    )


def _say_what_chooses(console: Console, built: Built) -> None:
    """Prints a note if a callback chooses a state or members by the test split."""
    choosing = [c for c in built.parts.callbacks if isinstance(c, _CHOOSING)]
    if choosing and built.source.valid is None:
        console.print(
            f"Note: {name_of_callback(choosing[0])} chooses by the test split, so its scores will "
            "be too good. Hold examples out for it: data.validation=0.1.",
            soft_wrap=True,
        )


class _Beginning:
    """A callback that describes the run on the terminal, and stores its experiment."""

    def __init__(self, built: Built, console: Console, workdir: Place) -> None:
        self._built, self._console, self._workdir = built, console, workdir

    def begin(self, run: RunInfo) -> None:
        """Prints a sentence, and writes the file."""
        ensemble, layout, source = run.ensemble, run.ensemble.layout, self._built.source
        experiment = self._built.run.experiment
        resumes = f", resuming from step {run.first_step:,}" if run.first_step else ""
        batch_size = experiment.data.global_batch_size
        in_waves = f", in {ensemble.waves} waves" if ensemble.waves > 1 else ""
        self._console.print(
            f"Training {counted(ensemble.num_members, 'member')} for "
            f"{counted(run.last_step, 'step')} of {counted(batch_size, 'example')} "
            f"({source.spec}) on {counted(layout.mesh.size, f'{layout.platform} device')}, mesh "
            f"{layout}{in_waves}{resumes}.",
            soft_wrap=True,
        )
        if self._built.run.has_own_parts or not cluster.is_main():
            return
        try:
            store_experiment(self._workdir, experiment)
        except OSError as error:
            path = quoted(f"{self._workdir}/{EXPERIMENT}")
            told = f"{path} could not be written: {error.strerror}."
            raise RunError(told, exit_code=code_of_write(error)) from error


def _say_where_it_stopped(console: Console, result: FitResult, run: Run, workdir: Place) -> None:
    """Prints the step at which a signal stopped the run, and how to resume it."""
    console.print(
        f"Stopped at step {result.step:,} of {run.num_steps:,}; it is saved in "
        f"{quoted(f'{workdir}/{FOLDER}')}. Run the same command again to resume."
        if result.step
        else f"Stopped before the first of {counted(run.num_steps, 'step')}; nothing is saved. Run "
        "the same command again to start.",
        soft_wrap=True,
    )


def _summary(run: Run, result: FitResult, scores: Scores, workdir: Place) -> JsonDict:
    """Returns the content of `summary.json`."""
    ensemble, experiment = result.ensemble, run.experiment
    batch_size = experiment.data.global_batch_size
    pace: dict[str, float] = {
        "seconds": result.seconds,
        "member_examples_per_second": result.steps_per_second * ensemble.num_members * batch_size,
    }
    if result.steps_per_second == 0:  # No step was trained, so the earlier pace is kept.
        pace |= report.pace_before(workdir, result.step)
    return {
        **summary_of(ensemble, result.step, scores, result.failed_members),
        "network": _network(run, ensemble),
        **({"own_loss": own} if (own := _own_loss(run)) else {}),
        **pace,
        **({"class_names": list(run.spec.class_names)} if run.spec.class_names else {}),
        **({"stopped_members": dict(result.stopped)} if result.stopped else {}),
        "experiment": experiment.to_dict(),
    }


def _own_loss(run: Run) -> str | None:
    """Returns the name of a loss that the config file makes itself; None without one."""
    name = run.parts.get("objective") or run.parts.get("loss")
    return f"{name} of {run.member_file}" if name and run.member_file else name


def _network(run: Run, ensemble: Ensemble) -> str:
    """Returns a readable name of the network, with its options."""
    if not {"network", "step"}.isdisjoint(run.parts):
        own = ensemble.member.name
        return f"{own} of {run.member_file}" if run.member_file else own
    model = run.experiment.model
    options = ", ".join(f"{name}={value}" for name, value in model.options.items())
    return f"{model.name}({options})"


def diverged_members(scores: Scores) -> list[int | str]:
    """Returns the ids of the ensemble's members whose scores are not finite."""
    return [
        member["member_id"]
        for member in scores.members
        if member["member_id"] not in scores.left_out
        and not all(math.isfinite(member[metric.name]) for metric in headlines(member))
    ]


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
