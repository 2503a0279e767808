"""Early stopping: a run ends when its score no longer improves."""

import math
from typing import Any

from dist_ens.callbacks.protocol import STOP
from dist_ens.errors import UserError
from dist_ens.metrics.catalogue import described


class EarlyStopping:
    """Ends a run when a score of the ensemble has not improved for some evaluations.

    The run needs `eval_data` or `validation`, and `eval_every`.

    Args:
        metric: Name of the score, such as "nll" or "accuracy".
        patience: Number of evaluations without an improvement after which the run ends, at least 1.
        min_delta: Smallest change that counts as an improvement, in the unit of the score.

    Raises:
        UserError: If the metric has no direction, or `patience` or `min_delta` is out of range.

    >>> EarlyStopping("nll", patience=3).patience
    3
    """

    def __init__(self, metric: str = "nll", *, patience: int = 5, min_delta: float = 0.0) -> None:
        if patience < 1 or min_delta < 0:
            raise UserError(
                f"EarlyStopping takes a patience of at least 1 and a min_delta of at least 0: got "
                f"patience={patience}, min_delta={min_delta}."
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self._sign = -1.0 if described(metric, {})[1] == "higher" else 1.0
        self._best, self._num_without = math.inf, 0

    def evaluated(self, step: int, scores: Any) -> Any:
        """Returns `STOP` if the score has not improved for `patience` evaluations."""
        values = scores.ensemble or scores.mean_member
        if self.metric not in values:
            raise UserError(
                f"EarlyStopping waits for {self.metric!r}, and the scores are "
                f"{', '.join(values)}. Choose one of these."
            )
        value = self._sign * values[self.metric]
        if value < self._best - self.min_delta:
            self._best, self._num_without = value, 0
            return None
        self._num_without += 1
        return STOP if self._num_without >= self.patience else None

    def state(self) -> dict[str, float | None]:
        """Returns what is saved with a checkpoint."""
        best = None if math.isinf(self._best) else self._best
        return {"best": best, "num_without": self._num_without}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._num_without = state["num_without"]
