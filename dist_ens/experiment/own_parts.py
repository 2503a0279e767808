"""The parts of a run that its config file makes itself."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_ens.losses import Objective
    from dist_ens.members import Member
    from dist_ens.methods import LossFunction
    from dist_ens.metrics import Metric
    from dist_ens.types import Callback, Optimizer, PyTree


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """The parts that a config file makes itself, in place of those that its fields name.

    Attributes:
        member: Network of one member, a `dist_ens.members.Member`. None uses `model.name`.
        objective: Objective, with a loss and a predictive distribution. None uses `loss.name`.
        loss: Loss function, `loss(params, model_state, batch, key)`. None uses the objective.
        step: Functions of a user's step, by their names in `Ensemble.from_step`: `init`,
            `step`, and `apply` or `eval_loss`. None uses the network, the loss and the optimizer.
        optimizer: Optimizer with `init` and `update`. None uses `optimizer.name`.
        metrics: Metrics beside those of the objective. Default: none.
        callbacks: Callbacks beside those of the command line. Default: none.
    """

    member: "Member | None" = None
    objective: "Objective | None" = None
    loss: "LossFunction | None" = None
    step: "Mapping[str, Callable[..., PyTree]] | None" = None
    optimizer: "Optimizer | None" = None
    metrics: "Sequence[Metric]" = ()
    callbacks: "Sequence[Callback]" = ()

    @property
    def has_objective(self) -> bool:
        """Whether an objective scores the run, and not a function."""
        return self.loss is None and "eval_loss" not in (self.step or {})

    @property
    def names(self) -> dict[str, str]:
        """Names of the objective, the loss, the optimizer and the step that were given, by kind.

        With the network they decide what a training step computes, and belong to the record of a
        run. Metrics and callbacks may change when it resumes. A part is named by its `name`, a
        function or class by its own name, and another object by its class.

        >>> OwnParts(loss=sum, callbacks=(print, [])).names
        {'loss': 'sum'}
        """
        given: dict[str, object] = {
            "objective": self.objective,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "step": self.step and self.step["step"],
        }
        return {kind: _name_of(part) for kind, part in given.items() if part is not None}


def _name_of(part: object) -> str:
    """Returns the name of a part, or that of its class."""
    named = getattr(part, "name", None) or getattr(part, "__qualname__", None)
    return named if isinstance(named, str) else type(part).__qualname__
