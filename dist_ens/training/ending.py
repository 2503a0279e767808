"""The end of a run: its result, and the sentences about it."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.callbacks.protocol import call_hook, name_of_callback
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import FailedMember
from dist_ens.ensemble.stopping import finished, stopped_members
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.ground.errors import counted
from dist_ens.ground.state import State
from dist_ens.training.failure_response import finite_members
from dist_ens.training.preparing import Job
from dist_ens.training.services import Run

# Largest number of letters of a list of members in a sentence.
_MOST_LETTERS = 400
_REMEDY = "Look for NaN in the data, lower the learning rate, or clip the gradients."


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
        failed_members: Members with a failed update, each a `FailedMember` with its id, the cause
            and the steps. Without a failure policy these are the members whose training loss was
            NaN or infinite.
        all_failed: Whether all members failed for good, which ends a run early.
        stopped: Step at which a callback or the policy `drop` has stopped a member, by its id.
        num_computed: Number of members in the arrays, by the first step of this call of `fit` at
            which there were that many. Members that have stopped leave when that spares time.
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
    failed_members: Sequence[FailedMember] = ()
    all_failed: bool = False
    stopped: Mapping[int, int] = dataclasses.field(default_factory=dict)
    num_computed: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"FitResult(step={self.step}, num_members={self.ensemble.num_members}, "
            f"execution={self.ensemble.execution!r}, scores={self.scores!r})"
        )


def end_run(run: Run, job: Job) -> FitResult:
    """Ends a run whose loop has ended, and returns its result."""
    run.call_all("wait", own_only=True)
    run.reader.catch_up()
    run.state = last = run.compaction.joined(run.state)
    best = None if run.is_interrupted else run.best.at_end(run.step, last)
    step, state = best or (run.step, last)
    stopped, state = stopped_members(last), finished(state)
    scores, evaluation, failed = None, None, run.failure_response.reported(run.state)
    if failed:
        run.call_all("members_failed", failed)
    if not run.is_interrupted:
        run.evaluating.end(step, state, is_last=state.params is last.params)
    if run.is_interrupted:
        best, step, state = None, run.step, finished(last)
    else:
        scores, evaluation = run.evaluating.scores, run.evaluating.evaluation
    run.reader.end()
    all_failed, is_complete = run.failure_response.have_all_failed, run.step >= run.info.last_step
    is_over = run.is_interrupted or all_failed or is_complete
    return FitResult(
        ensemble=run.info.ensemble,
        state=state._replace(class_names=job.class_names),
        history=run.history,
        scores=scores,
        step=step,
        best_step=best and step,
        signal=run.stop.signal if run.is_interrupted else None,
        stopped_by=None if is_over or run.stopper is None else name_of_callback(run.stopper),
        seconds=run.reader.seconds,
        steps_per_second=run.reader.steps_per_second(),
        evaluation=evaluation,
        failed_members=failed,
        all_failed=all_failed,
        stopped=stopped,
        num_computed=run.num_computed,
    )


def report_end(run: Run, job: Job, result: FitResult) -> None:
    """Prints how a run has ended, and what happened to its members."""
    say = job.say
    num_members, last_step = result.ensemble.num_members, run.info.last_step
    if ids := _diverged_members(run, result) if result.scores is None else []:
        say(
            f"{counted(len(ids), 'member')} of {num_members} diverged, with the ids "
            f"{str(ids)[:_MOST_LETTERS]}: the training loss is not finite. {_REMEDY}"
        )
    if result.all_failed:
        job.warn(
            f"All {num_members} members have failed, so the run ends at step {run.step:,} of "
            f"{last_step:,}. {_REMEDY}"
        )
    if result.failed_members and result.ensemble.failure_policy.is_checked:
        say(_sentences_of_failures(result.failed_members))
    if result.stopped_by is not None:
        reason = call_hook(run.stopper, "reason")
        because = f": {reason}" if reason else ""
        stopped = f"at step {run.step:,} of {last_step:,} by {result.stopped_by}{because}."
        if run.step == run.info.first_step > 0:
            say(f"This run has ended: it was stopped {stopped} Change this callback to go on.")
        else:
            say(f"Stopped {stopped}")
    elif len(result.stopped) == num_members and run.step == run.info.first_step < last_step:
        say(
            f"This run has ended: all members have stopped by step {run.step:,} of {last_step:,}. "
            "Leave out the callbacks that stop members to go on."
        )
    if result.best_step not in (None, run.step):
        say(f"The result is the state of step {result.best_step:,}, which was scored best.")


def _diverged_members(run: Run, result: FitResult) -> list[int]:
    """Returns the ids of the members that are lost: they ended with a loss that is not finite."""
    member_ids, is_lost = np.asarray(run.info.member_ids), ~np.isfinite(run.reader.losses)
    if is_lost.any() and result.ensemble.failure_policy.is_checked:  # The update was not taken.
        frozen = [each.member_id for each in result.failed_members if each.is_frozen]
        is_sound = finite_members(run.state.params, run.info.ensemble)
        is_lost &= ~is_sound | np.isin(member_ids, frozen)
    return member_ids[is_lost].tolist()


def _sentences_of_failures(failed: Sequence[FailedMember]) -> str:
    """Returns the sentences about the failed updates of a run."""
    listed = ", ".join(f"{each.failed_updates:,} of member {each.member_id}" for each in failed)
    frozen = [each.member_id for each in failed if each.is_frozen]
    left = f" Members {str(frozen)[:_MOST_LETTERS]} are frozen." if frozen else ""
    return f"Updates failed and were not taken: {listed[:_MOST_LETTERS]}.{left}"
