"""`fit`: training of an ensemble, as a story that reads from top to bottom, without configs."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from dist_ens import cluster
from dist_ens.callbacks import ProgressBar, RunInfo
from dist_ens.checkpoint import Checkpoints
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.batches import rows_of
from dist_ens.ensemble.failures import FailedMember
from dist_ens.ensemble.memory import explained_memory
from dist_ens.errors import UserError, counted
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.evaluation.label_checks import check_inputs
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import holdings
from dist_ens.metrics import Metric
from dist_ens.metrics.metric import checked_metrics
from dist_ens.peers import Peers
from dist_ens.state import State, refuse_lists
from dist_ens.stop_signal import StopSignal
from dist_ens.terminal import PlainConsole
from dist_ens.training.beginning import POSITION_FILE, begin_run
from dist_ens.training.best_state import BestState
from dist_ens.training.callback_states import restore_states, saved_states
from dist_ens.training.checks import (
    check_arguments,
    check_ensemble,
    check_groups,
    check_labels,
    check_scoring,
)
from dist_ens.training.class_names import numbered_classes
from dist_ens.training.data import eval_steps_of, last_step_of, training_data
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluation_data import EvalData
from dist_ens.training.failures import FAILURES_FILE, FailedMembers
from dist_ens.training.held_out import eval_data_of, with_validation
from dist_ens.training.loop import OWED_FILE, Loop, Outcome
from dist_ens.training.restart_members import MemberRestarts
from dist_ens.training.run_record import record_of
from dist_ens.types import Callback, Data

# Name of the file of a checkpoint that holds the states of this host's callbacks.
_CALLBACKS_FILE = "callbacks"
# Largest number of failed members that a sentence names.
_MOST_NAMED = 20


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        ensemble: Ensemble with the execution and the layout that were used.
        state: State of the ensemble, on its layout.
        history: Records of metrics, one for each logging interval and evaluation. A record is a
            dict from names such as "train/loss" or "test/nll/member_03" to numbers, with the
            "step".
        scores: Scores of the state on the evaluation data. None without evaluation data, or if the
            run was stopped before its end.
        step: Number of steps that the state has seen.
        best_step: Step of the best evaluation, whose state and scores these are, if a callback such
            as `EarlyStopping` chose one. None if they are those of the last step.
        signal: Number of the signal that stopped the run; None without one.
        stopped_by: Name of the callback that stopped the run, such as "EarlyStopping"; None if no
            callback did.
        seconds: Seconds from the beginning to the end, with compilation, evaluation and saving.
        steps_per_second: Pace of training, without evaluation and the first call, which compiles.
        evaluation: Last evaluation with the statistics of its examples, for a report.
        failures: Members with a failed update, each a `FailedMember` with its id, the cause and the
            steps. Without a policy for failures these are the members whose training loss was NaN
            or infinite.
        all_failed: Whether all members failed for good, which ends a run early.
    """

    ensemble: Ensemble
    state: State
    history: list[dict[str, float]]
    scores: Scores | None
    step: int
    best_step: int | None = None
    signal: int | None = None
    stopped_by: str | None = None
    seconds: float = 0.0
    steps_per_second: float = 0.0
    evaluation: Evaluation | None = None
    failures: Sequence[FailedMember] = ()
    all_failed: bool = False

    def __repr__(self) -> str:
        return (
            f"FitResult(step={self.step}, num_members={self.ensemble.num_members}, "
            f"execution={self.ensemble.execution!r}, scores={self.scores!r})"
        )


class RunRecord(Protocol):
    """The record of a run, which is saved with each checkpoint.

    A run from a config and a run made in Python have different records.
    """

    def chosen(self, execution: str | None, num_devices: int, steps_per_call: int) -> "RunRecord":
        """Returns the record with what was chosen when the run began.

        Args:
            execution: Execution that was chosen; None if no step was left to train.
            num_devices: Number of devices of the mesh.
            steps_per_call: Number of steps in one call of the update.
        """
        ...

    def to_dict(self) -> JsonDict:
        """Returns plain data that JSON can hold."""
        ...


