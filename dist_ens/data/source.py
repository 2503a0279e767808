"""A data set for the trainer: a description, and splits with random access."""

import dataclasses
import hashlib
from functools import cached_property

import jax
import numpy as np

from dist_ens.data.held_out import Units, divided
from dist_ens.data.spec import Spec
from dist_ens.data.splits import PartOfSplit, Split, in_blocks
from dist_ens.ground.errors import UserError

# The fingerprint of a source covers all examples of a split in memory of up to the first number of
# bytes. It covers the second number of examples of any other split.
_MOST_READ, _SAMPLED = 2**30, 100


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        spec: Description of the examples.
        train: Training split. It holds the equally long training sets of all groups, one after the
            other.
        test: Test split, with the groups in the same order.
        valid: Validation split, with the groups in the same order. None if no examples are held
            out.
        units: Units of the training examples that are held out as a whole. None holds out single
            examples.

    >>> from dist_ens.data import ArraySplit
    >>> split = ArraySplit(np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]))
    >>> source = Source(Spec((2,), "float32", (), 2), train=split, test=split)
    >>> half = source.with_validation(0.5)
    >>> len(half.train), len(half.valid)
    (2, 2)
    """

    spec: Spec
    train: Split
    test: Split
    valid: Split | None = None
    units: Units | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, split in (("train", self.train), ("test", self.test)):
            if len(split) % self.spec.num_groups:
                raise UserError(
                    f"The {name} split must have equally many examples of each of "
                    f"{self.spec.num_groups} groups: it has {len(split):,}."
                )

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprints of `train` and `test` by these names, 64 hexadecimal digits each.

        All examples are read if they are in memory and take up to 1 GiB. Otherwise 100 evenly
        spread examples are read. A split that changes an example each time, as augmentation does,
        has no fingerprint.
        """
        size = self.spec.example_bytes
        found = {
            name: fingerprint_of(split, size, most_bytes=_MOST_READ, sampled=_SAMPLED)
            for name, split in (("train", self.train), ("test", self.test))
        }
        return {name: digits for name, digits in found.items() if digits is not None}

    @property
    def num_train_examples(self) -> int:
        """Number of training examples of one group."""
        return len(self.train) // self.spec.num_groups

    @property
    def train_positions(self) -> np.ndarray:
        """Position of each training example before some were held out, int64[examples]."""
        if isinstance(self.train, PartOfSplit):
            return self.train.positions
        return np.arange(len(self.train))

    def input_ranges(self) -> np.ndarray:
        """Returns the maximum minus the minimum of each input, float32[groups, *input]."""
        ranges = []
        for rows in np.split(np.arange(len(self.train)), self.spec.num_groups):
            low, high = np.array(np.inf), np.array(-np.inf)
            for examples in in_blocks(self.train, rows):
                inputs = examples["inputs"]
                # The ends are float64, because float32 rounds large integers.
                low = np.minimum(low, inputs.min(axis=0).astype(np.float64))
                high = np.maximum(high, inputs.max(axis=0).astype(np.float64))
            ranges.append((high - low).astype(np.float32))
        return np.stack(ranges)

    def with_validation(self, share: float) -> "Source":
        """Returns this source with a part of each group's training set held out for validation.

        Args:
            share: Fraction of the training examples to hold out, in [0, 1). The choice of examples
                does not depend on the seed. Of a table with a group or a time, it is the fraction
                of the groups, or the last fraction.

        Returns:
            New source; this source itself if `share` is 0.

        Raises:
            UserError: If `share` is not 0, and no example would be held out or none left.
        """
        if share == 0:
            return self
        length, units = self.num_train_examples, self.units
        kept, held_out = divided(share, length, units)
        begins = np.arange(self.spec.num_groups)[:, None] * length
        train, valid = (
            PartOfSplit(self.train, (begins + part).ravel()) for part in (kept, held_out)
        )
        units = None if units is None else units.take(kept)
        return dataclasses.replace(self, train=train, valid=valid, units=units)


def fingerprint_of(
    split: Split, example_bytes: int, *, most_bytes: int, sampled: int
) -> str | None:
    """Returns a fingerprint of a split's examples and their number, 64 hexadecimal digits.

    All examples of a split in memory of at most `most_bytes` are read, and `sampled` evenly spread
    ones of any other. A split that changes an example each time, as augmentation does, has None.
    """
    count = len(split)
    if split.in_memory and count * example_bytes <= most_bytes:
        positions = np.arange(count)
    else:
        positions = np.unique(np.linspace(0, count - 1, sampled).astype(np.int64))
    few = positions[:_SAMPLED]
    return None if _digest(split, few) != _digest(split, few) else _digest(split, positions)


def _digest(split: Split, positions: np.ndarray) -> str:
    digest = hashlib.sha256(str(len(split)).encode())
    for examples in in_blocks(split, positions):
        for path, values in jax.tree_util.tree_leaves_with_path(examples):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf = np.ascontiguousarray(values)
            digest.update(f"{name} {leaf.dtype} {leaf.shape[1:]}".encode())
            digest.update(leaf.data.cast("B") if leaf.size else b"")
    return digest.hexdigest()
