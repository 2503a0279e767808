"""Early stopping: a run, or each of its members, ends when its score no longer improves."""

import dataclasses
import math
from collections.abc import Sequence

from dist_ens.callbacks.protocol import (
    STOP,
    RunInfo,
    Stop,
    StopMembers,
    direction_of,
    stop_members,
)
from dist_ens.evaluation import Scores
from dist_ens.ground.errors import counted
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import require_coefficient, require_one_of, whole_number
from dist_ens.ground.predictors import scores_by_member
from dist_ens.layout import ENSEMBLE

_OF = (ENSEMBLE, "members")
_ENSEMBLE = -1  # Stands for the id of a member where the ensemble is looked at.


@dataclasses.dataclass
class _Course:
    """The course of a score, of which a lower value is better.

    Attributes:
        best: Best value.
        best_step: Step of the best value.
        to_beat: Value that an improvement must beat: the last one that improved enough.
        num_without: Number of evaluations since then.
    """

    best: float = math.inf
    best_step: int | None = None
    to_beat: float = math.inf
    num_without: int = 0

    def add(self, step: int, value: float, min_delta: float) -> None:
        """Adds an evaluation."""
        if value < self.best:
            self.best, self.best_step = value, step
        if value < self.to_beat - min_delta:
            self.to_beat, self.num_without = value, 0
        else:
            self.num_without += 1


class EarlyStopping:
    """A callback that ends a run, or stops its members, when a score no longer improves.

    The run needs `eval_data` or `validation`, and `eval_every`. A run from a config needs
    `data.validation`, or it chooses by the test split. `fit` returns the state of the best
    evaluation and its scores. A run that has ended is not trained further with the same patience.

    Args:
        metric: Name of the score, such as "nll" or "accuracy".
        patience: Number of evaluations without an improvement after which the run ends, at least 1.
        min_delta: Smallest change that counts as an improvement, in the unit of the score.
        direction: Whether a "lower" or a "higher" score is better. Default: the metric's own
            direction. Auxiliary scalars of a loss function have none.
        of: Whose score counts. With "ensemble", the run ends when that of the ensemble no longer
            improves. With "members", each member stops by its own score, and the run ends when
            all have stopped.
        restore_best: Whether `fit` returns the state of the best evaluation. A copy of it waits in
            the host's memory, and a run with checkpoints saves it. Of members, each has the
            parameters of its own best evaluation, which are kept in the state beside the present
            ones. False returns the last state.

    Raises:
        UserError: If `patience`, `min_delta`, `direction` or `of` is out of range; when the run
            begins, if nothing is scored during training, or the score is unknown or has no
            direction.

    >>> from types import SimpleNamespace
    >>> stopping = EarlyStopping("nll", patience=2, direction="lower")
    >>> for step, nll in [(100, 0.9), (200, 0.7), (300, 0.8), (400, 0.7)]:
    ...     print(step, stopping.evaluated(step, SimpleNamespace(ensemble={"nll": nll})))
    100 None
    200 None
    300 None
    400 Stop.STOP
    >>> stopping.best_step()
    200
    >>> stopping.reason()
    'nll has not improved for 2 evaluations (best 0.7 at step 200; patience=2)'
    """

    def __init__(
        self,
        metric: str = "nll",
        *,
        patience: int = 5,
        min_delta: float = 0.0,
        direction: str | None = None,
        of: str = ENSEMBLE,
        restore_best: bool = True,
    ) -> None:
        self.metric, self.patience = metric, whole_number("patience", patience, least=1)
        if min_delta:
            require_coefficient("min_delta", min_delta, "0 counts every change.")
        if direction is not None:
            require_one_of("direction", direction, ("lower", "higher"))
        require_one_of("of", of, _OF)
        self.min_delta, self.direction, self.restore_best = min_delta, direction, restore_best
        self.stops_members = of == "members"
        self.keeps_best = self.stops_members and restore_best
        self._direction = direction
        self._is_restored = False
        self._courses: dict[int, _Course] = {}
        self._stopped: set[int] = set()
        self._step: int | None = None  # Step of the last evaluation.

    def begin(self, run: RunInfo) -> Stop | None:
        """Checks the score, and returns `STOP` if the run that is resumed has ended already."""
        if not self._is_restored:  # An earlier run may have used this callback.
            self._courses = {}
        self._is_restored, self._stopped = False, set()
        self._direction = direction_of(self, run)
        return STOP if self._has_ended(run.member_ids) else None

    def members_stopped(self, member_ids: Sequence[int]) -> None:
        """Notes which members have stopped, for whatever reason."""
        self._stopped = {*member_ids}

    def evaluated(self, step: int, scores: Scores) -> Stop | StopMembers | None:
        """Stops what has not improved for `patience` evaluations."""
        self._step = step
        if not self.stops_members:
            values = scores.ensemble or scores.mean_member
            self._add(_ENSEMBLE, step, values[self.metric])
            return STOP if self._has_ended([]) else None
        stops = []
        for member_id, score in scores_by_member(scores.members, self.metric).items():
            if member_id not in self._stopped:
                self._add(member_id, step, score)
                stops += [member_id] if self._is_over(member_id) else []
        return stop_members(stops) if stops else None

    def best_step(self) -> int | None:
        """Returns the step of the best evaluation; None without `restore_best`, or of members."""
        return self._courses.get(_ENSEMBLE, _Course()).best_step if self.restore_best else None

    def improved_members(self) -> Sequence[int]:
        """Returns the ids of the members whose last evaluation is their best."""
        return [each for each, course in self._courses.items() if course.best_step == self._step]

    def reason(self) -> str:
        """Returns why the run ends, as a clause."""
        if self.stops_members:
            return f"{self.metric} of no member improves any more (patience={self.patience})"
        course = self._courses.get(_ENSEMBLE, _Course())
        evaluations = counted(course.num_without, "evaluation")
        if math.isinf(course.best):
            return f"{self.metric} was not finite in {evaluations} (patience={self.patience})"
        by = f" by more than {self.min_delta:.4g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved{by} for {evaluations} (best "
            f"{self._sign() * course.best:.4g} at step {course.best_step:,}; "
            f"patience={self.patience})"
        )

    def state(self) -> JsonDict:
        """Returns the courses of the scores, by the ids of the members."""

        def plain(course: _Course) -> JsonDict:
            found = dataclasses.asdict(course)
            infinite = {name: None for name in ("best", "to_beat") if math.isinf(found[name])}
            return found | infinite

        return {str(each): plain(course) for each, course in self._courses.items()}

    def restore(self, state: JsonDict) -> None:
        """Restores a state that `state` returned."""

        def course(saved: JsonDict) -> _Course:
            infinite = {n: math.inf for n in ("best", "to_beat") if saved[n] is None}
            return _Course(**saved | infinite)

        self._courses = {int(each): course(saved) for each, saved in state.items()}
        self._is_restored = True

    def _add(self, which: int, step: int, value: float) -> None:
        self._courses.setdefault(which, _Course()).add(step, self._sign() * value, self.min_delta)

    def _is_over(self, which: int) -> bool:
        return self._courses.get(which, _Course()).num_without >= self.patience

    def _has_ended(self, member_ids: Sequence[int]) -> bool:
        """Returns whether nothing is trained any more."""
        looked_at = member_ids if self.stops_members else [_ENSEMBLE]
        return all(map(self._is_over, looked_at))

    def _sign(self) -> float:
        """Returns 1 if a lower score is better, and -1 if a higher one is."""
        return -1.0 if self._direction == "higher" else 1.0
