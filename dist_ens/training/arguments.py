"""The arguments of `fit`, which check themselves, and what the config door adds to them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from dist_ens.callbacks.protocol import HOOKS
from dist_ens.checkpoint import Checkpoints, StepRecord
from dist_ens.data import OrderRule, Source
from dist_ens.data.kinds import is_tree_of_arrays
from dist_ens.ensemble import Ensemble
from dist_ens.execution.spec import AUTO
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.json_text import Json
from dist_ens.ground.numbers import MOST_STEPS, require_coefficient, require_one_of, whole_number
from dist_ens.ground.state import State, refuse_lists
from dist_ens.ground.types import Callback, Data
from dist_ens.metrics import Metric
from dist_ens.training.evaluating import EvalData

EPOCH = "epoch"  # Value of `eval_every` for an evaluation at the end of each epoch.
_A_STATE = "a State, such as that of Ensemble.init or of an earlier FitResult"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of `fit`, which describes them. They are checked here, or with the data."""

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
    metrics: Sequence[Metric | str] = ()
    steps_per_call: int | None = None
    log_every: int = 100
    progress: bool = True
    compact: str = AUTO

    def __post_init__(self) -> None:
        for name, value, kind, instead in (
            ("The ensemble", self.ensemble, Ensemble, "a dist_ens.Ensemble"),
            ("checkpoints", self.checkpoints, Checkpoints | None, "Checkpoints('runs/a')"),
            ("order", self.order, OrderRule | None, "one of dist_ens.data, such as data.kfold(5)"),
            ("The given state", self.state, State | None, _A_STATE),
            ("callbacks", self.callbacks, Sequence, "a list of callbacks: callbacks=[...]"),
        ):
            if not isinstance(value, kind):
                raise UserError(f"{name} is {kind_of(value)}. Give {instead}.")
        require_one_of("compact", self.compact, (AUTO, "never"))
        steps, epochs = self.steps, self.epochs
        if (steps is None) == (epochs is None):
            raise UserError(f"fit takes exactly one of steps and epochs: got {steps}, {epochs}.")
        if self.eval_data is not None and self.validation is not None:
            raise UserError("fit got both eval_data and validation. Leave one of them out.")
        if epochs is not None:
            require_coefficient("epochs", epochs, "Give the number of passes over the data.")
        for name in ("steps", "steps_per_call", "log_every", "eval_every"):
            value = getattr(self, name)
            if value is not None and (name, value) != ("eval_every", EPOCH):
                whole_number(name, value, least=int(name != "steps"), most=MOST_STEPS)
        for callback in self.callbacks:
            _check_callback(callback)
        if isinstance(self.data, Mapping | tuple):  # A list is an iterable of batches.
            refuse_lists(self.data, "the data")
        self._require_examples()

    def _require_examples(self) -> None:
        """Raises a `UserError` if an argument needs examples, and the data yields batches."""
        if isinstance(self.data, Source) or is_tree_of_arrays(self.data):
            return
        for name in ("batch_size", "order", "epochs", "validation", "eval_every"):
            value = getattr(self, name)
            if value is not None and (name != "eval_every" or value == EPOCH):
                raise UserError(
                    f"{name}={value!r} needs examples with positions: give arrays or a source. "
                    "Batches of an iterable have their own size and order, and are counted in "
                    f"steps. Leave {name} out."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Door:
    """The additions of the config door to the arguments of `fit`.

    `check_resume` raises a `UserError` if the run must not resume from a saved record.
    """

    record: StepRecord | None = None
    say: Callable[[str], None] | None = None
    check_resume: Callable[[Mapping[str, Json]], None] = lambda _: None


def _check_callback(callback: Callback) -> None:
    has_hook = callable(callback) or any(hasattr(callback, name) for name in HOOKS)
    if isinstance(callback, type) or not has_hook:
        raise UserError(
            f"callbacks holds {kind_of(callback)}. Give functions of a StepInfo, or instances of "
            f"classes with one of the methods {', '.join(HOOKS)}."
        )
    if getattr(callback, "every", None) is not None:
        whole_number(f"every of {type(callback).__name__}", callback.every, least=1)
