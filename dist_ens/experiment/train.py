"""Training, from an experiment to a finished workdir: the whole story, top to bottom."""

import contextlib
import dataclasses
import itertools
import math
import pathlib
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from rich.console import Console

from dist_ens import cluster, report
from dist_ens.checkpoint import FOLDER, Checkpoints
from dist_ens.commands import quoted
from dist_ens.config import Experiment
from dist_ens.config.execution_spec import AUTO
from dist_ens.data import Source, check_source, open_source
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.select_execution import choose
from dist_ens.errors import UserError
from dist_ens.evaluation import Evaluator, Scores
from dist_ens.experiment.record import Run
from dist_ens.experiment.workdir import saved_run, trained_by_one
from dist_ens.feed import feed
from dist_ens.layout import DATA, ENSEMBLE, MEMBERS, make_layout, to_host
from dist_ens.members import Member, require_member
from dist_ens.paths import given_path
from dist_ens.state import State


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training leaves.

    Attributes:
        run: What the state belongs to.
        ensemble: The lifted member.
        evaluator: Of the ensemble.
        state: The ensemble's, on its layout.
        step: Updates that the state has seen.
        scores: On the test split; None if training was asked to stop before its end.
        signal: The signal that asked it to stop; None if none did.
    """

    run: Run
    ensemble: Ensemble
    evaluator: Evaluator
    state: State
    step: int
    scores: Scores | None
    signal: int | None


def train(
    experiment: Experiment,
    workdir: str | pathlib.Path,
    *,
    member: Member | None = None,
    member_file: str | None = None,
    source: Source | None = None,
) -> Trained:
    """Trains an ensemble, or goes on training the one in the workdir.

    Args:
        experiment: What to train.
        workdir: Folder for checkpoints, `metrics.jsonl` and `summary.json`; on several hosts one
            that all of them see. A run that it holds already goes on.
        member: The network; default: the one that `experiment.model` names.
        member_file: The config file that made `member`, for whoever reads the run later.
        source: The data; default: the one that `experiment.data` names.

    Returns:
        The state, and its scores on the test split.

    Raises:
        UserError: For anything given that cannot be used; nothing is written then.
    """
    workdir = given_path(workdir, "workdir")
    console = Console(quiet=not cluster.is_main(), markup=False, highlight=False)

    # 1. Every part is built and checked before anything is written.
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment is a {type(experiment).__name__}, not a dist_ens.config.Experiment. Make "
            "one with Experiment.from_dict."
        )
    source, run, ensemble = _parts(experiment, source, member, member_file)
    num_members, batch_size = run.num_members, experiment.data.global_batch_size
    last_step = experiment.total_steps(run.order.epoch_length)
    _require_folder(workdir)
    _require_writable(workdir)

    with (
        _going_on(run, workdir, last_step) as (first_step, before),
        cluster.StopSignal() as stop,
        Checkpoints(workdir, keep=experiment.checkpoint.keep) as checkpoints,
    ):
        # 2. The state is born on the mesh, or restored onto it.
        ensemble, state, batches = _begun(
            ensemble, run, source, before, checkpoints, first_step, last_step, workdir, console
        )
        step = previous_step = first_step
        layout = ensemble.layout
        run = dataclasses.replace(run, execution=ensemble.execution, num_devices=layout.mesh.size)
        run_to_save = run.to_dict()
        evaluator = run.evaluator(ensemble)
        reporter = report.TrainingReporter(
            console,
            workdir if cluster.is_main() else None,
            member_ids=to_host(state.member_id).tolist(),
            first_step=first_step,
            last_step=last_step,
            every_steps=experiment.logging.every_steps,
            member_examples_per_step=num_members * batch_size,
        )
        going_on = f", going on from step {first_step:,}" if first_step else ""
        in_waves = f", in {ensemble.waves} waves" if ensemble.waves > 1 else ""
        console.print(
            f"Training {num_members} members for {last_step:,} steps of {batch_size} "
            f"examples ({source.spec}) on {layout.mesh.size} {layout.platform} device(s), mesh "
            f"{layout}{in_waves}{going_on}.",
        )
        for note in source.notes:
            console.print(f"Note: {note}", soft_wrap=True)

        other_versions = run.other_versions(before) if before else None
        if other_versions:
            console.print(other_versions, soft_wrap=True)

        # 3. The loop. Its order matters: what is evaluated and saved is the state at `step`, which
        #    has seen exactly `step` batches.
        stop.listen()  # until here there was nothing to lose
        scores = None
        with reporter, jax.transfer_guard("disallow"):
            while True:
                is_last = step >= last_step
                stopping = stop.is_set() and not is_last
                if is_last or _crossed(experiment.evaluation.every_steps, previous_step, step):
                    try:
                        with reporter.paused():
                            evaluation = evaluator.evaluate(state, source.test)
                            scores = evaluation.scores(intervals=is_last)
                    except UserError:  # of data that are looked at when they are read
                        if jax.process_count() == 1:  # else the hosts that go on do not save
                            checkpoints.save(step, state, run_to_save)
                        raise
                    if step > first_step:  # else they are written already
                        reporter.evaluated(step, scores.to_dict())
                if (
                    is_last
                    or (stopping and step)
                    or _crossed(experiment.checkpoint.every_steps, previous_step, step)
                ):
                    # A checkpoint's metrics are written before it. Alone, the thread that writes
                    # it sees to that; several hosts read them together, in their main threads.
                    if jax.process_count() > 1:
                        reporter.catch_up()
                    checkpoints.save(step, state, run_to_save, after=partial(reporter.keep, step))
                if is_last or stopping:
                    break
                state, metrics = ensemble.update_steps(state, next(batches))
                if step == first_step:
                    with jax.transfer_guard("allow"):  # once, and only a few flags
                        ensemble.check_columns(state)
                previous_step, step = step, step + metrics["loss"].shape[0]
                reporter.updated(previous_step, step, metrics)
        checkpoints.wait()

    # 4. What came of it.
    if stopping:
        console.print(
            f"Stopped at step {step:,} of {last_step:,}; it is saved in "
            f"{quoted(workdir / FOLDER)}. The same command goes on from there."
            if step
            else f"Stopped before the first of {last_step:,} steps; nothing is saved. The same "
            "command begins anew.",
        )
        return Trained(run, ensemble, evaluator, state, step, None, stop.signal)
    if scores is not None and cluster.is_main():
        summary = {
            "network": _network(run, member),
            **_summary(run, ensemble, step, scores, reporter, first_step, workdir),
        }
        report.write_summary(workdir, summary)
        _print_scores(console, scores)
    return Trained(run, ensemble, evaluator, state, step, scores, None)


def _parts(
    experiment: Experiment, source: Source | None, member: Member | None, member_file: str | None
) -> tuple[Source, Run, Ensemble]:
    """The data, what the state will belong to, and the lifted member; each is checked."""
    if source is None:
        source = open_source(experiment.data)
    else:
        check_source(source)
    if member is not None:
        require_member(member)
    if experiment.data.validation and source.valid is None:
        raise UserError(
            "Validation examples are held out of the source. Received: data.validation="
            f"{experiment.data.validation} and a source of one's own without any. Give it as "
            "source.with_validation(share)."
        )
    run = Run(experiment, source.spec, source.num_train_examples, member_file)
    rows = experiment.layout.ensemble_axis
    layout = make_layout(run.num_members, rows, cluster.devices_for(run.num_members, rows))
    layout.check_batch_size("data.global_batch_size", experiment.data.global_batch_size)
    ranges = source.input_ranges() if experiment.loss.adversarial else None
    ensemble = run.make_ensemble(layout, member, ranges)
    run.kind()  # that members can be pooled as asked is found out before they are trained
    run.check_training(ensemble)
    run.check_room(ensemble)
    return source, run.identified(ensemble, member, source), ensemble


def _begun(
    ensemble: Ensemble,
    run: Run,
    source: Source,
    before: Run | None,
    checkpoints: Checkpoints,
    first_step: int,
    last_step: int,
    workdir: pathlib.Path,
    console: Console,
) -> tuple[Ensemble, State, Iterator[Any]]:
    """The ensemble with its execution, its state at `first_step`, and the batches from there."""
    experiment = run.experiment
    is_open = experiment.execution == AUTO
    may_move = experiment.layout.ensemble_axis is None
    if is_open and before is not None:
        ensemble = _as_before(ensemble, before, may_move=may_move)
    inputs = run.batch_of_inputs(experiment.data.global_batch_size // ensemble.layout.data_axis)
    if first_step:
        state = checkpoints.restore_state(first_step, ensemble.abstract_state(inputs))
    else:
        state = ensemble.init(experiment.seed, inputs)
    batches_from = partial(
        feed,
        source,
        run.order,
        seed=experiment.seed,
        first_step=first_step,
        last_step=last_step,
        steps_per_call=experiment.steps_per_call,
        say=partial(console.print, soft_wrap=True),
    )
    batches = batches_from(ensemble.layout)
    if not is_open or before is not None:
        return ensemble, state, batches
    first_batches = next(batches)
    chosen, choice = choose(
        ensemble, state, first_batches, last_step, workdir=workdir, may_move=may_move
    )
    console.print(str(choice), soft_wrap=True)
    if chosen.layout is not ensemble.layout:
        return chosen, chosen.layout.moved(state, MEMBERS), batches_from(chosen.layout)
    return chosen, state, itertools.chain(iter([first_batches]), batches)


@contextlib.contextmanager
def _going_on(run: Run, workdir: pathlib.Path, last_step: int) -> Iterator[tuple[int, Run | None]]:
    """Holds the workdir; gives the steps that its run has taken, and that run; or 0 and None."""
    with trained_by_one(workdir):
        saved = saved_run(workdir)
        if saved is None:
            yield 0, None
            return
        step, saved_as = saved
        run.check_goes_on_from(saved_as, workdir)
        if step > last_step:
            raise UserError(
                f"A run goes on from where it is. Received: {last_step:,} steps asked for, "
                f"{step:,} taken already in {workdir}. Raise --config.steps, or use another "
                "--workdir."
            )
        yield step, saved_as


def _as_before(ensemble: Ensemble, before: Run, *, may_move: bool) -> Ensemble:
    """The ensemble as a run was trained: its execution, and of a CPU's cores as many."""
    if before.execution is not None:
        ensemble = dataclasses.replace(ensemble, execution=before.execution)
    if may_move and cluster.cores_are_devices() and before.num_devices == 1:
        ensemble = dataclasses.replace(ensemble, layout=ensemble.layout.on_one_device())
    return ensemble


