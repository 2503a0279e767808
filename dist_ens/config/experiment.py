"""The whole of what a run is, and what of it may change when it goes on."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from ml_collections import ConfigDict

from dist_ens.config.checks import require, require_positive
from dist_ens.config.execution_spec import AUTO, Execution
from dist_ens.config.reading import from_mapping, leaves, to_config_dict_of
from dist_ens.config.schema import (
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvaluationConfig,
    LayoutConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)

# The only fields in which a run may differ from the checkpoint that it goes on from: they change
# how far or how it runs, not what any step computes.
MAY_CHANGE_ON_RESUME = (
    "steps",
    "epochs",
    "layout",
    "execution",
    "checkpoint",
    "evaluation.every_steps",
    "evaluation.global_batch_size",
    "logging",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what a run computes. Frozen; checked when made.

    Attributes:
        num_members: Networks in the ensemble; None where `members_per_group` is given.
        members_per_group: Networks for each of the source's groups; None where `num_members` is
            given.
        seed: Of initialisation, dropout and the order of the data, together with the member's id.
        steps: Updates to take; None where `epochs` is given.
        epochs: In steps, each as many as there are batches in what a member is trained on, a last
            partial one counted (it is filled up from the next pass, for batches have one shape);
            None where `steps` is given.
        steps_per_call: Updates inside one jitted call.
        execution: How a device runs the members it holds: `auto`, the fastest that can be found
            when the run begins; or `WAY[+LOWERING][+STEPS]`, see `dist_ens.execution`.
    """

    num_members: int | None = 8
    members_per_group: int | None = None
    seed: int = 0
    steps: int | None = None
    epochs: float | None = None
    steps_per_call: int = 1
    execution: str = AUTO
    layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for field in ("num_members", "members_per_group", "steps", "epochs", "steps_per_call"):
            require_positive(field, getattr(self, field))
        require(
            (self.num_members is None) != (self.members_per_group is None),
            "Exactly one of num_members and members_per_group says how many to train; the other is "
            "None.",
            f"num_members={self.num_members}, members_per_group={self.members_per_group}",
            "Give --config.num_members=8 or --config.members_per_group=5; a file that gives one "
            "sets the other to None.",
        )
        require(
            0 <= self.seed < 2**32,
            "seed must lie in [0, 2**32).",
            f"seed={self.seed}",
            "Try --config.seed=0.",
        )
        require(
            (self.steps is None) != (self.epochs is None),
            "Exactly one of steps and epochs says how long to train; the other is None.",
            f"steps={self.steps}, epochs={self.epochs}",
            "Give --config.steps=1000 or --config.epochs=10.",
        )
        if self.execution != AUTO:
            Execution.parse(self.execution)
        require(
            self.loss.mixup == 0 or self.data.shuffle,
            "Pairs that are mixed are drawn at random.",
            f"loss.mixup={self.loss.mixup}, data.shuffle=False",
            "Set --config.data.shuffle=True.",
        )
        require(
            self.loss.mixup == 0 or self.data.examples != "bootstrap",
            "Examples that a member's bootstrap sample leaves out are not mixed into others.",
            f"loss.mixup={self.loss.mixup}, data.examples='bootstrap'",
            "Set --config.loss.mixup=0, or --config.data.examples=permuted.",
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Makes an experiment from nested mappings, such as `ConfigDict.to_dict()` or JSON.

        Args:
            values: Field names to values; sections are mappings, tuples may be lists.

        Returns:
            The experiment, every field checked.

        Raises:
            UserError: For an unknown field, a wrong type, or a value out of range.
        """
        return from_mapping(cls, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data that JSON can hold and `from_dict` reads back."""
        return dataclasses.asdict(self)

    def to_config_dict(self) -> ConfigDict:
        """Every field, loose again, for flags to override; a network's options beside its name."""
        config = to_config_dict_of(self)
        config.model = ConfigDict({"name": self.model.name, **self.model.options})
        return config

    def total_members(self, num_groups: int) -> int:
        """Networks of all groups together, of a source that has so many.

        Raises:
            UserError: If the groups would have unequally many, or see each other's examples.
        """
        require(
            num_groups == 1 or self.data.examples in ("splits", "bootstrap", "kfold"),
            "A source that splits its examples several times is for groups of members.",
            f"{num_groups} splits in {self.data.source}, data.examples={self.data.examples!r}",
            "Set --config.data.examples=splits (or bootstrap, or kfold).",
        )
        require(
            num_groups > 1 or self.data.examples != "splits" or self.data.source.startswith("uci:"),
            "Splits are of a source that splits its examples several times.",
            f"data.examples=splits for {self.data.source}, one training and one test set",
            "Try --config.data.examples=permuted, bootstrap or kfold.",
        )
        if self.num_members is None:
            return num_groups * (self.members_per_group or 1)
        require(
            self.num_members % num_groups == 0,
            "Every group has equally many members.",
            f"num_members={self.num_members} for {num_groups} groups",
            f"Try --config.num_members={math.ceil(self.num_members / num_groups) * num_groups}.",
        )
        return self.num_members

    def total_steps(self, epoch_length: int) -> int:
        """Updates in the whole run, as many as in a loop whose epochs end with a partial batch."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise RuntimeError("An experiment has either steps or epochs.")
        steps = self.epochs * math.ceil(epoch_length / self.data.global_batch_size)
        return max(1, math.ceil(round(steps, 6)))  # what rounding adds begins no step


def differences_on_resume(saved: Experiment, asked: Experiment) -> list[tuple[str, Any, Any]]:
    """Fields that forbid one experiment to go on from the checkpoint of another.

    Args:
        saved: The experiment in the checkpoint.
        asked: The experiment that is to go on from it.

    Returns:
        `(field, value in saved, value in asked)` for every field outside `MAY_CHANGE_ON_RESUME`
        whose values differ; empty if `asked` may go on.
    """
    old, new = dict(leaves(saved.to_dict())), dict(leaves(asked.to_dict()))
    return [
        (path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
        and not any(path == may or path.startswith(may + ".") for may in MAY_CHANGE_ON_RESUME)
    ]
