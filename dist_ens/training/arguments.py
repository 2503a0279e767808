"""The arguments of `fit`, and what the config door adds to them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from dist_ens.checkpoint import Checkpoints, StepRecord
from dist_ens.data import OrderRule
from dist_ens.ensemble import Ensemble
from dist_ens.ground.json_text import Json
from dist_ens.ground.state import State
from dist_ens.ground.types import Callback, Data
from dist_ens.metrics import Metric
from dist_ens.training.held_out import EvalData


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of `fit`, which describes them."""

    ensemble: Ensemble
    data: Data
    steps: int | None = None
    epochs: float | None = None
    batch_size: int | None = None
    order: OrderRule | None = None
    state: State | None = None
    callbacks: Sequence[Callback] = ()
    checkpoints: Checkpoints | None = None
    eval_data: Data | EvalData | None = None
    eval_every: int | str | None = None
    validation: float | None = None
    metrics: Sequence[Metric] = ()
    steps_per_call: int | None = None
    log_every: int = 100
    progress: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Door:
    """The additions of the config door to the arguments of `fit`.

    `check_resume` raises a `UserError` if the run must not resume from a saved record.
    """

    record: StepRecord | None = None
    say: Callable[[str], None] | None = None
    check_resume: Callable[[Mapping[str, Json]], None] = lambda _: None
