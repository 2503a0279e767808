"""The examples that a member sees at a step: a pure function of the seed, the step and the member.

The stream of examples is one shuffled epoch after another. Step `s` takes `global_batch_size`
positions of it, from `s * global_batch_size` on. The example at a position is computed by the same
integer arithmetic on the host and on a device. So there is no table or iterator to save.
"""

import dataclasses
import math
from fractions import Fraction
from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import Array, Leaf
from dist_ens.sampling import kfold
from dist_ens.sampling.shuffle import fold_in, shuffled

# The library that a cursor is of computes the positions too.
Cursor = TypeVar("Cursor", jax.Array, np.ndarray)
# Each side of a permutation's grid is then at most 2**16, so that the products of 16-bit numbers in
# `shuffle` fit in 32 bits.
_MOST_EXAMPLES = 2**30


@dataclasses.dataclass(frozen=True)
class Order:
    """Order of the examples of a split.

    Attributes:
        num_examples: Number of examples of a group; at most 2**30 in all groups together.
        global_batch_size: Number of examples of a step, at most `epoch_length`.
        shuffle: Whether every epoch has a new order. False keeps the order of the split.
        per_member: Whether each member has its own order. False gives all members the same batches.
        num_groups: Number of groups, which lie one after the other in the split. A member sees only
            its group, its id modulo this number. More than one needs `per_member`.
        num_folds: Number of folds, one of which each member leaves out. 0 leaves none out; any
            other number needs `shuffle` and `per_member`.
    """

    num_examples: int
    global_batch_size: int
    shuffle: bool = True
    per_member: bool = False
    num_groups: int = 1
    num_folds: int = 0

    def __post_init__(self) -> None:
        count = self.num_examples * self.num_groups
        if count > _MOST_EXAMPLES:
            raise UserError(
                f"The split has {count:,} examples, and a split can have at most "
                f"{_MOST_EXAMPLES:,} examples. Train on a part of it."
            )
        if self.num_folds and not 2 <= self.num_folds <= self.num_examples:
            raise UserError(
                f"num_folds={self.num_folds} does not lie between 2 and the "
                f"{self.num_examples:,} training examples. Try num_folds=5."
            )
        if self.global_batch_size > self.epoch_length:
            raise UserError(
                f"batch_size={self.global_batch_size:,} is larger than an epoch of "
                f"{self.epoch_length:,} training examples. Lower it."
            )

    @property
    def epoch_length(self) -> int:
        """Number of examples that a member sees in an epoch, each of them once."""
        if self.num_folds:
            return kfold.epoch_length(self.num_examples, self.num_folds)
        return self.num_examples

    @property
    def epoch_steps(self) -> Fraction:
        """Number of steps of an epoch. It need not be whole, as a batch may lie in two epochs."""
        return Fraction(self.epoch_length, self.global_batch_size)

    def num_steps(self, epochs: float) -> int:
        """Returns the number of steps in which a member sees some epochs, rounded up.

        `epochs` is the decimal number that is printed of it, so a rounding error adds no step.

        >>> Order(129, 128).num_steps(10)  # 10.08 batches
        11
        """
        return math.ceil(Fraction(str(epochs)) * self.epoch_steps)

    def cursor(self, seed: int, steps: range) -> np.ndarray:
        """Returns the positions of some steps in the stream of examples, uint32[steps, 3].

        A row holds the seed, the epoch in which the step begins, modulo 2**32, and the number of
        that epoch's examples in earlier steps.
        """
        # Python's integers do not overflow, however long the run is.
        starts = [divmod(step * self.global_batch_size, self.epoch_length) for step in steps]
        places = [(seed, epoch % 2**32, offset) for epoch, offset in starts]
        return np.array(places, np.uint32).reshape(-1, 3)

    def indices(self, cursor: Cursor, rows: Array, member_id: Leaf = None) -> Cursor:
        """Returns the examples of some rows of a batch, int32[steps, rows], NumPy or JAX.

        The id of the member, int32[] or int32[1], is required if `per_member` is True.
        """
        xp: ModuleType = jnp if isinstance(cursor, jax.Array) else np
        position = cursor[:, 2, None] + xp.asarray(rows).astype(np.uint32)[None]
        # A batch is not longer than an epoch, so it lies in at most two epochs.
        in_next = position >= np.uint32(self.epoch_length)
        position = xp.where(in_next, position - np.uint32(self.epoch_length), position)
        index: Leaf = position
        if self.shuffle:
            seed, epoch = cursor[:, 0], cursor[:, 1]
            of_seed = fold_in(xp.zeros((len(cursor), 2), np.uint32), seed)
            keys = [fold_in(of_seed, epoch + np.uint32(later)) for later in (0, 1)]
            if self.per_member:
                keys = [fold_in(key, member_id) for key in keys]
            words = [xp.where(in_next, keys[1][:, i, None], keys[0][:, i, None]) for i in (0, 1)]
            index = shuffled(position, words, self.epoch_length, xp)
        if self.num_folds:
            fold = kfold.fold_of_member(member_id, self.num_folds, self.num_groups)
            place = kfold.kept(index, fold, words, self.num_examples, self.num_folds)
            index = kfold.example_at(place, seed[0], self.num_examples, xp)
        index = index.astype(np.int32)
        if self.num_groups > 1:
            index = index + member_id % self.num_groups * self.num_examples
        return index

    def member_indices(self, cursor: jax.Array, rows: Array, member_ids: Array) -> jax.Array:
        """Returns the examples of each member, int32[members, steps, rows]; see `indices`.

        Without `per_member`, they are int32[steps, rows].
        """
        if not self.per_member:
            return self.indices(cursor, rows)
        return jax.vmap(lambda member_id: self.indices(cursor, rows, member_id))(member_ids)
