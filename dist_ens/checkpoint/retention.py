"""The rule that decides which checkpoints of a run are kept."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

OF_MEMBER = "/member_"  # Part of the name of a score that is followed by the id of a member.
Scores = Mapping[int, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rule that decides which checkpoints of a run are kept; see `Checkpoints`.

    The interval of `every_steps` that begins at step 0 is left out.
    """

    last: int
    every_steps: int | None = None
    best: str | None = None
    best_of_members: str | None = None
    higher_is_better: frozenset[str] = frozenset()

    @property
    def uses_scores(self) -> bool:
        """Whether the rule depends on scores."""
        return self.best is not None or self.best_of_members is not None

    def of(self, steps: Sequence[int], scores: Scores) -> set[int]:
        """Returns the steps to keep of those saved, the oldest first, given the scores by step.

        >>> sorted(Retention(1, every_steps=100).of([90, 110, 150, 230, 240], {}))
        [110, 230, 240]
        """
        kept = {*steps[-self.last :]}
        if self.every_steps is not None:
            first_of = {step // self.every_steps: step for step in reversed(steps)}
            kept |= {step for interval, step in first_of.items() if interval}
        return kept | self.best_of(steps, scores)

    def best_of(self, steps: Sequence[int], scores: Scores) -> set[int]:
        """Returns the steps to keep for their scores; see `of`."""
        names = {self.best} if self.best is not None else set()
        if self.best_of_members is not None:
            of_members = f"{self.best_of_members}{OF_MEMBER}"
            names |= {name for at in scores.values() for name in at if name.startswith(of_members)}
        best = set()
        for name in names:
            sign = -1 if name.partition(OF_MEMBER)[0] in self.higher_is_better else 1
            values = {step: sign * scores.get(step, {}).get(name, math.nan) for step in steps}
            finite = [(value, step) for step, value in values.items() if math.isfinite(value)]
            best |= {min(finite)[1]} if finite else set()
        return best