def fit(
    ensemble: Ensemble,
    data: Data,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    state: State | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    eval_data: Data | EvalData | None = None,
    eval_every: int | str | None = None,
    validation: float | None = None,
    metrics: Sequence[Metric] = (),
    steps_per_call: int | None = None,
    log_every: int = 100,
    progress: bool = True,
    record: RunRecord | None = None,
    say: Callable[[str], None] | None = None,
    check_resume: Callable[[Mapping[str, Json]], None] = lambda _: None,
) -> FitResult:
    """Trains an ensemble.

    Args:
        ensemble: Ensemble to train. With `execution="auto"` the candidates are timed first.
        data: Training data, in one of four forms:

            - a dict (or another pytree) of arrays [examples, ...], which stay on the devices if
              they fit. Labels of classes may be their names, an array of text: the classes are
              numbered in the order of the sorted names, which the state keeps;
            - a source of `dist_ens.data`;
            - an iterable of batches, such as a Grain dataset, a PyTorch DataLoader, or a function
              that returns an iterator. On several hosts, it yields the examples of the mesh columns
              in which its host has a device (`layout.host_columns`). Hosts that share a column
              must yield the same examples for it. With `Layout.make(num_members,
              ensemble_axis=1)`, no two hosts share a column. With an ensemble axis as long as the
              number of devices, all hosts share the only column. With a data axis of 1, a batch
              may be any pytree of arrays; see `Ensemble.batch_specs` for a longer one;
            - None, for a loss function that draws its own examples from its key. It is given None
              as its batch, and `init` is given None as its inputs.
        steps: Number of steps that the state will have seen at the end. It includes the steps of a
            given or restored state. Exactly one of `steps` and `epochs` must be given.
        epochs: Number of passes over the training examples, positive. A batch that a pass does not
            fill has examples of the next one, so `epochs * examples / batch_size` steps are
            taken, rounded up.
        batch_size: Number of examples of a step, over all hosts. Default: 128, or all examples if
            there are fewer.
        state: State to start from, of any layout. It is copied and not donated. Arrays and sources
            continue in their order at the state's step, and an iterable continues at its current
            position. Default: `ensemble.init`.
        callbacks: Callbacks and writers; see `dist_ens.callbacks`. They are called after each call
            of the update, not after each step.
        checkpoints: Folder of the run and the times at which it is saved. If the folder holds this
            run, the run resumes and `state` is not used. An iterable is then moved to the saved
            position, if its iterator has `get_state` and `set_state`. Otherwise the batches that
            the run has seen are drawn again and skipped, so the iterable must begin where it began
            in the first run. Default: nothing is saved.
        eval_data: Data to score, with the keys of the training data. Default: nothing is scored,
            unless `validation` is given or a source has a validation split.
        eval_every: Number of steps between two evaluations, or "epoch" for one at the end of each
            pass over the training examples. Default: only at the end.
        validation: Share of the training examples that is held out and scored, in (0, 1). It
            excludes `eval_data`.
        metrics: Metrics of the scores beside those of the objective.
        steps_per_call: Number of steps in one call of the update, after which the callbacks are
            called. Default: a number from 1 to 64 that keeps the devices busy.
        log_every: Number of steps between two records of training metrics.
        progress: Whether to show the progress.
        record: Record that is saved with each checkpoint. Default: the names of the ensemble's
            parts and fingerprints of its step and of the training examples.
        say: Function that prints a sentence. Default: prints to the console if `progress`, and
            nothing otherwise.
        check_resume: Function of a saved record that raises a `UserError` if the run must not
            resume from it. Default: no check beside that of `checkpoints`.

    Returns:
        The result of the run. Its state is the last one, or that of the best evaluation if a
        callback such as `EarlyStopping` chooses it. After Ctrl-C or SIGTERM, `fit` saves the state
        so far, if it has `checkpoints`, and returns it.

    Raises:
        UserError: If an argument cannot be used. Most arguments are checked before anything is
            compiled.
        RunError: If a callback raises an exception, the data ends too early, or a checkpoint cannot
            be read or written.

    >>> import jax, numpy as np, optax
    >>> from dist_ens.losses import categorical
    >>> network = (
    ...     lambda key: {"w": jax.random.normal(key, (3, 2))},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), categorical(2), num_members=4)
    >>> x = np.random.default_rng(0).normal(size=(64, 3))
    >>> data = {"inputs": x, "labels": (x[:, 0] > 0).astype(int)}
    >>> result = fit(ensemble, data, steps=20, batch_size=16, progress=False)
    >>> int(result.state.step[0])
    20
    """
    # 1. Everything is checked before anything is written.
    check_arguments(
        ensemble,
        steps,
        epochs,
        steps_per_call,
        eval_every,
        log_every,
        checkpoints,
        state,
        callbacks,
    )
    if isinstance(data, Mapping | tuple):  # A list is an iterable of batches.
        refuse_lists(data, "the data")
    # A fault is reported even where nothing else is.
    report = logging.warning if say is None and not progress else say or _print
    if say is None:
        say = _print if progress and cluster.is_main() else _be_silent
    warn = report if cluster.is_main() else _be_silent
    if eval_data is not None and validation is not None:
        raise UserError(
            f"fit scores one set of examples, and got both eval_data and validation={validation}. "
            "Leave one of them out."
        )
    data, names = numbered_classes(ensemble.trained_objective, data, state)
    if state is not None:
        state = state._replace(class_names=())  # The result has them again.
    check_inputs(ensemble.trained_objective, data)
    data, held_out = with_validation(data, validation)
    train = training_data(data, batch_size, ensemble)
    if eval_data is not None or held_out is not None:
        eval_data = eval_data_of(
            eval_data, held_out, checked_metrics(metrics), names, ensemble.batch_specs
        )
    check_scoring(eval_data, eval_every, metrics)
    check_groups(ensemble, train)
    check_labels(ensemble, train, say)
    if state is None and checkpoints is None:
        # XLA compiles while Python traces the step.
        ensemble.compile_init(train.batch)
    check_ensemble(ensemble, train)
    directions = {} if eval_data is None else eval_data.check(ensemble, train.batch)
    last_step = last_step_of(train, steps, epochs)
    eval_steps = eval_steps_of(train, eval_every)
    if steps_per_call is not None and eval_steps is not None and eval_steps % steps_per_call:
        say(
            f"Note: evaluations are at the ends of calls of {steps_per_call} steps, and every "
            f"{float(eval_steps):g} steps were asked for. Leave steps_per_call out, or set it to 1."
        )
    if record is None and checkpoints is not None:
        record = record_of(ensemble, train.batch).with_data(train, validation, names)
    callbacks = [*callbacks, *([ProgressBar()] if progress else [])]

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        if Peers.current is not None:
            Peers.current.hold(holdings(ensemble.layout))
        opened = None
        if checkpoints is not None and record is not None:
            opened = stack.enter_context(
                checkpoints.open(
                    record.to_dict(), check=check_resume, say=report, directions=directions
                )
            )
        # 2. The state is born on the mesh, or restored onto it; then the execution is chosen.
        stack.enter_context(explained_memory(ensemble))
        begun = begin_run(
            ensemble,
            train,
            state=state,
            opened=opened,
            last_step=last_step,
            steps_per_call=steps_per_call,
            cadences=(eval_steps, log_every, checkpoints.every_steps if checkpoints else None),
            folder=pathlib.Path(checkpoints.folder) if checkpoints else None,
            say=say,
            warn=warn,
        )
        for note in opened.notes if opened else ():
            say(f"Note: {note}")
        rolls_back = ensemble.failures.policy == "rollback"
        if rolls_back and checkpoints is not None and checkpoints.keep == 1:
            say(
                "Note: checkpoint.keep=1 keeps one checkpoint. A save between a failure and the "
                "rollback deletes the checkpoint before the failure, so that the member is not set "
                "back. Set --config.checkpoint.keep=2 (keep=2 in Python)."
            )
        owes_evaluation = False
        if checkpoints is not None and opened is not None and opened.saved_step:
            owes_evaluation = opened.restore_host_file(OWED_FILE, is_shared=True) is not None
            stored = opened.restore_host_file(_CALLBACKS_FILE, is_shared=True)
            if stored is not None:
                restore_states(callbacks, stored, checkpoints.folder, checkpoints.resume)
        if record is not None:
            record = record.chosen(
                begun.execution, begun.ensemble.layout.mesh.size, begun.steps_per_call
            )
        run = RunInfo(
            begun.ensemble,
            begun.ensemble.ids.tolist(),
            begun.first_step,
            last_step,
            rows_of(train.batch),
            directions,
            eval_steps,
        )
        restarts = MemberRestarts(begun.ensemble, train.batch, opened)
        failures = FailedMembers(begun.ensemble, restarts, warn, opened)
        if opened is not None and opened.saved_step:
            failures.restore(opened.restore_host_file(FAILURES_FILE, is_shared=True))
        best = BestState(begun.ensemble, train.batch, callbacks, opened, say)
        loop = Loop(
            run,
            callbacks=callbacks,
            eval_data=eval_data,
            eval_every=eval_steps,
            log_every=log_every,
            opened=opened,
            record={} if record is None else record.to_dict(),
            host_files=partial(_host_files, train, callbacks),
            failures=failures,
            best=best,
            owes_evaluation=owes_evaluation,
        )

        if Peers.current is not None:
            Peers.current.hold(holdings(begun.ensemble.layout))

        # 3. The loop: evaluate, save, take the batch, update.
        stop.listen()  # A signal before this line ends the process, as no progress is lost.
        outcome = loop.run(begun.state, begun.batches, stop)
    if outcome.diverged and outcome.scores is None:  # Scores show it themselves.
        say(
            f"{counted(len(outcome.diverged), 'member')} of {ensemble.num_members} diverged, with "
            f"the ids {str(outcome.diverged)[:200]}: the training loss is not finite. Look for "
            "NaN in the data, lower the learning rate, or clip the gradients."
        )
    if outcome.all_failed:
        warn(
            f"All {ensemble.num_members} members have failed, so the run ends at step "
            f"{outcome.step:,} of {last_step:,}. Look for NaN in the data, lower the learning "
            "rate, or clip the gradients."
        )
    if outcome.failed and ensemble.failures.is_checked:
        say(_told_of_failures(outcome.failed))
    if outcome.stopped_by is not None:
        say(_end_of(outcome, run))
    if outcome.best_step not in (None, outcome.step):
        say(f"The result is the state of step {outcome.best_step:,}, which was scored best.")
    result = _result(begun.ensemble, outcome)
    return dataclasses.replace(result, state=result.state._replace(class_names=names))


