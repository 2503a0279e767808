"""The loop of a run: evaluate, save, take the batch, update."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import jax
import numpy as np

from dist_ens import cluster, progress
from dist_ens.callbacks import STOP, RunInfo, StepInfo
from dist_ens.callbacks.protocol import call_after_update, call_hook, name_of_callback
from dist_ens.callbacks.records import finite_scores, score_record
from dist_ens.checkpoint import RESULT_FILE, Leaf, OpenCheckpoints
from dist_ens.ensemble.batches import CallBatches, steps_in
from dist_ens.ensemble.failures import FailedMember
from dist_ens.errors import SaveError, UserError, kind_of
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.json_text import Json
from dist_ens.layout import MEMBERS, Layout
from dist_ens.state import State, differing, leaf_types
from dist_ens.stop_signal import EvaluationStoppedError, StopSignal
from dist_ens.training.best_state import BestState
from dist_ens.training.evaluation_data import EvalData
from dist_ens.training.failures import FailedMembers
from dist_ens.training.finite_members import finite_members, has_finite_member
from dist_ens.training.metrics import MetricsReader
from dist_ens.types import Callback

# Name of the file of a checkpoint whose step is still to be evaluated.
OWED_FILE = "evaluation_owed"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a loop, with the fields of `FitResult` but the ensemble."""

    state: State
    step: int  # Last step that was trained.
    best_step: int | None  # Step of the state and the scores; None if it is the last one.
    history: list[dict[str, float]]
    scores: Scores | None
    evaluation: Evaluation | None
    signal: int | None
    diverged: list[int]  # Ids of members whose last training loss is not finite.
    failed: list[FailedMember]
    all_failed: bool  # Whether all members have failed for good, which ends the run.
    stopped_by: str | None
    stop_reason: str | None
    seconds: float
    steps_per_second: float


