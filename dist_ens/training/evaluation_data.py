"""Data on which a running loop scores the ensemble."""

import dataclasses
from collections.abc import Callable, Mapping

from dist_ens.data import Split
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.state import State
from dist_ens.types import Shapes


@dataclasses.dataclass(frozen=True)
class EvalData:
    """A split, and the functions that check and score it.

    Attributes:
        name: Name of the split in records, such as `test`.
        evaluate: Function of the ensemble, its state and whether the evaluation is the last one. It
            returns the scores, and the evaluation that a report draws.
        check: Function of the ensemble and the shapes of a training batch. It raises a `UserError`
            if the split cannot be scored, and returns the direction of each score by its name:
            "lower", "higher" or None.
        split: Examples that are scored.
    """

    name: str
    evaluate: Callable[[Ensemble, State, bool], tuple[Scores, Evaluation | None]]
    check: Callable[[Ensemble, Shapes], Mapping[str, str | None]]
    split: Split | None = None
