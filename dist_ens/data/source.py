"""What a data set is to the trainer: a description, and two splits with random access."""

import dataclasses
import hashlib
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from dist_ens.data.spec import Spec
from dist_ens.errors import UserError
from dist_ens.narrowing import held_dtype, narrowed

_AT_A_TIME = 10_000  # examples, where a split is gone through once
# For a split's fingerprint: bytes of which all examples are read, and examples of a larger one.
_MOST_READ, _SAMPLED = 2**30, 100


@runtime_checkable
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
            if not hasattr(split, "take") or not hasattr(split, "__len__"):
                raise UserError(
                    f"The {name} split is a {type(split).__name__}, which has no examples by their "
                    "positions. Use dist_ens.data.ArraySplit for arrays, or write a class like "
                    "dist_ens.data.Split."
                )
            if len(split) % self.spec.num_groups:
                raise UserError(
                    f"Groups have equally many examples. Received: {len(split)} in split {name} "
                    f"for {self.spec.num_groups} groups. Make the groups' parts equally long."
                )

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprints of the examples, by the name of their split: 64 hexadecimal digits each.

        Up to 1 GiB of examples in memory are all read; of others 100 that are evenly spread. A
        split that yields an example differently each time, as one that augments it does, has none.
        """
        found = {name: self._fingerprint_of(getattr(self, name)) for name in ("train", "test")}
        return {name: digits for name, digits in found.items() if digits is not None}

    def _fingerprint_of(self, split: Split) -> str | None:
        count = len(split)
        if split.in_memory and count * self.spec.example_bytes <= _MOST_READ:
            positions = np.arange(count)
        else:
            positions = np.unique(np.linspace(0, count - 1, _SAMPLED).astype(np.int64))
        if _digest(split, positions[:_SAMPLED]) != _digest(split, positions[:_SAMPLED]):
            return None
        return _digest(split, positions)

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


def _digest(split: Split, positions: np.ndarray) -> str:
    """Returns a fingerprint of some examples and of the split's length: 64 hexadecimal digits."""
    digest = hashlib.sha256(str(len(split)).encode())
    for first in range(0, len(positions), _AT_A_TIME):
        examples = split.take(positions[first : first + _AT_A_TIME])
        for name in sorted(examples):
            leaf = np.ascontiguousarray(examples[name])
            digest.update(f"{name} {leaf.dtype} {leaf.shape[1:]}".encode())
            digest.update(leaf.data.cast("B") if leaf.size else b"")
    return digest.hexdigest()
