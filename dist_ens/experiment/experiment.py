"""A whole experiment, and the fields that may change on resume."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from ml_collections import ConfigDict

from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.execution.spec import AUTO
from dist_ens.experiment.reading import from_mapping, leaves, to_config_dict_of
from dist_ens.experiment.schema import (
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
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.numbers import whole_number

# A resumed run may differ from its checkpoint in these fields only. They change how long or how it
# runs, and not what the step of a sound member computes.
MAY_CHANGE_ON_RESUME = (
    "steps",
    "epochs",
    "layout",
    "execution",
    "failures",
    "checkpoint",
    "evaluation.every_steps",
    "evaluation.every_epoch",
    "evaluation.global_batch_size",
    "logging",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """The description of a run: everything that decides what it computes.

    Attributes:
        num_members: Number of members. None if `members_per_group` is given.
        members_per_group: Number of members in each group, for `data.examples=splits` only. Each
            group is trained on one of the source's divisions into training and test examples. With
            20 divisions, 5 gives 100 members. Write `num_members=None` beside it, as
            `configs/uci.py` does.
        member_ids: Ids of the members, different whole numbers from 0 on, as many as
            `num_members`. None for 0 to `num_members - 1`. Members 8 to 15 are those that an
            ensemble of 16 would have, so that an ensemble can be trained in parts.
        seed: Seed of initialisation, dropout and data order, in [0, 2**32). A member's random
            numbers depend on the seed and its id.
        steps: Number of updates. None if `epochs` is given.
        epochs: Number of passes over a member's training examples. A batch that an epoch does not
            fill has examples of the next one, so `epochs * examples / data.global_batch_size`
            updates are made, rounded up. None if `steps` is given.
        steps_per_call: Number of updates in one call of the compiled program. More are faster for
            small networks, because a call costs about a millisecond. Saving, evaluating and logging
            happen between calls.
        execution: Way in which a device runs its members. `auto` times several ways when the run
            begins and takes the fastest. Others are `vmap`, `unroll`, `map`, `chunk:K` and `loop`,
            alone or with additions such as `vmap+patches`; the page on execution lists them.
        layout: Placement of the members on the devices.
        data: Data set, and the examples that each member sees.
        model: Network of one member.
        loss: Loss that each member minimises.
        optimizer: Optimizer of every member.
        compute: Precision and memory of an update.
        failures: Response to failed updates of a member.
        checkpoint: When to save.
        evaluation: Evaluation on the test split.
        logging: Logging of training metrics.
    """

    num_members: int | None = 8
    members_per_group: int | None = None
    member_ids: tuple[int, ...] | None = None
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
    failures: FailurePolicy = dataclasses.field(default_factory=FailurePolicy)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for one, other in (("num_members", "members_per_group"), ("steps", "epochs")):
            here, there = getattr(self, one), getattr(self, other)
            if (here is None) == (there is None):
                raise UserError(f"{one}={here} and {other}={there}: exactly one must be set.")
        if self.members_per_group is not None:
            whole_number("members_per_group", self.members_per_group, least=1)
        if self.member_ids is not None and len(set(self.member_ids)) != self.num_members:
            raise UserError(
                f"member_ids={self.member_ids} and num_members={self.num_members}. Give each "
                "member an id of its own."
            )
        if self.loss.options.get("mixup") and not self.data.shuffle:
            raise UserError(
                f"loss.mixup={self.loss.options['mixup']} needs shuffled examples, and "
                "data.shuffle=False. Set --config.data.shuffle=True."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> Self:
        """Returns an experiment from nested mappings, such as JSON or `ConfigDict.to_dict()`."""
        return from_mapping(cls, values)

    def to_dict(self) -> JsonDict:
        """Returns nested plain data that JSON can hold and `from_dict` reads."""
        return dataclasses.asdict(self)

    def with_members(self, member_ids: Sequence[int]) -> Self:
        """Returns the experiment of some members."""
        ids = tuple(member_ids)
        return dataclasses.replace(
            self,
            num_members=len(ids),
            members_per_group=None,
            member_ids=None if ids == tuple(range(len(ids))) else ids,
        )

    def to_config_dict(self) -> ConfigDict:
        """Returns every field as a `ConfigDict` that flags can override, options among the rest."""
        return to_config_dict_of(self)

    def total_members(self, num_groups: int) -> int:
        """Returns the number of members of all groups together."""
        is_of_one = num_groups == 1 and not self.data.source.startswith("uci:")
        if self.data.examples == "splits" and is_of_one:
            raise UserError(
                "data.examples='splits' needs a source with several divisions into training and "
                "test examples, as uci:FILE has. Use --config.data.examples=permuted."
            )
        if self.num_members is None:
            return num_groups * (self.members_per_group or 1)
        if self.num_members % num_groups:
            raise UserError(f"num_members={self.num_members} is no multiple of {num_groups}.")
        return self.num_members


def differences_on_resume(saved: Experiment, asked: Experiment) -> list[tuple[str, Json, Json]]:
    """Returns the differences that forbid an experiment to resume from another's checkpoint."""
    old, new = dict(leaves(saved.to_dict())), dict(leaves(asked.to_dict()))
    return [
        (path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
        and not any(path == may or path.startswith(may + ".") for may in MAY_CHANGE_ON_RESUME)
    ]
