"""What a data set is to the trainer: a description, and two splits with random access."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from dist_ens.errors import UserError
from dist_ens.narrowing import held_dtype, narrowed
from dist_ens.paths import shortened

_AT_A_TIME = 10_000  # examples, where a split is gone through once


@dataclasses.dataclass(frozen=True)
class Standardization:
    """What a source took off its inputs and targets, and then divided them by, group by group.

    Attributes:
        input_mean: For each group a number for each feature, in the inputs' own units.
        input_std: Likewise; 1 for a feature that is constant.
        target_mean: For each group, in the targets' own unit.
        target_std: Likewise.
    """

    input_mean: tuple[tuple[float, ...], ...]
    input_std: tuple[tuple[float, ...], ...]
    target_mean: tuple[float, ...]
    target_std: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Standardization":
        """Reads back `dataclasses.asdict`, also through JSON."""
        return cls(
            input_mean=tuple(tuple(row) for row in values["input_mean"]),
            input_std=tuple(tuple(row) for row in values["input_std"]),
            target_mean=tuple(values["target_mean"]),
            target_std=tuple(values["target_std"]),
        )

    def of_inputs(self, inputs: np.ndarray) -> np.ndarray:
        """Returns inputs standardised as every group's members take them.

        Args:
            inputs: Inputs in their own units, [examples, features].

        Returns:
            float32[groups, examples, features].

        Raises:
            UserError: If a standardised input does not fit in float32.
        """
        mean, std = (np.array(rows)[:, None] for rows in (self.input_mean, self.input_std))
        with np.errstate(over="ignore"):
            standard = (inputs - mean) / std
        return narrowed(standard, np.float32, "inputs, standardised, [group, example, feature]")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A data set, described: one example, and how many sets it is.

    Attributes:
        input_shape: Without the batch.
        input_dtype: Name of the NumPy type in which JAX holds the inputs. A wider type becomes that
            of the same kind with 32 bits: `int64` becomes `int32`.
        label_shape: `()` for one label per example; `(length,)` for one per position.
        num_classes: Labels lie in [0, num_classes); None where they are real targets, float32.
        num_groups: Of members: each has a training and a test set of its own in the splits.
        standardization: What the source did to inputs and targets; None: nothing.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]
    num_classes: int | None
    num_groups: int = 1
    standardization: Standardization | None = None

    def __post_init__(self) -> None:
        try:
            held = held_dtype(self.input_dtype)
        except TypeError as error:
            raise UserError(
                f"input_dtype is not the name of a NumPy type: {shortened(str(self.input_dtype))}. "
                "Try 'float32'."
            ) from error
        object.__setattr__(self, "input_dtype", held.name)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """Reads back `to_dict`, also through JSON."""
        return cls(
            input_shape=tuple(values["input_shape"]),
            input_dtype=values["input_dtype"],
            label_shape=tuple(values["label_shape"]),
            num_classes=values["num_classes"],
            num_groups=values["num_groups"],
            standardization=(
                Standardization.from_dict(values["standardization"])
                if values["standardization"]
                else None
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def label_dtype(self) -> str:
        """Name of the NumPy type of the labels."""
        return "float32" if self.num_classes is None else "int32"

    @property
    def example_bytes(self) -> int:
        """Of an example's input and label."""
        label = 4 * math.prod(self.label_shape)
        return math.prod(self.input_shape) * np.dtype(self.input_dtype).itemsize + label

    def told_apart(self, other: "Spec") -> tuple[str, str]:
        """This one and another that is not equal, in words in which they differ."""
        if str(self) != str(other) or not (self.standardization and other.standardization):
            return str(self), str(other)
        for field in dataclasses.fields(Standardization):
            pair = (getattr(spec.standardization, field.name) for spec in (self, other))
            for a, b in zip(*map(np.ravel, pair), strict=True):
                if a != b:
                    name = field.name.replace("_", " ")
                    return f"{self}, a training {name} {a}", f"{other}, a training {name} {b}"
        return str(self), str(other)

    def __str__(self) -> str:
        real = self.num_classes is None
        labels = "with real targets" if real else f"in {self.num_classes} classes"
        groups = f", {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.input_dtype}{list(self.input_shape)} {labels}{groups}"