def _host_files(train: TrainingData, callbacks: Sequence[Callback]) -> dict[str, bytes]:
    """Returns the files that this host saves beside the state, by name.

    They hold its position in the data and the states of its callbacks.
    """
    files = {}
    position = train.position()
    if position is not None:
        files[POSITION_FILE] = position
    states = saved_states(callbacks)
    if states is not None:
        files[_CALLBACKS_FILE] = states
    return files


def _result(ensemble: Ensemble, outcome: Outcome) -> FitResult:
    """Returns the outcome of a loop as the result of `fit`."""
    return FitResult(
        ensemble=ensemble,
        state=outcome.state,
        history=outcome.history,
        scores=outcome.scores,
        step=outcome.step if outcome.best_step is None else outcome.best_step,
        best_step=outcome.best_step,
        signal=outcome.signal,
        stopped_by=outcome.stopped_by,
        seconds=outcome.seconds,
        steps_per_second=outcome.steps_per_second,
        evaluation=outcome.evaluation,
        failures=outcome.failed,
        all_failed=outcome.all_failed,
    )


def _end_of(outcome: Outcome, run: RunInfo) -> str:
    """Returns the sentence about a run that a callback stopped."""
    reason = f": {outcome.stop_reason}" if outcome.stop_reason else ""
    stopped = f"at step {outcome.step:,} of {run.last_step:,} by {outcome.stopped_by}{reason}."
    if outcome.step == run.first_step > 0:
        return (
            f"This run has ended: it was stopped {stopped} To train further, change this callback."
        )
    return f"Stopped {stopped}"


def _told_of_failures(failed: Sequence[FailedMember]) -> str:
    """Returns the sentences about the failed updates of a run."""
    listed = ", ".join(
        f"{member.failed_updates:,} of member {member.member_id}" for member in failed[:_MOST_NAMED]
    )
    more = f" and {len(failed) - _MOST_NAMED:,} more members" if len(failed) > _MOST_NAMED else ""
    frozen = [member.member_id for member in failed if member.is_frozen]
    left = f" Members {str(frozen)[:200]} are frozen." if frozen else ""
    return f"Updates failed and were not taken: {listed}{more}.{left}"


def _print(sentence: str) -> None:
    """Prints a sentence on the console."""
    PlainConsole().print(sentence, soft_wrap=True)


def _be_silent(sentence: str) -> None:
    """Ignores a sentence."""
