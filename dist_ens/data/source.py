"""What a data set is to the trainer: a description, and two splits with random access."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from dist_ens.errors import UserError

_AT_A_TIME = 10_000  # examples, where a split is gone through once
_NARROWED = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


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
        """Inputs in their own units, [examples, features], as every group's members take them.

        Returns:
            float32[groups, examples, features].
        """
        mean, std = (np.array(rows)[:, None] for rows in (self.input_mean, self.input_std))
        return ((inputs - mean) / std).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A data set, described: one example, and how many sets it is.

    Attributes:
        input_shape: Without the batch.
        input_dtype: Name of the NumPy type, as the source yields it.
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
    """

    spec: Spec
    train: Split
    test: Split
    valid: Split | None = None

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
        count = round(share * length)
        if not 0 < count < length:
            raise UserError(
                "A share of the training examples is held out, and some are left. Received: "
                f"data.validation={share} of {length:,}. Choose a share in between."
            )
        order = np.random.RandomState(0).permutation(length)
        begins = np.arange(self.spec.num_groups)[:, None] * length
        valid, train = (
            PartOfSplit(self.train, (begins + np.sort(part)).ravel())
            for part in (order[:count], order[count:])
        )
        return dataclasses.replace(self, train=train, valid=valid)


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
    """A split that lies in memory."""

    in_memory: ClassVar[bool] = True
    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


def source_of_arrays(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    num_classes: int | None = None,
    name: str = "arrays",
) -> Source:
    """A source of plain arrays, each checked.

    Args:
        train: Inputs [examples, ...] and labels int[examples] of the training split.
        test: Likewise of the test split.
        num_classes: Default: as many as the training labels name, every one of them present.
        name: What an error calls the source.

    Returns:
        The source.

    Raises:
        UserError: For an empty split, inputs and labels of different length, inputs that are not
            finite or not numbers, or labels that are not integers in range.
    """
    splits = {
        split: (np.asarray(inputs), np.asarray(labels))
        for split, (inputs, labels) in (("train", train), ("test", test))
    }
    # What JAX would make of them anyway; a number that this makes infinite is told.
    with np.errstate(over="ignore"):
        splits = {
            split: (inputs.astype(narrowed(inputs.dtype)), labels)
            for split, (inputs, labels) in splits.items()
        }
    for split, (inputs, labels) in splits.items():
        check_examples(f"{name}, split {split}", inputs, labels)
    (inputs, labels), (test_inputs, test_labels) = splits.values()
    if inputs.shape[1:] != test_inputs.shape[1:] or inputs.dtype != test_inputs.dtype:
        raise UserError(
            f"Training and test examples have one shape and type. Received, from {name}: "
            f"{inputs.dtype}{list(inputs.shape[1:])} and "
            f"{test_inputs.dtype}{list(test_inputs.shape[1:])}. Make them alike."
        )
    num_classes = num_classes or count_classes(f"{name}, split train", labels)
    for split, (_, labels) in splits.items():
        check_labels(f"{name}, split {split}", labels, num_classes)
    return Source(
        Spec(inputs.shape[1:], inputs.dtype.name, (), num_classes),
        train=ArraySplit(splits["train"][0], splits["train"][1].astype(np.int32)),
        test=ArraySplit(test_inputs, test_labels.astype(np.int32)),
    )


def narrowed(dtype: np.dtype) -> np.dtype:
    """The type in which a source of arrays yields inputs of a type: what JAX would make of them."""
    return np.dtype(_NARROWED.get(dtype.name, dtype))


def check_examples(where: str, inputs: np.ndarray, labels: np.ndarray) -> None:
    """Raises a `UserError` unless the arrays are some finite numbers with a label each."""
    if inputs.ndim == 0 or len(inputs) == 0:
        raise UserError(f"A split holds at least one example. Received: none ({where}). Add data.")
    if labels.ndim and len(inputs) != len(labels):
        raise UserError(
            f"Every example has one label. Received: {len(inputs)} inputs and {len(labels)} labels "
            f"({where}). Check that the two belong together."
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            "Labels are class numbers, int[examples]. Received: "
            f"{labels.dtype}{list(labels.shape)} ({where}). Convert them: argmax of one-hot rows, "
            "or astype(int); real targets come in a table, uci:FILE."
        )
    check_finite(where, inputs)


def check_finite(where: str, inputs: np.ndarray) -> None:
    """Raises a `UserError` if the inputs are not numbers, or some are NaN or infinite."""
    if inputs.dtype.kind not in "biuf":
        raise UserError(
            f"Inputs are numbers. Received: type {inputs.dtype} ({where}). Convert them first."
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        bad = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
        raise UserError(
            f"Inputs are finite. Received: NaN or infinity in {len(bad)} of {len(inputs)} "
            f"examples, the first at index {bad[0]} ({where}). Remove or fill them in."
        )


def count_classes(where: str, labels: np.ndarray) -> int:
    """Number of classes that training labels name: 1 + the largest, none between them absent."""
    present = np.unique(labels)
    count = int(present[-1]) + 1
    if present[0] < 0 or len(present) != count:
        raise UserError(
            "Labels are 0, 1, 2, … with no class absent from the training split. Received: "
            f"{len(present)} different labels from {present[0]} to {present[-1]} ({where}). "
            "Correct them, or say how many classes there are with --config.data.num_classes."
        )
    if count == 1:
        raise UserError(
            f"There are two classes at least. Received: training labels that are all 0 ({where}). "
            "Check that they are the labels; --config.data.num_classes allows it otherwise."
        )
    return count


def check_labels(where: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises a `UserError` unless every label lies in [0, num_classes)."""
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        raise UserError(
            f"Labels lie in [0, {num_classes}). Received: label {labels[bad[0]]} at index "
            f"{bad[0]}, {len(bad)} in all ({where}). Correct the labels, or set "
            "--config.data.num_classes."
        )


def convert_inputs(spec: Spec, inputs: np.ndarray, where: str) -> np.ndarray:
    """Examples from outside, in the type in which the source has them.

    Args:
        spec: Of the source that the members were trained on.
        inputs: [examples, ...], unscaled; in their own units where the source standardises them.
        where: What an error calls them.

    Returns:
        The examples in `spec.input_dtype`; in float64 where they are to be standardised.

    Raises:
        UserError: If the shape is another, the conversion could lose a value, or one is not finite.
    """
    to = np.dtype("float64" if spec.standardization else spec.input_dtype)
    wanted = f"{to}[examples, {', '.join(map(str, spec.input_shape))}]"
    received = f"{inputs.dtype}{list(inputs.shape)} ({where})"
    if inputs.shape[1:] != spec.input_shape or inputs.ndim == 0:
        raise UserError(
            f"The members take examples as their training data had them: {wanted}. Received: "
            f"{received}. Reshape them; a single example is an array of length 1."
        )
    converts = np.can_cast(inputs.dtype, to, "same_kind" if to.kind == "f" else "safe")
    if inputs.dtype.kind not in "biuf" or not converts:
        raise UserError(
            f"The members take examples as their training data had them: {wanted}. Received: "
            f"{received}, which does not convert without loss. Pass the values unscaled, with "
            f"astype('{to}')."
        )
    with np.errstate(over="ignore"):  # what it makes infinite is told below
        converted = inputs.astype(to)
    check_examples(where, converted, np.zeros(len(inputs), np.int32))
    if spec.label_shape and spec.num_classes and to.kind in "iu":  # tokens
        check_labels(where, converted.reshape(len(inputs), -1).max(axis=1), spec.num_classes)
        check_labels(where, converted.reshape(len(inputs), -1).min(axis=1), spec.num_classes)
    return converted
