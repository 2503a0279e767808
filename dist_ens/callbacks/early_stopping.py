"""Early stopping: a run ends when its score no longer improves."""

import math
from collections.abc import Iterable

from dist_ens.callbacks.protocol import STOP, RunInfo, Stop
from dist_ens.errors import UserError, counted
from dist_ens.evaluation import Scores
from dist_ens.json_text import JsonDict
from dist_ens.metrics.catalogue import direction_of


class EarlyStopping:
    """A callback that ends a run when a score of the ensemble no longer improves.

    The run needs `eval_data` or `validation`, and `eval_every`. A run that has ended is not trained
    further when it is started again with the same patience.

    Args:
        metric: Name of the score, such as "nll" or "accuracy".
        patience: Number of evaluations without an improvement after which the run ends, at least 1.
        min_delta: Smallest change that counts as an improvement, in the unit of the score.
        direction: Whether a "lower" or a "higher" score is better. Default: the metric's own
            direction. Auxiliary scalars of a loss function have none.

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
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise UserError(
                f"EarlyStopping takes a patience of at least 1 and a min_delta of at least 0: got "
                f"patience={patience}, min_delta={min_delta}."
            )
        if direction not in (None, "lower", "higher"):
            raise UserError(
                f"direction is {direction!r}. Give 'lower' or 'higher', or leave it out to take "
                "the metric's own."
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.direction = direction
        self._direction = direction
        self._best, self._num_without, self._is_restored = math.inf, 0, False
        self._best_step: int | None = None

    def begin(self, run: RunInfo) -> Stop | None:
        """Checks the score, and returns `STOP` if the run that is resumed has ended already.

        A run that does not resume another one forgets the best score of an earlier run.
        """
        if not self._is_restored:
            self._best, self._best_step, self._num_without = math.inf, None, 0
        self._is_restored = False
        if not run.directions or run.eval_every is None:
            missing = "eval_every" if run.directions else "eval_data or validation, and eval_every"
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, and nothing is scored during training. "
                f"Give fit {missing}."
            )
        self._require(run.directions)
        self._direction = self.direction or run.directions[self.metric]
        self._sign()
        return STOP if self._num_without >= self.patience else None

    def evaluated(self, step: int, scores: Scores) -> Stop | None:
        """Returns `STOP` if the score has not improved for `patience` evaluations."""
        values = scores.ensemble or scores.mean_member
        self._require(values)
        self._direction = self._direction or direction_of(self.metric, scores.metrics)
        value = self._sign() * values[self.metric]
        if value < self._best - self.min_delta:
            self._best, self._best_step, self._num_without = value, step, 0
            return None
        self._num_without += 1
        return STOP if self._num_without >= self.patience else None

    def reason(self) -> str:
        """Returns why the run ends, as a clause."""
        evaluations = counted(self._num_without, "evaluation")
        if math.isinf(self._best):
            return f"{self.metric} was not finite in {evaluations} (patience={self.patience})"
        by = f" by more than {self.min_delta:.4g}" if self.min_delta else ""
        at = "" if self._best_step is None else f" at step {self._best_step:,}"
        return (
            f"{self.metric} has not improved{by} for {evaluations} (best "
            f"{self._sign() * self._best:.4g}{at}; patience={self.patience})"
        )

    def state(self) -> dict[str, float | None]:
        """Returns the best score, its step and the number of evaluations since it."""
        best = None if math.isinf(self._best) else self._best
        return {"best": best, "best_step": self._best_step, "num_without": self._num_without}

    def restore(self, state: JsonDict) -> None:
        """Restores a state that `state` returned."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._best_step = state.get("best_step")  # An older version did not save it.
        self._num_without, self._is_restored = state["num_without"], True

    def _require(self, names: Iterable[str]) -> None:
        """Raises a `UserError` unless the score is among some names."""
        if self.metric not in names:
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, and the scores are "
                f"{', '.join(names)}. Choose one of these."
            )

    def _sign(self) -> float:
        """Returns 1 if a lower score is better, and -1 if a higher one is."""
        if self._direction is None:
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, of which neither a lower nor a higher "
                "score is known to be better. Choose another score, or give direction='lower' or "
                "'higher'."
            )
        return -1.0 if self._direction == "higher" else 1.0
