"""An experiment and its sections.

A value is checked by what it stands for, such as the optimizer, when that is made. Only what no
other place knows is checked here.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ml_collections import ConfigDict

from dist_ens.ensemble.checks import COMPUTE_DTYPES
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.execution.spec import AUTO
from dist_ens.experiment.reading import from_mapping, to_config_dict_of, words_of_a_config
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.numbers import (
    require_coefficient,
    require_fraction,
    require_one_of,
    whole_number,
)
from dist_ens.sampling.hyper import Drawn, parsed

EXAMPLES = ("shared", "permuted", "splits", "bootstrap", "kfold")
POOLINGS = ("probs", "logits", "vote", "mixture")
LOGGERS = ("tensorboard", "wandb", "mlflow")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Placement of the members on the devices.

    Attributes:
        ensemble_axis: Number of mesh rows, along which the members are sharded. None uses the
            largest number that divides both the members and the devices.
        waves: Number of waves in which a device updates its members. The members of one wave are
            on the device, and the others wait in the host's memory. All waves of a device have
            equally many members: a number that does not divide the members of a device is raised
            to the next one that does. With 8 members on a device, 3 becomes 4.
        model_axis: Number of devices that share the arrays of one member, for members that are
            larger than a device. "auto" takes the smallest number with which the run fits; `train`
            and `plan` compile the update to find it.
        model_rules: Rules by which they are divided: "fsdp", "tensor" for the partitioning metadata
            of a Flax network, or pairs of a pattern of names of parameters and their axes, such as
            `(("*/kernel", (None, "model")), ("*", ()))`.
    """

    ensemble_axis: int | None = None
    waves: int = 1
    model_axis: int | str = 1
    model_rules: str | tuple[tuple[str, tuple[str | None, ...]], ...] = "fsdp"

    @property
    def member_devices(self) -> int:
        """Model axis as a number; a `UserError` if it is none, as "auto" before it is found."""
        if isinstance(self.model_axis, str):
            raise UserError(
                f"layout.model_axis is {self.model_axis!r}. Give a number of devices, or {AUTO!r} "
                "in a config that train or plan reads: they find the smallest number that fits."
            )
        return whole_number("layout.model_axis", self.model_axis, least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set, and the examples that each member sees.

    Attributes:
        source: Data source: `digits`, `csv:FILE`, `parquet:FILE`, `folder:DIR`, `idx:DIR`,
            `npz:FILE`, `tfds:NAME`, `text:FILE` or `uci:FILE`. The guide on config files says what
            each reads.
        target: Name of the column of labels of a table, `csv:FILE` or `parquet:FILE`.
        test: Test rows of a table: the share that is drawn, in (0, 1); the name of a column that
            holds "test" or True in those rows; or the path of a second table.
        task: `classification` or `regression` of a table. By default the target decides: text,
            truth values and whole numbers with at most 10 different values are classes.
        row_id: Name of the column that names the rows of a table.
        group: Name of a column of a table. Rows with the same value are all training, all
            validation or all test rows.
        time: Name of a column of a table, by which the last rows are the test rows, and the last
            of the others those for validation.
        categories: Names of columns of a table whose numbers are categories.
        leave_out: Names of columns of a table that are no inputs.
        image_size: Height and width to which the pictures of `folder:DIR` are resized. None takes
            the size of the first one, which all must have.
        data_dir: Folder of prepared TFDS data. None uses the default of TFDS.
        num_classes: Number of classes. By default it is the largest label of the training set plus
            1. Give it if the training set lacks a class. It stays None for real targets.
        context_length: Number of characters in one example of a text source.
        global_batch_size: Number of examples in a step, over all hosts and devices.
        shuffle: Whether every epoch has a new order, which depends on the seed. False keeps the
            order of the file.
        examples: Rule for which examples a member sees.

            - `shared`: all members see the same batch.
            - `permuted`: each member sees the whole training set in its own order.
            - `splits`: for a source that divides its examples into a training and a test set in
              several ways, as `uci:FILE` does for cross-validation. The members form as many
              groups, and each group is a separate ensemble, trained and scored on one of these
              divisions. Member i is in group i modulo the number of groups.
            - `bootstrap`: each member is trained on its own bootstrap sample, drawn with
              replacement. All members see the same batches; the loss of an example is multiplied
              by the number of times that the member drew it, 0 for about a third of the examples
              (out-of-bag). A loss of your own takes these numbers as the argument `counts`.
            - `kfold`: each member leaves one of `num_folds` folds out. Member i leaves out fold i
              modulo `num_folds`.
        num_folds: Number of folds, 2 or more, for `examples=kfold`; None otherwise.
        validation: Fraction of the training examples that is held out for validation, in [0, 1).
        mean: Mean that is subtracted from the inputs on the device: one number, or a tuple with
            one per channel.
        std: Standard deviation by which the inputs are then divided: one number, or a tuple with
            one per channel.
    """

    source: str = "digits"
    target: str | None = None
    test: float | str = 0.2
    task: str | None = None
    row_id: str | None = None
    group: str | None = None
    time: str | None = None
    categories: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    image_size: tuple[int, ...] | None = None
    data_dir: str | None = None
    num_classes: int | None = None
    context_length: int = 128
    global_batch_size: int = 128
    shuffle: bool = True
    examples: str = "shared"
    num_folds: int | None = None
    validation: float = 0.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        require_one_of("data.examples", self.examples, EXAMPLES)
        if (self.examples == "kfold") != (self.num_folds is not None):
            raise UserError("Give data.num_folds with data.examples='kfold', and only with it.")
        if self.num_folds is not None:
            whole_number("data.num_folds", self.num_folds, least=2)
        for field in ("global_batch_size", "context_length"):
            whole_number(f"data.{field}", getattr(self, field), least=1)
        require_fraction("data.validation", self.validation, "0.1 is usual, 0 holds none out.")
        for std in self.std:
            require_coefficient("data.std", std, "1 leaves the inputs as they are.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network of one member.

    Attributes:
        name: Name of a network: `mlp`, `mlp_bn_dropout`, `lenet5`, `resnet8` or `transformer`.
            Their arguments are listed below.
        options: Arguments of that network. Each is a separate field beside `name`:
            `model=dict(name="mlp", hidden_sizes=(256, 256))` in a config file, or
            `--config.model.hidden_sizes="(256,256)"`.
    """

    name: str = "mlp"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss that each member minimises.

    Attributes:
        name: Name of a function of `dist_ens.losses` that returns an objective. For classes:
            `categorical`, `class_mean_categorical` or `one_vs_rest`. For several labels of an
            example that are 0 or 1: `multilabel`. For one or several real targets: `gaussian`,
            `beta_gaussian`, `squared_error` or `quantiles`. `auto` is `categorical` for classes,
            `multilabel` for such labels and `gaussian` for real targets.
        options: Arguments of that loss, such as `beta` of `beta_gaussian` and `levels` of
            `quantiles`, and methods that change it, such as `label_smoothing`, `mixup` and
            `adversarial`. Each is a separate field beside `name`:
            `loss=dict(name="beta_gaussian", beta=0.5, mixup=0.2)` in a config file, or
            `--config.loss.mixup=0.2`. They are listed below. A method with the value 0 is left out.
    """

    name: str = "categorical"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of every member.

    The name and the arguments are checked against Optax's signatures.

    Attributes:
        name: Name of an optimizer in `optax` or `optax.contrib`, such as `adam`.
        learning_rate: Learning rate at the first step, positive. None uses the optimizer's own
            default, such as 1.0 for `prodigy`.
        schedule: Learning rate schedule: `constant`, or `linear` or `cosine` decay to zero.
        schedule_steps: Number of steps over which the learning rate decays to zero, where it
            stays; None for `constant`. It is independent of `steps`, so that a longer run takes
            the same first steps.
        momentum: Momentum of an optimizer that has one, in [0, 1). 0 disables it, also where
            Optax's own default is another.
        weight_decay: Weight decay, zero or positive; for `sgd` the coefficient of an L2 penalty.
            The penalty adds weight_decay times the parameters to the gradient. An optimizer
            without weight decay, such as `adam`, takes only 0: use `adamw`. 0
            disables it, also where Optax's own default is another.
        clip_norm: Largest global norm of one member's gradient, positive. None disables clipping.
        options: Other arguments of the optimizer. Each is a separate field beside `name`:
            `optimizer=dict(name="sgd", nesterov=True)` in a config file, or
            `--config.optimizer.nesterov=True`.
    """

    name: str = "adam"
    learning_rate: float | None = 1e-3
    schedule: str = "constant"
    schedule_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one_of("optimizer.schedule", self.schedule, SCHEDULES)
        if (self.schedule == "constant") != (self.schedule_steps is None):
            raise UserError("A schedule that decays needs schedule_steps; 'constant' takes none.")
        if self.schedule_steps is not None:
            whole_number("optimizer.schedule_steps", self.schedule_steps, least=1)
        require_fraction("optimizer.momentum", self.momentum, "0.9 is usual, 0 disables it.")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} must be 0 or positive.")


