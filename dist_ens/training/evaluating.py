"""The evaluations of a run with the data that it scores, and the records of its metrics."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dist_ens.callbacks import STOP, StepInfo
from dist_ens.callbacks.json_lines import (
    JsonLines,
    finite_scores,
    hyper_record,
    score_record,
    training_record,
)
from dist_ens.callbacks.protocol import Service, Stop
from dist_ens.data import PartOfSplit, Source, Split, TreeSplit, parts_of
from dist_ens.data.held_out import divided
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.evaluation.examples import Examples, examples_of
from dist_ens.evaluation.label_checks import check_inputs, check_values
from dist_ens.evaluation.scoring import score, score_directions
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Data, Shapes, Specs
from dist_ens.losses import Objective
from dist_ens.metrics import Metric
from dist_ens.processes.stop_signal import EvaluationStoppedError
from dist_ens.training.runner import Runner, crossed


@dataclasses.dataclass(frozen=True)
class EvalData:
    """A split, and the functions that score it.

    Attributes:
        evaluate: Function of the ensemble, its state and whether the evaluation is the last one.
        directions: Function of the ensemble and the shapes of a training batch, which returns the
            direction of each score. It raises a `UserError` if the split cannot be scored.
        final: Data to score at the end in its place, such as the test split after a validation
            split. None scores the same split.
    """

    name: str  # Name of the split in records, such as `test`.
    evaluate: Callable[[Ensemble, State, bool], tuple[Scores, Evaluation | None]]
    directions: Callable[[Ensemble, Shapes], Mapping[str, str | None]]
    split: Split | None = None
    final: "EvalData | None" = None


def with_validation(data: Data, share: float | None) -> tuple[Data, Examples | None]:
    """Returns the examples to train on, and the held-out ones, the same for every seed, or None."""
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        raise UserError(f"validation is {share!r}. Give a share of the examples in (0, 1).")
    if isinstance(data, Source):
        source = data if share is None else data.with_validation(share)
        return source, None if source.valid is None else Examples(source.valid, source.spec)
    if share is None:
        return data, None
    whole = TreeSplit(data)
    train, valid = divided(share, len(whole))
    return whole.take(train), Examples(PartOfSplit(whole, valid))


def eval_data_of(
    given: Data | EvalData | None,
    held_out: Examples | None,
    metrics: Sequence[Metric | str],
    names: Sequence[str] = (),
    batch_specs: Specs = "batch",
    batch_size: int | None = None,
) -> EvalData:
    """Returns the data that is scored: `eval_data` of `fit`, or else the held-out examples."""
    if isinstance(given, EvalData):
        return given
    examples = examples_of(held_out if given is None else given, names, batch_specs)

    def evaluate(
        ensemble: Ensemble, state: State, is_last: bool
    ) -> tuple[Scores, Evaluation | None]:
        at_end = {"intervals": is_last, "by_size": is_last}
        return score(ensemble, state, examples, metrics=metrics, batch_size=batch_size, **at_end)

    def directions(ensemble: Ensemble, batch: Batch) -> Mapping[str, str | None]:
        found = score_directions(ensemble, batch, examples, metrics=metrics, batch_size=batch_size)
        if isinstance(examples.split, TreeSplit):
            check_inputs(ensemble.objective, examples.split.tree, "eval_data")
        if ensemble.objective is not None and examples.split.in_memory:
            _check_eval_labels(ensemble.objective, examples.split)
        return found

    return EvalData("valid" if given is None else "test", evaluate, directions, examples.split)


def _check_eval_labels(objective: Objective, split: Split) -> None:
    """Raises a `UserError` if a label is no class or not finite, where its weight is not 0."""
    parts = parts_of(split, (objective.LABELS, objective.WEIGHTS))
    labels, subject = parts[objective.LABELS], "The labels of the evaluation data"
    if objective.WEIGHTS in parts:
        weights = parts[objective.WEIGHTS]
        ones = [1] * (labels.ndim - weights.ndim)
        weights = weights.reshape(*weights.shape[: labels.ndim], *ones)
        labels = np.where(weights == 0, labels.dtype.type(0), labels)
    check_values(objective, labels, subject)


class Recording(Service):
    """The service that records the training metrics every few steps, and at the last step."""

    def __init__(self, run: Runner, every_steps: int, *, has_settings: bool) -> None:
        self._run, self._every_steps, self._step = run, every_steps, run.step
        self._has_settings = has_settings

    def read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Records the metrics of a call that have arrived, if a record is due."""
        previous, self._step = self._step, step
        info = self._run.info
        if info.ensemble.hyper and not self._has_settings:
            self._has_settings = True
            self._run.write(previous, hyper_record(info.member_ids, info.ensemble.hyper))
        if crossed(self._every_steps, previous, step) or step == info.last_step:
            ids = info.member_ids
            if stopped := self._run.stopped:  # Their last metrics are old.
                running = [k for k, each in enumerate(ids) if each not in stopped]
                ids = [ids[k] for k in running]
                metrics = {name: values[:, running] for name, values in metrics.items()}
            if ids:
                self._run.write(step, training_record(ids, metrics))


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
        # Whether a step is to be evaluated, and whether only the callbacks wait for its scores.
        self._is_owed = self._is_written = False

    def state(self) -> bool | None:
        """Returns whether owed scores have yet to be recorded; None if no evaluation is owed."""
        return not self._is_written if self._is_owed else None

    def restore(self, state: bool) -> None:
        """Has the first step evaluated."""
        self._is_owed, self._is_written, self._recorded_step = True, not state, None

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
        self._is_owed = self._is_written = False
        return STOP if stops and not info.is_last else None

    def _evaluate(self, data: EvalData, info: StepInfo) -> bool:
        """Scores a state, and returns whether a callback asks the run to end."""
        self._run.reader.catch_up()
        since = time.monotonic()
        ensemble = self._run.info.ensemble
        state = self._run.compaction.joined(info.state)
        is_final = info.is_last and data.final is None
        self.scores, self.evaluation = data.evaluate(ensemble, state, is_final)
        self._run.reader.paused(time.monotonic() - since)
        self._final_step = info.step if is_final else None
        if info.step == self._recorded_step:
            return False
        self._recorded_step = info.step
        if not self._is_written:
            self._write(info.step, data.name, self.scores)
        self._is_written = True
        self._run.call_all("scored", own_only=True)
        return self._run.ask("evaluated", info.step, self.scores)

    def scores_at(self, step: int) -> dict[str, float]:
        """Returns the scores to save at a step, by name; empty if it was not evaluated."""
        if self.scores is None or step != self._recorded_step:
            return {}
        return finite_scores(self.scores, self._member_score)

    def end(self, step: int, state: State, *, is_last: bool) -> None:
        """Scores the state that the run returns, and passes the scores to the callbacks.

        If it is the last one, it may have been scored. A signal stops the run instead.
        """
        if self._data is None:
            return
        run, data = self._run, self._data.final or self._data
        if step != self._final_step or not is_last:
            try:
                with run.stop.stopping_evaluations():
                    self.scores, self.evaluation = data.evaluate(run.info.ensemble, state, True)
            except EvaluationStoppedError:
                run.interrupt()
                return
            if data is self._data.final:
                self._write(run.step, data.name, self.scores)
        run.reader.end()
        run.call_all("finished", step, self.scores, self.evaluation, data.split)

    def _write(self, step: int, name: str, scores: Scores) -> None:
        """Records scores, unless a run that ended at this step has recorded them."""
        values = scores.ensemble or scores.mean_member
        record = score_record(name, values, scores.members)
        files = [each for each in self._run.services if isinstance(each, JsonLines)]
        if step > self._run.info.first_step or not any(file.holds(step, record) for file in files):
            self._run.write(step, record)
