"""The parts of an experiment, each checked when it is made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dist_ens.config.checks import require, require_one_of, require_positive

LOSSES = ("softmax_cross_entropy", "class_mean_cross_entropy", "gaussian_nll")
OPTIMIZERS = ("sgd", "adam", "adamw")
EXAMPLES = ("shared", "permuted", "splits")
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
            with that group's other members. Of a source of one group it is `permuted`.
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
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        require_positive("data.global_batch_size", self.global_batch_size)
        require_positive("data.num_classes", self.num_classes)
        require_positive("data.context_length", self.context_length)
        require_one_of("data.examples", self.examples, EXAMPLES)
        require(
            self.shuffle or self.examples == "shared",
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
    """When to save, and how many checkpoints to keep. The last step is always saved."""

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
    """

    every_steps: int | None = None
    global_batch_size: int = 1000

    def __post_init__(self) -> None:
        require_positive("evaluation.every_steps", self.every_steps)
        require_positive("evaluation.global_batch_size", self.global_batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """How often a line of training metrics goes to `metrics.jsonl`."""

    every_steps: int = 100

    def __post_init__(self) -> None:
        require_positive("logging.every_steps", self.every_steps)
