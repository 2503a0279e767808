"""What a run is: frozen dataclasses, checked when they are made.

A config file is loose (a `ConfigDict`, overridden by flags); an `Experiment` is what becomes of it
once: every name known, every type right, every value in range. Nothing here imports JAX, so that a
mistake is told before a device is touched.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Self

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dist_ens.errors import UserError
from dist_ens.execution import AUTO, Execution

LOSSES = ("softmax_cross_entropy", "class_mean_cross_entropy", "gaussian_nll")
OPTIMIZERS = ("sgd", "adam", "adamw")
EXAMPLES = ("shared", "permuted", "splits")
COMPUTE_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")

# The only fields in which a run may differ from the checkpoint that it goes on from: they change
# how far or how it runs, not what any step computes.
MAY_CHANGE_ON_RESUME = (
    "steps",
    "epochs",
    "layout",
    "execution",
    "checkpoint",
    "evaluation",
    "logging",
)


def _require(holds: bool, rule: str, received: str, way_out: str) -> None:
    if not holds:
        raise UserError(f"{rule} Received: {received}. {way_out}")


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(
            f"{field} must be one of {', '.join(known)}. Received: {value!r}."
            f"{did_you_mean(value, known)}"
        )


def _require_positive(field: str, value: int | float | None) -> None:
    if value is not None:
        _require(
            value > 0 and math.isfinite(value),
            f"{field} must be positive.",
            f"{field}={value}",
            f"Try --config.{field}=1 or more."
            if isinstance(value, int)
            else f"Try a small positive --config.{field}.",
        )


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """A half-sentence with the nearest known name, or the empty string.

    >>> did_you_mean("learnig_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


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
        _require_positive("layout.ensemble_axis", self.ensemble_axis)
        _require_positive("layout.waves", self.waves)


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
        _require_positive("data.global_batch_size", self.global_batch_size)
        _require_positive("data.num_classes", self.num_classes)
        _require_positive("data.context_length", self.context_length)
        _require_one_of("data.examples", self.examples, EXAMPLES)
        _require(
            self.shuffle or self.examples == "shared",
            "Orders of the members' own are shuffled.",
            f"data.examples={self.examples!r}, data.shuffle=False",
            "Set --config.data.shuffle=True.",
        )
        for value in self.std:
            _require_positive("data.std", value)


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
        _require_one_of("optimizer.name", self.name, OPTIMIZERS)
        _require_one_of("optimizer.schedule", self.schedule, SCHEDULES)
        _require_positive("optimizer.learning_rate", self.learning_rate)
        _require_positive("optimizer.schedule_steps", self.schedule_steps)
        _require_positive("optimizer.clip_norm", self.clip_norm)
        _require(
            (self.schedule == "constant") == (self.schedule_steps is None),
            "A schedule that is not constant has a length of its own, a constant one has none.",
            f"optimizer.schedule={self.schedule!r}, optimizer.schedule_steps={self.schedule_steps}",
            "Set --config.optimizer.schedule_steps with a linear or cosine schedule only.",
        )
        _require(
            0 <= self.momentum < 1,
            "optimizer.momentum must lie in [0, 1).",
            f"{self.momentum}",
            "0.9 is the usual value, 0 turns it off.",
        )
        _require(
            self.momentum == 0 or self.name == "sgd",
            "Only sgd takes a momentum.",
            f"optimizer.name={self.name!r}, optimizer.momentum={self.momentum}",
            "Set --config.optimizer.momentum=0 or --config.optimizer.name=sgd.",
        )
        _require(
            self.weight_decay == 0 or self.name != "adam",
            "Adam with weight decay is called adamw.",
            f"optimizer.name='adam', optimizer.weight_decay={self.weight_decay}",
            "Set --config.optimizer.name=adamw.",
        )
        _require(
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
        _require_one_of("compute.dtype", self.dtype, COMPUTE_DTYPES)
        _require_positive("compute.microbatches", self.microbatches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many checkpoints to keep. The last step is always saved."""

    every_steps: int = 1000
    keep: int = 2

    def __post_init__(self) -> None:
        _require_positive("checkpoint.every_steps", self.every_steps)
        _require_positive("checkpoint.keep", self.keep)


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
        _require_positive("evaluation.every_steps", self.every_steps)
        _require_positive("evaluation.global_batch_size", self.global_batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """How often a line of training metrics goes to `metrics.jsonl`."""

    every_steps: int = 100

    def __post_init__(self) -> None:
        _require_positive("logging.every_steps", self.every_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what a run computes. Frozen; checked when made.

    Attributes:
        num_members: Networks in the ensemble; None where `members_per_group` is given.
        members_per_group: Networks for each of the source's groups; None where `num_members` is
            given.
        seed: Of initialisation, dropout and the order of the data, together with the member's id.
        steps: Updates to take; None where `epochs` is given.
        epochs: Passes over the training split; None where `steps` is given.
        steps_per_call: Updates inside one jitted call.
        execution: How a device runs the members it holds: `auto`, the fastest that can be found
            when the run begins; or `WAY[+LOWERING][+STEPS]`, see `dist_ens.execution`.
        loss: The loss of one member, in nats.
    """

    num_members: int | None = 8
    members_per_group: int | None = None
    seed: int = 0
    steps: int | None = None
    epochs: float | None = None
    steps_per_call: int = 1
    execution: str = AUTO
    loss: str = "softmax_cross_entropy"
    layout: LayoutConfig = LayoutConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        for field in ("num_members", "members_per_group", "steps", "epochs", "steps_per_call"):
            _require_positive(field, getattr(self, field))
        _require(
            (self.num_members is None) != (self.members_per_group is None),
            "Exactly one of num_members and members_per_group says how many to train; the other is "
            "None.",
            f"num_members={self.num_members}, members_per_group={self.members_per_group}",
            "Give --config.num_members=8 or --config.members_per_group=5; a file that gives one "
            "sets the other to None.",
        )
        _require(
            0 <= self.seed < 2**32,
            "seed must lie in [0, 2**32).",
            f"seed={self.seed}",
            "Try --config.seed=0.",
        )
        _require(
            (self.steps is None) != (self.epochs is None),
            "Exactly one of steps and epochs says how long to train; the other is None.",
            f"steps={self.steps}, epochs={self.epochs}",
            "Give --config.steps=1000 or --config.epochs=10.",
        )
        if self.execution != AUTO:
            Execution.parse(self.execution)
        _require_one_of("loss", self.loss, LOSSES)

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
        return _from_mapping(cls, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data that JSON can hold and `from_dict` reads back."""
        return dataclasses.asdict(self)

    def to_config_dict(self) -> ConfigDict:
        """Every field, loose again, for flags to override; a network's options beside its name."""
        config = _to_config_dict(self)
        config.model = ConfigDict({"name": self.model.name, **self.model.options})
        return config

    def total_members(self, num_groups: int) -> int:
        """Networks of all groups together, of a source that has so many.

        Raises:
            UserError: If the groups would have unequally many, or see each other's examples.
        """
        _require(
            num_groups == 1 or self.data.examples == "splits",
            "A source that splits its examples several times is for groups of members.",
            f"{num_groups} splits in {self.data.source}, data.examples={self.data.examples!r}",
            "Set --config.data.examples=splits.",
        )
        if self.num_members is None:
            return num_groups * (self.members_per_group or 1)
        _require(
            self.num_members % num_groups == 0,
            "Every group has equally many members.",
            f"num_members={self.num_members} for {num_groups} groups",
            f"Try --config.num_members={math.ceil(self.num_members / num_groups) * num_groups}.",
        )
        return self.num_members

    def total_steps(self, num_train_examples: int) -> int:
        """Updates in the whole run; a last, partial pass over the data counts as begun."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            raise RuntimeError("An experiment has either steps or epochs.")
        return math.ceil(self.epochs * num_train_examples / self.data.global_batch_size)


def differences_on_resume(saved: Experiment, asked: Experiment) -> list[tuple[str, Any, Any]]:
    """Fields that forbid one experiment to go on from the checkpoint of another.

    Args:
        saved: The experiment in the checkpoint.
        asked: The experiment that is to go on from it.

    Returns:
        `(field, value in saved, value in asked)` for every field outside `MAY_CHANGE_ON_RESUME`
        whose values differ; empty if `asked` may go on.
    """
    old, new = dict(_leaves(saved.to_dict())), dict(_leaves(asked.to_dict()))
    return [
        (path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
        and not any(path == may or path.startswith(may + ".") for may in MAY_CHANGE_ON_RESUME)
    ]


def _to_config_dict(section: Any) -> ConfigDict:
    """A dataclass as a `ConfigDict` that remembers the types of fields that are None."""
    config = ConfigDict()
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            config[name] = _to_config_dict(value)
        elif type(None) in typing.get_args(hint):
            kind = next(k for k in typing.get_args(hint) if k is not type(None))
            config[name] = placeholder(kind)
            config[name] = value
        else:
            config[name] = value
    return config


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _from_mapping(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass `cls`; `prefix` is where it stands in the experiment."""
    if not isinstance(values, Mapping):
        raise UserError(
            f"{prefix.rstrip('.')} is a section with fields of its own. Received: {values!r}. "
            f"Set one of its fields instead."
        )
    if cls is ModelConfig:  # every network has options of its own; `dist_ens.models` checks them
        options = {k: v for k, v in values.items() if k not in ("name", "options")}
        options |= dict(values.get("options", {}))
        options = {k: _as_tuple(v) for k, v in options.items()}
        values = {k: v for k, v in values.items() if k == "name"} | {"options": options}
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(
                f"The config has no field {prefix + name!r}.{did_you_mean(name, hints)} "
                f"The fields here are: {', '.join(hints)}."
            )
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = _from_mapping(hints[name], value, f"{prefix}{name}.")
        else:
            arguments[name] = _checked_type(prefix + name, value, hints[name])
    return cls(**arguments)


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


def _checked_type(field: str, value: Any, hint: Any) -> Any:
    """`value` as the annotated type; only an int for a float and a list for a tuple are changed."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = _as_tuple(value)
    for kind in allowed:
        origin = typing.get_origin(kind) or kind
        if origin is tuple and isinstance(value, tuple):
            return tuple(_checked_type(f"{field}[{i}]", v, float) for i, v in enumerate(value))
        if isinstance(value, bool) and origin is not bool:
            continue
        if origin is float and isinstance(value, int):
            return float(value)
        if isinstance(value, Mapping if origin is Mapping else origin):
            return value
    names = " or ".join(
        "None" if k is types.NoneType else getattr(k, "__name__", str(k)) for k in allowed
    )
    raise UserError(
        f"{field} must be {names}. Received: {value!r}, a {type(value).__name__}. "
        f"Correct it in the config file or with --config.{field}=…"
    )
