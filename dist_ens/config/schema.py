"""The parts of an experiment, each checked when it is made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dist_ens.config.checks import require, require_one_of, require_positive

LOSSES_OF_CLASSES = (
    "softmax_cross_entropy",
    "class_mean_cross_entropy",
    "sigmoid_cross_entropy",
)
LOSSES_OF_TARGETS = ("gaussian_nll", "beta_nll", "mse", "pinball")
LOSSES = LOSSES_OF_CLASSES + LOSSES_OF_TARGETS
OPTIMIZERS = ("sgd", "adam", "adamw")
EXAMPLES = ("shared", "permuted", "splits", "bootstrap", "kfold")
POOLINGS = ("probs", "logits", "vote", "mixture")
COMPUTE_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Where members lie.

    Attributes:
        ensemble_axis: Rows of the mesh; None: the largest number that divides both members and
            devices.
        waves: With more than one, that many parts of a device's members, or the next number that
            makes them equal, are on it one after another; the others wait in the host's memory.
    """

    ensemble_axis: int | None = None
    waves: int = 1

    def __post_init__(self) -> None:
        require_positive("layout.ensemble_axis", self.ensemble_axis)
        require_positive("layout.waves", self.waves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set, and what the member is given of it.

    Attributes:
        source: `digits`, `idx:DIR`, `npz:FILE`, `tfds:NAME`, `text:FILE` or `uci:FILE`.
        data_dir: Where TFDS keeps its prepared data; None for its own default.
        num_classes: None: as many as the training labels name, every one of them present.
        context_length: Characters per example of a text source.
        global_batch_size: Examples per step, over all hosts and devices.
        shuffle: A new order in every epoch, from the seed; False keeps the order of the file.
        examples: `shared`: a step's batch is one for all members; `permuted`: each member goes
            through the whole set in an order of its own; `splits`: likewise, through the training
            set of its group, where the source splits its examples several times (`uci`). Members
            are dealt out in turn: member i is of group i modulo their number, and is an ensemble
            with that group's other members. No other source is split so.
            `bootstrap`: each member learns from an example as often as it is in a sample of its
            own, drawn with replacement; a third are left out. `kfold`: each leaves one of
            `num_folds` parts out, member after member another.
        num_folds: Of `kfold`; None otherwise.
        validation: Share of the training examples that no member is trained on, in [0, 1).
        mean: Subtracted from the inputs on the device: one number, or one per channel.
        std: The inputs are then divided by it; likewise.
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
            "Members that leave a fold out are told of how many, others are not.",
            f"data.examples={self.examples!r}, data.num_folds={self.num_folds}",
            "Set --config.data.examples=kfold with --config.data.num_folds=5, or neither.",
        )
        require(
            self.num_folds is None or self.num_folds >= 2,
            "Members leave out one of two or more folds.",
            f"data.num_folds={self.num_folds}",
            "5 is usual.",
        )
        require(
            0 <= self.validation < 1,
            "data.validation is a share of the training examples, in [0, 1).",
            f"{self.validation}",
            "0.1 is usual, 0 holds none out.",
        )
        require(
            self.shuffle or self.examples in ("shared", "bootstrap"),
            "Orders of the members' own are shuffled.",
            f"data.examples={self.examples!r}, data.shuffle=False",
            "Set --config.data.shuffle=True.",
        )
        for value in self.std:
            require_positive("data.std", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network of one member: a name in `dist_ens.models`, and that network's own options."""

    name: str = "mlp"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a member minimises.

    Attributes:
        name: Of classes `softmax_cross_entropy`, `class_mean_cross_entropy` (the same over the
            number of classes) or `sigmoid_cross_entropy`; of real targets `gaussian_nll`,
            `beta_nll`, `mse` or `pinball`.
        beta: Of `beta_nll`: the power of the variance that examples are weighted by, in [0, 1].
        levels: Of `pinball`: of the quantiles, ascending, the middle one 0.5.
        label_smoothing: Part of each label that all classes share alike, in [0, 1).
        mixup: Of the Beta distribution by whose draws pairs of examples are mixed; 0: none are.
        adversarial: How far off, as a part of each input's range, the worse example lies that is
            learnt beside each; 0: none is. 0.01 is usual.
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
            "loss.beta must lie in [0, 1].",
            f"{self.beta}",
            "0.5 is the paper's, 0 is gaussian_nll.",
        )
        for name, of in (("beta", "beta_nll"), ("levels", "pinball")):
            value, default = getattr(self, name), getattr(type(self), name)
            require(
                self.name == of or value == default,
                f"loss.{name} is of loss.name={of} alone.",
                f"loss.{name}={value}, loss.name={self.name!r}",
                f'Set --config.loss.{name}="{default}", or --config.loss.name={of}.',
            )
        middle = self.levels[len(self.levels) // 2] if len(self.levels) % 2 else None
        require(
            middle == 0.5
            and list(self.levels) == sorted(set(self.levels))
            and all(0 < level < 1 for level in self.levels),
            "loss.levels ascend in (0, 1), an odd number of them, with 0.5 in the middle.",
            f"{self.levels}",
            'Try --config.loss.levels="(0.05, 0.5, 0.95)".',
        )
        require(
            0 <= self.label_smoothing < 1,
            "loss.label_smoothing must lie in [0, 1).",
            f"{self.label_smoothing}",
            "0.1 is usual, 0 turns it off.",
        )
        require(
            self.label_smoothing == 0 or self.name in LOSSES_OF_CLASSES,
            "Only labels of classes are smoothed.",
            f"loss.label_smoothing={self.label_smoothing}, loss.name={self.name!r}",
            "Set --config.loss.label_smoothing=0.",
        )
        for name in ("mixup", "adversarial"):
            value = getattr(self, name)
            require(
                0 <= value < math.inf,
                f"loss.{name} must be zero or positive.",
                f"{value}",
                "0 turns it off.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of every member.

    Attributes:
        name: `sgd`, `adam` or `adamw`.
        learning_rate: Its value at the first step.
        schedule: `constant`, or `linear` or `cosine` down to zero over `schedule_steps`.
        schedule_steps: The schedule's own length, so that raising `steps` changes no step taken.
        momentum: Of `sgd`; 0 for none.
        weight_decay: Decoupled for `adamw`; an L2 penalty's gradient for `sgd`.
        clip_norm: Largest global norm of one member's gradient; None for no clipping.
    """

    name: str = "adam"
    learning_rate: float = 1e-3
    schedule: str = "constant"
    schedule_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        require_one_of("optimizer.name", self.name, OPTIMIZERS)
        require_one_of("optimizer.schedule", self.schedule, SCHEDULES)
        require_positive("optimizer.learning_rate", self.learning_rate)
        require_positive("optimizer.schedule_steps", self.schedule_steps)
        require_positive("optimizer.clip_norm", self.clip_norm)
        require(
            (self.schedule == "constant") == (self.schedule_steps is None),
            "A schedule that is not constant has a length of its own, a constant one has none.",
            f"optimizer.schedule={self.schedule!r}, optimizer.schedule_steps={self.schedule_steps}",
            "Set --config.optimizer.schedule_steps with a linear or cosine schedule only.",
        )
        require(
            0 <= self.momentum < 1,
            "optimizer.momentum must lie in [0, 1).",
            f"{self.momentum}",
            "0.9 is the usual value, 0 turns it off.",
        )
        require(
            self.momentum == 0 or self.name == "sgd",
            "Only sgd takes a momentum.",
            f"optimizer.name={self.name!r}, optimizer.momentum={self.momentum}",
            "Set --config.optimizer.momentum=0 or --config.optimizer.name=sgd.",
        )
        require(
            self.weight_decay == 0 or self.name != "adam",
            "Adam with weight decay is called adamw.",
            f"optimizer.name='adam', optimizer.weight_decay={self.weight_decay}",
            "Set --config.optimizer.name=adamw.",
        )
        require(
            0 <= self.weight_decay < math.inf,
            "optimizer.weight_decay must be zero or positive.",
            f"{self.weight_decay}",
            "0 turns it off.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """In what precision, and within what memory, a member's update is computed.

    Attributes:
        dtype: `float32`, or `bfloat16` for the network's own arithmetic; parameters, statistics,
            loss and optimizer are float32 either way.
        rematerialize: Keep of the forward pass only what matrix products and convolutions return,
            and compute the rest again in the backward pass.
        microbatches: Parts of a device's batch that are taken one after another, their gradients
            averaged. The same update as of the whole batch, but for statistics over the batch and
            for dropout, which each part has of its own.
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

    While a run lasts there are the files of one more than it keeps.
    """

    every_steps: int = 1000
    keep: int = 2

    def __post_init__(self) -> None:
        require_positive("checkpoint.every_steps", self.every_steps)
        require_positive("checkpoint.keep", self.keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When to score the test split during training (None: only after it), and by how much a go.

    Attributes:
        every_steps: Steps between two scores.
        global_batch_size: Examples at a time, for which a device is given all members' outputs.
        pooling: How members' predictions become one. Of classes `probs`, their probabilities
            averaged; `logits`, their logits; `vote`, the share of members that would choose a
            class. Of real targets `probs`, one normal distribution with the members' mean and
            variance; `mixture`, all of theirs.
        dropout_samples: Predictions of each member with dropout that are averaged; None: one
            without.
    """

    every_steps: int | None = None
    global_batch_size: int = 1000
    pooling: str = "probs"
    dropout_samples: int | None = None

    def __post_init__(self) -> None:
        require_positive("evaluation.every_steps", self.every_steps)
        require_positive("evaluation.global_batch_size", self.global_batch_size, most=2**20)
        require_positive("evaluation.dropout_samples", self.dropout_samples, most=2**16)
        require_one_of("evaluation.pooling", self.pooling, POOLINGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """How often a line of training metrics goes to `metrics.jsonl`."""

    every_steps: int = 100

    def __post_init__(self) -> None:
        require_positive("logging.every_steps", self.every_steps)
