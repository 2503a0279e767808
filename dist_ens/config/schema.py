"""The sections of an experiment, each checked when it is made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dist_ens.config.checks import (
    MOST_DROPOUT_SAMPLES,
    require,
    require_coefficient,
    require_fraction,
    require_one_of,
    require_positive,
)

LOSSES_OF_CLASSES = (
    "softmax_cross_entropy",
    "class_mean_cross_entropy",
    "sigmoid_cross_entropy",
)
LOSSES_OF_TARGETS = ("gaussian_nll", "beta_nll", "mse", "pinball")
LOSSES = LOSSES_OF_CLASSES + LOSSES_OF_TARGETS
EXAMPLES = ("shared", "permuted", "splits", "bootstrap", "kfold")
POOLINGS = ("probs", "logits", "vote", "mixture")
COMPUTE_DTYPES = ("float32", "bfloat16")
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
    """

    ensemble_axis: int | None = None
    waves: int = 1

    def __post_init__(self) -> None:
        require_positive("layout.ensemble_axis", self.ensemble_axis)
        require_positive("layout.waves", self.waves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set, and the examples that each member sees.

    Attributes:
        source: Data source: `digits`, `idx:DIR`, `npz:FILE`, `tfds:NAME`, `text:FILE` or
            `uci:FILE`. The guide on config files says what each reads.
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
        require_positive("data.global_batch_size", self.global_batch_size)
        require_positive("data.num_classes", self.num_classes)
        require_positive("data.context_length", self.context_length)
        require_one_of("data.examples", self.examples, EXAMPLES)
        require(
            (self.examples == "kfold") == (self.num_folds is not None),
            "data.num_folds must be set if and only if data.examples='kfold': got data.num_folds="
            f"{self.num_folds}, data.examples={self.examples!r}. Set --config.data.num_folds=5 "
            "with --config.data.examples=kfold, or neither.",
        )
        require(
            self.num_folds is None or self.num_folds >= 2,
            f"data.num_folds must be 2 or more: got {self.num_folds}. 5 is usual.",
        )
        require_fraction(
            "data.validation", self.validation, "0.1 is usual, 0 holds no examples out."
        )
        require(
            self.shuffle or self.examples in ("shared", "bootstrap"),
            f"data.examples={self.examples!r} needs shuffled examples, and data.shuffle=False. Set "
            "--config.data.shuffle=True.",
        )
        for value in self.std:
            require_positive("data.std", value)


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
        name: Name of the loss. For classes: `softmax_cross_entropy`, `class_mean_cross_entropy`
            (divided by the number of classes) or `sigmoid_cross_entropy`. For real targets:
            `gaussian_nll`, `beta_nll`, `mse` or `pinball`.
        beta: Exponent of the variance weighting of `beta_nll`, in [0, 1].
        levels: Quantile levels of `pinball`, ascending in (0, 1), with 0.5 in the middle.
        label_smoothing: Label smoothing coefficient, the fraction of each label that is spread
            evenly over all classes, in [0, 1).
        mixup: Mixup coefficient alpha. Mixing weights are drawn from Beta(alpha, alpha). 0 disables
            mixup.
        adversarial: Step size of adversarial training. The loss is the mean of that of the
            examples and that of copies, in which each feature is moved by this step in the
            direction that raises the loss (the fast gradient sign method). The unit is the range
            of the feature: its largest minus its smallest value over all training examples. 0.01
            is usual, 0 disables it.
    """

    name: str = "softmax_cross_entropy"
    beta: float = 0.5
    levels: tuple[float, ...] = (0.05, 0.5, 0.95)
    label_smoothing: float = 0.0
    mixup: float = 0.0
    adversarial: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("loss.name", self.name, LOSSES)
        require(
            0 <= self.beta <= 1,
            f"loss.beta must lie in [0, 1]: got {self.beta}. 0.5 is usual, 0 is gaussian_nll.",
        )
        for name, of in (("beta", "beta_nll"), ("levels", "pinball")):
            value, default = getattr(self, name), getattr(type(self), name)
            require(
                self.name == of or value == default,
                f"loss.{name}={value} has no effect with loss.name={self.name}. Set "
                f'--config.loss.{name}="{default}", or --config.loss.name={of}.',
            )
        middle = self.levels[len(self.levels) // 2] if len(self.levels) % 2 else None
        require(
            middle == 0.5
            and list(self.levels) == sorted(set(self.levels))
            and all(0 < level < 1 for level in self.levels),
            "loss.levels must ascend in (0, 1), with 0.5 in the middle: got "
            f'{self.levels}. Try --config.loss.levels="(0.05, 0.5, 0.95)".',
        )
        require_fraction(
            "loss.label_smoothing", self.label_smoothing, "0.1 is usual, 0 disables it."
        )
        require(
            self.label_smoothing == 0 or self.name in LOSSES_OF_CLASSES,
            f"loss.name={self.name} has no classes whose labels could be smoothed, and "
            f"loss.label_smoothing={self.label_smoothing}. Set --config.loss.label_smoothing=0.",
        )
        for name in ("mixup", "adversarial"):
            value = getattr(self, name)
            if value != 0:
                require_coefficient(f"loss.{name}", value, "Set it to 0 to disable it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of every member.

    `dist_ens.optimizers` checks the name and the arguments against Optax's signatures.

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
        require_positive("optimizer.learning_rate", self.learning_rate)
        require_positive("optimizer.schedule_steps", self.schedule_steps)
        require_positive("optimizer.clip_norm", self.clip_norm)
        require(
            (self.schedule == "constant") == (self.schedule_steps is None),
            "optimizer.schedule_steps must be set if and only if the schedule is not constant: got "
            f"optimizer.schedule={self.schedule!r}, optimizer.schedule_steps="
            f"{self.schedule_steps}. Set --config.optimizer.schedule_steps with a linear or cosine "
            "schedule only.",
        )
        require(
            self.schedule == "constant" or self.learning_rate is not None,
            f"optimizer.schedule={self.schedule!r} has no learning rate to start from. Set "
            "--config.optimizer.learning_rate.",
        )
        require_fraction("optimizer.momentum", self.momentum, "0.9 is usual, 0 disables it.")
        require(
            0 <= self.weight_decay < math.inf,
            f"optimizer.weight_decay must be zero or positive: got {self.weight_decay}. 0 disables "
            "it.",
        )


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
        require_positive("compute.microbatches", self.microbatches)


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

    def __post_init__(self) -> None:
        require_positive("checkpoint.every_secs", self.every_secs)
        require_positive("checkpoint.every_steps", self.every_steps)
        require_positive("checkpoint.keep", self.keep)
        require_positive("checkpoint.keep_every_steps", self.keep_every_steps)


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
    """

    every_steps: int | None = None
    every_epoch: bool = False
    global_batch_size: int = 1000
    pooling: str = "probs"
    dropout_samples: int | None = None

    def __post_init__(self) -> None:
        require_positive("evaluation.every_steps", self.every_steps)
        require(
            self.every_steps is None or not self.every_epoch,
            f"evaluation.every_steps={self.every_steps} and evaluation.every_epoch=True exclude "
            "each other. Set --config.evaluation.every_epoch=False, or leave every_steps out.",
        )
        require_positive("evaluation.global_batch_size", self.global_batch_size, most=2**20)
        require_positive("evaluation.dropout_samples", self.dropout_samples, MOST_DROPOUT_SAMPLES)
        require_one_of("evaluation.pooling", self.pooling, POOLINGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging of training metrics.

    Attributes:
        every_steps: Number of steps between two lines of `metrics.jsonl`.
    """

    every_steps: int = 100

    def __post_init__(self) -> None:
        require_positive("logging.every_steps", self.every_steps)