# A distribution as a text, a number, or a number for each member.
Setting = str | float | tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConfig:
    """Settings whose values differ from member to member.

    Attributes:
        options: Values of each setting: a number for each member, or a distribution from which they
            are drawn, `uniform(LOW, HIGH)`, `log_uniform(LOW, HIGH)` or `choice(A, B, …)`. They
            take the place of the optimizer's fields and arguments of the same name, such as
            `learning_rate`, and are given to a network, a loss and methods that read them. Each is
            a field of its own: `hyper=dict(learning_rate="log_uniform(1e-4, 1e-2)")` in a config
            file, or `--config.hyper.learning_rate="log_uniform(1e-4, 1e-2)"`.
    """

    options: Mapping[str, Setting] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # A text of numbers, such as `[0.1, 0.2]`, becomes these. Only distributions stay texts.
        texts = {name: value for name, value in self.options.items() if isinstance(value, str)}
        read = {name: parsed(name, text) for name, text in texts.items()}
        numbers = {name: v for name, v in read.items() if not isinstance(v, Drawn)}
        found = {n: tuple(v) if isinstance(v, Sequence) else v for n, v in numbers.items()}
        object.__setattr__(self, "options", {**self.options, **found})

    def of_members(self, member_ids: Sequence[int], others: Sequence[int]) -> Self:
        """Returns the settings of `others`, given the ids of the members that have these."""

        def values_of(value: Setting) -> Setting:
            if not isinstance(value, tuple):
                return value
            by_id = dict(zip(member_ids, value, strict=False))
            absent = [each for each in others if each not in by_id]
            if absent:
                raise UserError(
                    f"A setting in hyper is a list for the members {sorted(by_id)}, and has no "
                    f"value for {absent}. Give a distribution, which has one for every member, or "
                    "train the others as a run of their own, and join both with dist-ens members."
                )
            return tuple(by_id[each] for each in others)

        options = {name: values_of(value) for name, value in self.options.items()}
        return dataclasses.replace(self, options=options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Precision and memory of a member's update.

    Attributes:
        dtype: Type of the network's arithmetic, `float32` or `bfloat16`. Parameters, model state,
            loss and optimizer are float32 with both.
        rematerialize: Whether to use less memory and more time. If True, only the results of matrix
            products and convolutions stay in memory between the forward and the backward pass. The
            backward pass computes the other values, such as activations, again. The update is the
            same.
        microbatches: Number of equal parts of the batch that are taken one after another, with
            their gradients averaged. The update is that of the whole batch, except that batch
            statistics and dropout belong to each part. A loss of your own is that of the whole
            batch if it is a mean over the examples, or a `losses.Ratio`.
    """

    dtype: str = "float32"
    rematerialize: bool = False
    microbatches: int = 1

    def __post_init__(self) -> None:
        require_one_of("compute.dtype", self.dtype, COMPUTE_DTYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many checkpoints to keep. The last step is always saved.

    Attributes:
        every_steps: Number of steps between saves. None disables saves by the step.
        every_secs: Seconds between saves. None disables saves by the clock.
        keep: Number of the newest checkpoints to keep, at least 1. The oldest is deleted after a
            new one is written, so the disk needs room for `keep + 1`.
        keep_every_steps: Number of steps. The first checkpoint at or after each multiple of it is
            kept for ever. None for none.
        keep_best: Name of a score of the test split, such as `nll`. An evaluation in which the
            ensemble has its best value so far is saved, and the best checkpoint is kept. None for
            none.
        keep_best_of_members: Name of a score of the test split. An evaluation in which a member has
            its best value so far is saved, and each member's best checkpoint is kept. None for
            none.
    """

    every_steps: int | None = None
    every_secs: float | None = 60.0
    keep: int = 2
    keep_every_steps: int | None = None
    keep_best: str | None = None
    keep_best_of_members: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on the test split.

    Attributes:
        every_steps: Number of steps between evaluations. With None and without `every_epoch`, the
            split is evaluated once, after training.
        every_epoch: Whether to evaluate at the end of each pass over a member's training examples,
            in place of `every_steps`.
        global_batch_size: Number of examples in an evaluation batch. A device holds the outputs of
            all its members for them.
        pooling: Rule that combines the members' predictions.

            - `probs`: averages the members' probabilities; for real targets it takes one normal
              distribution with the mean and variance of their mixture.
            - `logits`: averages the members' logits.
            - `vote`: takes the fraction of members that predict each class.
            - `mixture`: takes the mixture of the members' normal distributions.
        dropout_samples: Number of predictions with dropout that are averaged for each member. None
            predicts once, without dropout.
        metrics: Names of optional metrics of the loss, such as `balanced_accuracy`, `macro_f1`,
            `auroc` and `average_precision` of classes.
    """

    every_steps: int | None = None
    every_epoch: bool = False
    global_batch_size: int = 1000
    pooling: str = "probs"
    dropout_samples: int | None = None
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.every_epoch and self.every_steps is not None:
            raise UserError("evaluation.every_steps and evaluation.every_epoch: leave one out.")
        whole_number("evaluation.global_batch_size", self.global_batch_size, least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging of training metrics.

    Attributes:
        every_steps: Number of steps between two lines of `metrics.jsonl`.
        loggers: Names of other tools that log the run below its folder, `tensorboard`, `wandb` or
            `mlflow`. They need the extra `[loggers]`.
    """

    every_steps: int = 100
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.loggers:
            require_one_of("logging.loggers", name, LOGGERS)


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
        hyper: Settings whose values differ from member to member.
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
    hyper: HyperConfig = dataclasses.field(default_factory=HyperConfig)
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
        if self.loss.options.get("mixup") and not self.data.shuffle:
            raise UserError(
                f"loss.mixup={self.loss.options['mixup']} needs shuffled examples, and "
                "data.shuffle=False. Set --config.data.shuffle=True."
            )

    @classmethod
    @words_of_a_config()
    def from_dict(cls, values: Mapping[str, Json]) -> Self:
        """Returns an experiment from nested mappings, such as JSON or `ConfigDict.to_dict()`."""
        return from_mapping(cls, values)

    def to_dict(self) -> JsonDict:
        """Returns nested plain data that JSON can hold and `from_dict` reads."""
        return dataclasses.asdict(self)

    def with_members(self, member_ids: Sequence[int]) -> Self:
        """Returns the experiment of some members."""
        ids = tuple(member_ids)
        own = self.member_ids or range(self.num_members or 0)
        return dataclasses.replace(
            self,
            hyper=self.hyper.of_members(own, ids),
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
        return self.num_members