class Split(Protocol):
    """Examples with random access."""

    @property
    def in_memory(self) -> bool:
        """Whether they are read already, so that to take them all costs next to nothing."""
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at int64[...], as `inputs` [..., *input] and `labels` [..., *label]."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        spec: What its examples are like.
        train: Of several groups, the training set of one after the other, equally long.
        test: Likewise.
        valid: Likewise; None: no examples are held out for it.
        notes: Sentences on the data that are printed once when training starts.
    """

    spec: Spec
    train: Split
    test: Split
    valid: Split | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, split in (("train", self.train), ("test", self.test)):
            if len(split) % self.spec.num_groups:
                raise UserError(
                    f"Groups have equally many examples. Received: {len(split)} in split {name} "
                    f"for {self.spec.num_groups} groups. Make the groups' parts equally long."
                )

    @property
    def num_train_examples(self) -> int:
        """That one member is trained on."""
        return len(self.train) // self.spec.num_groups

    @property
    def train_positions(self) -> np.ndarray:
        """Of each of `train` its position in the training set as it was before some were held out.

        int64[examples].
        """
        whole = np.arange(len(self.train))
        return self.train.positions if isinstance(self.train, PartOfSplit) else whole

    def input_ranges(self) -> np.ndarray:
        """Largest less smallest value of each input in each group's training set.

        Returns:
            float32[groups, *input].
        """

        def of_group(group: int) -> np.ndarray:
            start, stop = (at * self.num_train_examples for at in (group, group + 1))
            low: Any = None
            for first in range(start, stop, _AT_A_TIME):
                rows = np.arange(first, min(first + _AT_A_TIME, stop))
                inputs = self.train.take(rows)["inputs"]
                if low is None:
                    low, high = inputs.min(axis=0), inputs.max(axis=0)
                low, high = (
                    np.minimum(low, inputs.min(axis=0)),
                    np.maximum(high, inputs.max(axis=0)),
                )
            # In float64, for float32 does not tell the ends of a range of large integers apart.
            return (high.astype(np.float64) - low.astype(np.float64)).astype(np.float32)

        return np.stack([of_group(group) for group in range(self.spec.num_groups)])

    def with_validation(self, share: float) -> "Source":
        """This source with a part of each group's training set held out.

        Args:
            share: In [0, 1) of the training examples; which ones is the same for every seed.

        Returns:
            The source; this one for a share of 0.

        Raises:
            UserError: If nothing would be held out, or nothing left.
        """
        if share == 0:
            return self
        length = self.num_train_examples
        count = num_held_out(share, length)
        order = np.random.RandomState(0).permutation(length)
        begins = np.arange(self.spec.num_groups)[:, None] * length
        valid, train = (
            PartOfSplit(self.train, (begins + np.sort(part)).ravel())
            for part in (order[:count], order[count:])
        )
        return dataclasses.replace(self, train=train, valid=valid)


def num_held_out(share: float, num_examples: int) -> int:
    """Returns how many of a group's training examples are held out for validation.

    Args:
        share: Share of the training examples, in [0, 1).
        num_examples: Number of training examples.

    Raises:
        UserError: If the share is not 0, and no example would be held out or none left.
    """
    count = round(share * num_examples)
    if share and not 0 < count < num_examples:
        raise UserError(
            f"data.validation={share} holds out {count:,} of {num_examples:,} training examples. "
            "Choose a share that holds out at least one and leaves at least one."
        )
    return count


@dataclasses.dataclass(frozen=True)
class PartOfSplit:
    """Some examples of a split, by their positions in it."""

    whole: Split
    positions: np.ndarray

    @property
    def in_memory(self) -> bool:
        """See `Split`."""
        return self.whole.in_memory

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        return self.whole.take(self.positions[indices])


@dataclasses.dataclass(frozen=True)
class ArraySplit:
    """A split that lies in memory, in the types in which JAX holds its arrays.

    Attributes:
        inputs: The inputs, [examples, ...]. A type wider than 32 bits is narrowed; a value that
            does not fit raises a `UserError`.
        labels: The labels, [examples, ...]; converted to int32 if they are integers, and to float32
            if they are floats, with the same check.
    """

    in_memory: ClassVar[bool] = True
    inputs: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        inputs, labels = self.inputs, self.labels
        if held_dtype(inputs.dtype) != inputs.dtype:
            held = held_dtype(inputs.dtype)
            object.__setattr__(self, "inputs", narrowed(inputs, held, "inputs"))
        label_dtype = np.float32 if labels.dtype.kind == "f" else np.int32
        object.__setattr__(self, "labels", narrowed(labels, label_dtype, "labels"))

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}
