"""Early stopping: a run ends when its score no longer improves."""

import math

from dist_ens.callbacks.protocol import STOP, RunInfo, Stop
from dist_ens.evaluation import Scores
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import require_coefficient, require_one_of, whole_number


class EarlyStopping:
    """A callback that ends a run when a score of the ensemble no longer improves.

    The run needs `eval_data` or `validation`, and `eval_every`. `fit` returns the state of the best
    evaluation and its scores. A run that has ended is not trained further with the same patience.

    Args:
        metric: Name of the score, such as "nll" or "accuracy".
        patience: Number of evaluations without an improvement after which the run ends, at least 1.
        min_delta: Smallest change that counts as an improvement, in the unit of the score.
        direction: Whether a "lower" or a "higher" score is better. Default: the metric's own
            direction. Auxiliary scalars of a loss function have none.
        restore_best: Whether `fit` returns the state of the best evaluation. A copy of it waits in
            the host's memory, and a run with checkpoints saves it. False returns the last state.

    Raises:
        UserError: If `patience`, `min_delta` or `direction` is out of range; when the run begins,
            if nothing is scored during training, or the score is unknown or has no direction.

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
        restore_best: bool = True,
    ) -> None:
        self.metric, self.patience = metric, whole_number("patience", patience, least=1)
        if min_delta:
            require_coefficient("min_delta", min_delta, "0 counts every change.")
        if direction is not None:
            require_one_of("direction", direction, ("lower", "higher"))
        self.min_delta, self.direction, self.restore_best = min_delta, direction, restore_best
        self._direction = direction
        self._is_restored = False
        self._best = self._to_beat = math.inf  # The score to beat is the last that improved enough.
        self._best_step: int | None = None
        self._num_without = 0

    def begin(self, run: RunInfo) -> Stop | None:
        """Checks the score, and returns `STOP` if the run that is resumed has ended already."""
        if not self._is_restored:  # An earlier run may have used this callback.
            self._best = self._to_beat = math.inf
            self._best_step, self._num_without = None, 0
        self._is_restored = False
        scored = {} if run.eval_every is None else run.directions
        if self.metric not in scored:
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, and the scores during training are "
                f"{', '.join(scored) or 'none'}. Choose one, or give fit eval_data and eval_every."
            )
        self._direction = self.direction or run.directions[self.metric]
        if self._direction is None:
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, of which neither a lower nor a higher "
                "score is known to be better. Choose another, or give direction='lower' or "
                "'higher'."
            )
        return STOP if self._num_without >= self.patience else None

    def evaluated(self, step: int, scores: Scores) -> Stop | None:
        """Returns `STOP` if the score has not improved for `patience` evaluations."""
        values = scores.ensemble or scores.mean_member
        value = self._sign() * values[self.metric]
        if value < self._best:
            self._best, self._best_step = value, step
        if value < self._to_beat - self.min_delta:
            self._to_beat, self._num_without = value, 0
            return None
        self._num_without += 1
        return STOP if self._num_without >= self.patience else None

    def best_step(self) -> int | None:
        """Returns the step of the best evaluation; None without `restore_best`."""
        return self._best_step if self.restore_best else None

    def reason(self) -> str:
        """Returns why the run ends, as a clause."""
        evaluations = counted(self._num_without, "evaluation")
        if math.isinf(self._best):
            return f"{self.metric} was not finite in {evaluations} (patience={self.patience})"
        by = f" by more than {self.min_delta:.4g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved{by} for {evaluations} (best "
            f"{self._sign() * self._best:.4g} at step {self._best_step:,}; "
            f"patience={self.patience})"
        )

    def state(self) -> dict[str, float | None]:
        """Returns the best score and its step, the score to beat and the evaluations since it."""
        best, to_beat = (None if math.isinf(x) else x for x in (self._best, self._to_beat))
        return {
            "best": best,
            "best_step": self._best_step,
            "to_beat": to_beat,
            "num_without": self._num_without,
        }

    def restore(self, state: JsonDict) -> None:
        """Restores a state that `state` returned."""
        self._best, self._to_beat = (
            math.inf if state[name] is None else state[name] for name in ("best", "to_beat")
        )
        self._best_step, self._num_without = state["best_step"], state["num_without"]
        self._is_restored = True

    def _sign(self) -> float:
        """Returns 1 if a lower score is better, and -1 if a higher one is."""
        return -1.0 if self._direction == "higher" else 1.0