def _crossed(every_steps: int | None, previous_step: int, step: int) -> bool:
    """Whether a multiple of `every_steps` lies in (previous_step, step]."""
    return every_steps is not None and step // every_steps > previous_step // every_steps


def _require_folder(workdir: pathlib.Path) -> None:
    for path in (workdir / FOLDER, workdir, *workdir.parents):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"A workdir is a folder, or will be one. Received: {workdir}, where {path} is a "
                "file. Choose another --workdir."
            )


def _require_writable(workdir: pathlib.Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(
            f"A workdir is a folder that can be written to. Received: {workdir}: "
            f"{error.strerror}. Choose another --workdir."
        ) from error


def _summary(
    run: Run,
    ensemble: Ensemble,
    step: int,
    scores: Scores,
    reporter: report.TrainingReporter,
    first_step: int,
    workdir: pathlib.Path,
) -> dict[str, Any]:
    layout = ensemble.layout
    pace: dict[str, float] = {
        "seconds": reporter.seconds(),
        "member_examples_per_second": reporter.member_examples_per_second(step),
    }
    if step == first_step:  # nothing new was trained
        pace |= report.pace_before(workdir, step)
    return {
        "steps": step,
        "num_members": layout.num_members,
        "mesh": {ENSEMBLE: layout.ensemble_axis, DATA: layout.data_axis},
        "execution": ensemble.execution,
        "waves": ensemble.waves,
        **pace,
        "groups": len(scores.groups),
        **scores.to_dict(),
        "mean_member": scores.mean_member,
        "experiment": run.experiment.to_dict(),
    }


def _network(run: Run, member: Member | None) -> str:
    """What a member is, for people."""
    if member is not None:
        return f"{member.name} of {run.member_file}" if run.member_file else member.name
    model = run.experiment.model
    options = ", ".join(f"{name}={value}" for name, value in model.options.items())
    return f"{model.name}({options})"


def _print_scores(console: Console, scores: Scores) -> None:
    table = report.scores_table(
        scores.ensemble, scores.mean_member, scores.members, len(scores.groups)
    )
    console.print(table)
    diverged = [
        member["member_id"]
        for member in scores.members
        if not math.isfinite(member["nll" if "nll" in member else "rmse"])
    ]
    if diverged:
        console.print(
            f"Members {diverged} have diverged: their scores are not finite, nor is what is "
            "averaged over them. Try a lower --config.optimizer.learning_rate, or "
            "--config.optimizer.clip_norm=1.0.",
        )
