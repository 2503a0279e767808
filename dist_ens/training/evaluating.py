"""The evaluations of a run, and the records of its training metrics."""

import time
from collections.abc import Mapping

import numpy as np

from dist_ens.callbacks import STOP, StepInfo
from dist_ens.callbacks.protocol import Service, Stop
from dist_ens.callbacks.records import finite_scores, score_record, training_record
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.ground.state import State
from dist_ens.processes.stop_signal import EvaluationStoppedError
from dist_ens.training.held_out import EvalData
from dist_ens.training.runner import Runner, crossed


class Recording(Service):
    """The service that records the training metrics every few steps, and at the last step."""

    def __init__(self, run: Runner, every_steps: int) -> None:
        self._run, self._every_steps, self._step = run, every_steps, run.step

    def read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Records the metrics of a call that have arrived, if a record is due."""
        previous, self._step = self._step, step
        info = self._run.info
        if crossed(self._every_steps, previous, step) or step == info.last_step:
            self._run.write(step, training_record(info.member_ids, metrics))


class Evaluating(Service):
    """The service that scores the evaluation data, every few steps and at the end."""

    def __init__(self, run: Runner, data: EvalData | None, member_score: str | None) -> None:
        self._run, self._data, self._member_score = run, data, member_score
        self.scores: Scores | None = None
        self.evaluation: Evaluation | None = None
        self._previous_step = run.step
        # Last step whose scores are recorded. A resumed run has recorded those of its first step.
        self._recorded_step = run.step or None
        self._final_step: int | None = None  # Step of the last evaluation if it was a final one.
        self._is_owed = False

    def state(self) -> bool | None:
        """Returns whether a signal stopped the evaluation of the last step."""
        return self._is_owed or None

    def restore(self, state: bool) -> None:
        """Has the first step evaluated, if it is owed."""
        self._is_owed, self._recorded_step = state, None

    def before(self, info: StepInfo) -> Stop | None:
        """Scores the state if it is due, and returns `STOP` if a callback ends the run here."""
        if self._data is None:
            return None
        previous, self._previous_step = self._previous_step, info.step
        is_due = crossed(self._run.info.eval_every, previous, info.step)
        if not (info.is_last or self._is_owed or is_due):
            return None
        self._is_owed = True
        try:
            with self._run.stop.stopping_evaluations():
                stops = self._evaluate(self._data, info)
        except EvaluationStoppedError:
            self._run.interrupt()
            return None
        except Exception:  # The data, a metric or a callback may raise anything.
            self._run.call_all("failed", info, own_only=True)
            raise
        self._is_owed = False
        return STOP if stops and not info.is_last else None

    def _evaluate(self, data: EvalData, info: StepInfo) -> bool:
        """Scores a state, and returns whether a callback asks the run to end."""
        self._run.reader.catch_up()
        since = time.monotonic()
        ensemble = self._run.info.ensemble
        self.scores, self.evaluation = data.evaluate(ensemble, info.state, info.is_last)
        self._run.reader.paused(time.monotonic() - since)
        self._final_step = info.step if info.is_last else None
        if info.step == self._recorded_step:
            return False
        self._recorded_step = info.step
        values = self.scores.ensemble or self.scores.mean_member
        self._run.write(info.step, score_record(data.name, values, self.scores.members))
        return self._run.ask("evaluated", info.step, self.scores)

    def scores_at(self, step: int) -> dict[str, float]:
        """Returns the scores to save at a step, by name; empty if it was not evaluated."""
        if self.scores is None or step != self._recorded_step:
            return {}
        return finite_scores(self.scores, self._member_score)

    def end(self, step: int, state: State) -> None:
        """Scores the state that the run returns, and passes the scores to the callbacks."""
        if self._data is None:
            return
        if step != self._final_step:
            ensemble = self._run.info.ensemble
            self.scores, self.evaluation = self._data.evaluate(ensemble, state, True)
        self._run.reader.end()
        self._run.call_all("finished", step, self.scores, self.evaluation, self._data.split)
