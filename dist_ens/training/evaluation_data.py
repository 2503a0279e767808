"""Data on which a running loop scores the ensemble."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dist_ens.ensemble import Ensemble
from dist_ens.state import State


@dataclasses.dataclass(frozen=True)
class EvalData:
    """A split, and how it is scored.

    Attributes:
        name: Name of the split in records, such as `test`.
        evaluate: Function of an ensemble, its state and whether the evaluation is the run's last.
            It returns scores, and whatever else a report needs of the evaluation.
        split: Examples that are scored.
    """

    name: str
    evaluate: Callable[[Ensemble, State, bool], tuple[Any, Any]]
    split: Any = None
