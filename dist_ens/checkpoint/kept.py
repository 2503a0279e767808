"""The rule that decides which checkpoints of a run are kept."""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Kept:
    """The rule that decides which checkpoints of a run are kept.

    Attributes:
        last: Number of the newest checkpoints to keep, at least 1.
        every_steps: Number of steps of an interval whose first checkpoint is kept. The interval
            that begins at step 0 is left out. None keeps none for this reason.
        best: Name of the score by which the best checkpoint is kept. None keeps none for this
            reason.
        higher_is_better: Whether a higher value of this score is better.
    """

    last: int
    every_steps: int | None = None
    best: str | None = None
    higher_is_better: bool = False

    def of(self, steps: Sequence[int], scores: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps to keep.

        Args:
            steps: Saved steps, the oldest first.
            scores: Scores of the ensemble at each step by name, if it was scored there.

        >>> sorted(Kept(1, every_steps=100).of([90, 110, 150, 230, 240], {}))
        [110, 230, 240]
        >>> sorted(Kept(1, best="nll").of([1, 2, 3], {1: {"nll": 0.5}, 2: {"nll": 0.4}}))
        [2, 3]
        """
        kept = {*steps[-self.last :]}
        if self.every_steps is not None:
            first_of = {step // self.every_steps: step for step in reversed(steps)}
            kept |= {step for interval, step in first_of.items() if interval}
        if self.best is not None:
            sign = -1 if self.higher_is_better else 1
            values = {step: sign * scores.get(step, {}).get(self.best, math.nan) for step in steps}
            finite = [(value, step) for step, value in values.items() if math.isfinite(value)]
            kept |= {min(finite)[1]} if finite else set()
        return kept