class Loop:
    """The loop of a run.

    Args:
        run: Ensemble, members and steps of the run.
        callbacks: Callbacks and writers.
        eval_data: Data to score; None to score nothing.
        eval_every: Number of steps between two evaluations. None evaluates only at the end.
        log_every: Number of steps between two records.
        opened: Checkpoints of the run; None to save nothing.
        record: Record that is saved with each checkpoint, in types that JSON can hold.
        host_files: Function that returns the files that this host saves beside the state.
        failures: Members of the run that have failed.
        best: State of the best evaluation.
        owes_evaluation: Whether a signal stopped the evaluation of the first step, in the run that
            is resumed.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        callbacks: Sequence[Callback],
        eval_data: EvalData | None,
        eval_every: int | Fraction | None,
        log_every: int,
        opened: OpenCheckpoints | None,
        record: Mapping[str, Json],
        host_files: Callable[[], dict[str, bytes]],
        failures: FailedMembers,
        best: BestState,
        owes_evaluation: bool = False,
    ) -> None:
        self._info, self._callbacks = run, callbacks
        self._eval_data, self._eval_every = eval_data, eval_every
        self._opened, self._record, self._host_files = opened, record, host_files
        self._history: list[dict[str, float]] = []
        self._reader = MetricsReader(
            run.member_ids,
            first_step=run.first_step,
            last_step=run.last_step,
            log_every=log_every,
            write=self._write,
            on_read=failures.read,
        )
        self._failures, self._best = failures, best
        self._scores: Scores | None = None
        self._evaluation: Evaluation | None = None
        # Last step whose scores are written. A resumed run has written those of its first step.
        is_scored = run.first_step > 0 and not owes_evaluation
        self._scored_step = run.first_step if is_scored else None
        self._owes_evaluation = owes_evaluation
        self._ended_step: int | None = None  # Step of the last evaluation if it was a final one.
        # First callback of this host that returned `STOP`.
        self._stopper: Callback | None = None

    def run(self, state: State, batches: Iterator[CallBatches], stop: StopSignal) -> Outcome:
        """Runs the loop and returns its result.

        Args:
            state: State at the first step.
            batches: Batches of each call, on the layout.
            stop: Signal that asks the run to stop.
        """
        failed: type[BaseException] | None = None
        try:
            has_ended = self._any_stops("begin", self._info)
            return self._steps(state, batches, stop, has_ended=has_ended)
        except BaseException as error:
            failed = type(error)
            raise
        finally:
            # A thread that saves may be about to read the last call. But after a second Ctrl-C the
            # process must end at once, and hosts cannot read together after one of them failed.
            waits = failed is not KeyboardInterrupt and jax.process_count() == 1
            with contextlib.ExitStack() as stack:  # It closes every callback, whatever fails.
                if failed is not None:  # A disk that failed twice is reported once.
                    stack.enter_context(contextlib.suppress(SaveError))
                for callback in reversed(self._callbacks):
                    stack.callback(call_hook, callback, "close")
                if failed is None or waits:
                    self._reader.catch_up()

    def _steps(
        self,
        state: State,
        batches: Iterator[CallBatches],
        stop: StopSignal,
        *,
        has_ended: bool,
    ) -> Outcome:
        """Evaluates, saves and updates until the run ends, and returns its result.

        Args:
            state: State at the first step.
            batches: Batches of each call, on the layout.
            stop: Signal that asks the run to stop.
            has_ended: Whether a callback ended the run when it began.
        """
        ensemble, last_step = self._info.ensemble, self._info.last_step
        step = previous_step = self._info.first_step
        may_be_asked = cluster.any_host(any(map(callable, self._callbacks)))
        asked_to_end, all_failed = has_ended, False
        self._failures.begin(step, state)
        if step == last_step:  # Nothing is trained, but callbacks still see the last state.
            state, _ = self._call_callbacks(step, state, is_last=True)
        elif has_ended:
            self._call_callbacks(step, state, is_last=True)
        # The order matters: what is evaluated and saved is the state at `step`, which has seen
        # exactly `step` batches.
        while True:
            progress.made()
            is_last = asked_to_end or step >= last_step
            stopping = stop.is_set() and not is_last
            if is_last:
                self._reader.catch_up()
                all_failed = self._failures.end(step, state) or all_failed
            if is_last or self._owes_evaluation or _crossed(self._eval_every, previous_step, step):
                try:
                    with stop.stopping_evaluations():
                        ends_here = self._evaluate(step, state, is_last=is_last) and not is_last
                        if ends_here:
                            self._call_callbacks(step, state, is_last=True)
                            is_last, stopping = True, False
                            all_failed = self._failures.end(step, state)
                except EvaluationStoppedError:
                    is_last, stopping = False, True
            due = self._opened is not None and self._opened.is_due(step)
            due = due or self._best.is_due(step)
            if is_last or (stopping and step) or (due and step > self._info.first_step):
                self._save(step, state, is_last=is_last or stopping, is_due=due, is_end=is_last)
            if is_last or stopping:
                break
            with jax.transfer_guard("allow"):
                batch = next(batches)
            with jax.transfer_guard("disallow"):
                state, metrics = ensemble.update_steps(state, batch)
                previous_step, step = step, step + steps_in(batch)
                stop.has_progress = True
                self._reader.dispatched(previous_step, step, metrics)
            state, all_failed = self._failures.act(previous_step, step, state)
            ends = step >= last_step
            state, asked_to_end = self._call_callbacks(step, state, is_last=ends)
            asked_to_end = (may_be_asked and cluster.any_host(asked_to_end)) or all_failed
            # The callbacks have changed the state of this step already, so the state that they
            # return from this second call is not used.
            if asked_to_end and not ends:
                self._call_callbacks(step, state, is_last=True)
        if self._opened is not None:
            self._opened.wait()
        self._reader.catch_up()
        best = None if stopping else self._best.at_end(step, state)
        final_step, final_state = best or (step, state)
        if self._eval_data is not None and not stopping and final_step != self._ended_step:
            self._scores, self._evaluation = self._eval_data.evaluate(ensemble, final_state, True)
        self._reader.end()
        if self._eval_data is not None and not stopping:
            for callback in self._callbacks:
                call_hook(
                    callback,
                    "finished",
                    final_step,
                    self._scores,
                    self._evaluation,
                    self._eval_data.split,
                )
        # If neither a signal nor the last step nor failures ended the run, a callback did.
        has_stopper = not (stopping or all_failed or step >= last_step)
        stopped_by = self._name_of_stopper() if has_stopper else None
        return Outcome(
            state=final_state,
            step=step,
            best_step=best and final_step,
            history=self._history,
            scores=None if stopping else self._scores,
            evaluation=None if stopping else self._evaluation,
            signal=stop.signal if stopping else None,
            diverged=self._diverged(),
            failed=self._failures.told(state),
            all_failed=all_failed,
            stopped_by=stopped_by,
            stop_reason=stopped_by and call_hook(self._stopper, "reason"),
            seconds=self._reader.seconds,
            steps_per_second=self._reader.steps_per_second(),
        )

    def _call_callbacks(self, step: int, state: State, *, is_last: bool) -> tuple[State, bool]:
        """Calls the callbacks after an update.

        Returns:
            The state that the callbacks return, and whether one of them returned `STOP`.
        """
        if is_last:
            self._reader.catch_up()
        metrics = self._reader.unseen()  # Without this call, unseen metrics would pile up.
        called = [callback for callback in self._callbacks if callable(callback)]
        info = StepInfo(step, state, metrics, is_last, self._reader.step)
        asked_to_end = False
        for callback in called:
            result = call_after_update(callback, info)
            if result is None:
                continue
            if result is STOP:
                asked_to_end = True
                if self._stopper is None:
                    self._stopper = callback
                continue
            state = _checked_state(callback, result, info.state, self._info.ensemble.layout)
            info = info._replace(state=state)
        return state, asked_to_end

    def _evaluate(self, step: int, state: State, *, is_last: bool) -> bool:
        """Scores the evaluation data, and returns whether a callback asks the run to end.

        Args:
            step: Number of steps that the state has seen.
            state: State of the ensemble.
            is_last: Whether the run ends at this step.
        """
        if self._eval_data is None:
            return False
        self._reader.catch_up()
        self._owes_evaluation = True
        try:
            has_stop = self._scored(step, state, self._eval_data, is_last=is_last)
            self._owes_evaluation = False
            return has_stop
        except EvaluationStoppedError:
            raise
        except Exception:  # The data, a metric or a callback may raise anything.
            if jax.process_count() == 1:  # The other hosts would not take part in the save.
                self._save(step, state, is_last=True)
            raise

    def _scored(self, step: int, state: State, eval_data: EvalData, *, is_last: bool) -> bool:
        """Computes and records the scores, and calls the callbacks; see `_evaluate`."""
        since = time.monotonic()
        self._scores, self._evaluation = eval_data.evaluate(self._info.ensemble, state, is_last)
        self._reader.paused(time.monotonic() - since)
        self._ended_step = step if is_last else None
        if step == self._scored_step:
            return False
        self._scored_step = step
        values = self._scores.ensemble or self._scores.mean_member
        self._write(step, score_record(eval_data.name, values, self._scores.members))
        has_stop = self._any_stops("evaluated", step, self._scores)
        self._best.evaluated(step, state, self._saved_scores(step))
        return has_stop

    def _any_stops(self, hook: str, *args: object) -> bool:
        """Calls a method of all callbacks, and returns whether one of any host returns `STOP`."""
        answers = [call_hook(callback, hook, *args) for callback in self._callbacks]
        stoppers = [
            callback
            for callback, answer in zip(self._callbacks, answers, strict=True)
            if answer is STOP
        ]
        if stoppers and self._stopper is None:
            self._stopper = stoppers[0]
        return cluster.any_host(bool(stoppers))

    def _diverged(self) -> list[int]:
        """Returns the ids of the members whose last training loss is not finite."""
        is_finite = np.isfinite(self._reader.losses)
        return [i for i, good in zip(self._info.member_ids, is_finite, strict=True) if not good]

    def _name_of_stopper(self) -> str:
        """Returns the name of the callback that ended the run."""
        if self._stopper is None:
            return "a callback of another host"
        return name_of_callback(self._stopper)

    def _save(
        self,
        step: int,
        state: State,
        *,
        is_last: bool,
        is_due: bool = False,
        is_end: bool = False,
    ) -> None:
        """Starts to save a checkpoint, if the run has checkpoints.

        Args:
            step: Number of steps that the state has seen.
            state: State of the ensemble.
            is_last: Whether nothing is saved after it.
            is_due: Whether the cadence or the best evaluation asks for this save.
            is_end: Whether the run is complete.
        """
        if self._opened is None:
            return
        # The metrics of a checkpoint's steps are written before it. On one host, the thread that
        # saves reads them, and looks at the parameters that it has copied. Several hosts do both
        # together, in their main threads.
        is_alone = jax.process_count() == 1
        if not is_alone:
            self._reader.catch_up()
            has_finite = bool(finite_members(state.params, self._info.ensemble).any())
            if not self._failures.may_replace_checkpoints(step, has_finite_member=has_finite):
                return

        def is_wanted(leaves: Mapping[str, Leaf]) -> bool:
            return not is_alone or self._failures.may_replace_checkpoints(
                step, has_finite_member=has_finite_member(leaves)
            )

        def after() -> None:
            self._reader.catch_up(step)
            for callback in self._callbacks:
                call_hook(callback, "sync")

        host_files = self._host_files() | ({OWED_FILE: b"1"} if self._owes_evaluation else {})
        kept_step = self._best.step
        if is_end and kept_step is not None:
            host_files[RESULT_FILE] = str(kept_step).encode()
        self._opened.save(
            step,
            state,
            record=self._record,
            scores=self._saved_scores(step),
            host_files=host_files,
            # Only `rollback` asks for it.
            is_due=is_due or self._info.ensemble.failures.policy != "rollback",
            after=after,
            late_files=self._failures.file_at(step),
            is_wanted=is_wanted,
            is_last=is_last,
            kept_step=kept_step,
        )

    def _saved_scores(self, step: int) -> dict[str, float]:
        """Returns the scores to save at a step, by name; empty if it was not evaluated."""
        if self._scores is None or step != self._scored_step:
            return {}
        return finite_scores(self._scores, self._opened.member_score if self._opened else None)

    def _write(self, step: int, record: dict[str, float]) -> None:
        """Adds a record to the history and passes it to the writers."""
        self._history.append({"step": step, **record})
        if cluster.is_main():
            with jax.transfer_guard("allow"):  # A user's writer may transfer what it likes.
                for callback in self._callbacks:
                    call_hook(callback, "write", step, record)


def _crossed(every_steps: int | Fraction | None, previous_step: int, step: int) -> bool:
    """Returns whether a multiple of `every_steps` lies in (previous_step, step]."""
    return every_steps is not None and step // every_steps > previous_step // every_steps


def _checked_state(callback: Callback, result: object, state: State, layout: Layout) -> State:
    """Returns the state that a callback returned, on the layout.

    Args:
        callback: Callback of the user, for messages.
        result: Object that it returned.
        state: State that it was given.
        layout: Layout of the members.

    Raises:
        UserError: If the object is not a state with the structure of the given one.
    """
    name = name_of_callback(callback)
    if not isinstance(result, State):
        raise UserError(
            f"The callback {name} returned {kind_of(result)}. Return None, a State, or "
            "dist_ens.callbacks.STOP."
        )
    different = differing(leaf_types(state), leaf_types(result))
    if different:
        raise UserError(
            f"The callback {name} returned a state of another structure: {', '.join(different)} "
            "differ in shape or type, or are absent. Return the state with other values only, such "
            "as info.state._replace(params=new_params)."
        )
    return layout.placed(result, MEMBERS, f"The state of callback {name}")
