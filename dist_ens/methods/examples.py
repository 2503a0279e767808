"""Which examples a member sees at a step: a pure function of (seed, step), and of the member.

The stream of examples is one shuffled epoch after another, and step `s` takes its positions
`s * global_batch_size` and on. Where a position's example lies is computed, not looked up, by the
same integer arithmetic on the host and inside a device's program: there is no table to keep, no
iterator to save, and the order is the same wherever the examples are.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError

# As few as leave nothing that 20,000 epochs of 16 to 100 examples show to be uneven.
_ROUNDS = 12
# Its grid's sides are then at most 2**16, and an amount below one is made from 16 bits in 32.
_MOST_EXAMPLES = 2**30
_GOLDEN = 0x9E3779B9  # 2**32 / the golden ratio: parts the rounds


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which a split's examples come.

    Attributes:
        num_examples: That a member sees in an epoch; of all groups together at most 2**30.
        global_batch_size: Examples per step, at most `num_examples`.
        shuffle: A new order in every epoch; False: the order of the split.
        per_member: Each member has an order of its own; False: all see the same batches.
        num_groups: The split is so many sets of `num_examples`, one after the other, and a member
            sees only that of its group: its id modulo their number. More than one are shuffled,
            `per_member`.
    """

    num_examples: int
    global_batch_size: int
    shuffle: bool = True
    per_member: bool = False
    num_groups: int = 1

    def __post_init__(self) -> None:
        if self.num_examples * self.num_groups > _MOST_EXAMPLES:
            raise UserError(
                f"A split has at most {_MOST_EXAMPLES:,} examples. Received: "
                f"{self.num_examples * self.num_groups:,}. Train on parts of it."
            )
        if self.num_groups > 1 and not (self.per_member and self.shuffle):
            raise UserError(
                "Members of several groups have shuffled orders of their own. Received: "
                f"num_groups={self.num_groups}, per_member={self.per_member}, "
                f"shuffle={self.shuffle}. Set both to True."
            )
        if self.global_batch_size > self.num_examples:
            raise UserError(
                "A batch is no longer than an epoch. Received: data.global_batch_size="
                f"{self.global_batch_size:,} of {self.num_examples:,} training examples. Lower it."
            )

    def cursor(self, seed: int, steps: range) -> np.ndarray:
        """Where some steps stand in the stream of examples.

        Args:
            seed: Of the order, in [0, 2**32).
            steps: Their numbers, from 0.

        Returns:
            The seed, the epoch in which the step begins (modulo 2**32) and the positions of that
            epoch that earlier steps took, uint32[steps, 3].
        """
        # Python's numbers: no run is too long for them.
        starts = [divmod(step * self.global_batch_size, self.num_examples) for step in steps]
        places = [(seed, epoch % 2**32, offset) for epoch, offset in starts]
        return np.array(places, np.uint32).reshape(-1, 3)

    def indices(self, cursor: Any, rows: Any, member_id: Any = None) -> Any:
        """The examples of some rows of a batch.

        Args:
            cursor: Of some steps.
            rows: Positions in the global batch, int[rows].
            member_id: The member's, int32[]; needed where each has an order of its own.

        Returns:
            Positions in the split, int32[steps, rows]: a JAX array where the cursor is one.
        """
        xp: Any = jnp if isinstance(cursor, jax.Array) else np
        seed, epoch, offset = (cursor[:, i] for i in range(3))
        position = offset[:, None] + xp.asarray(rows).astype(np.uint32)[None]
        # A batch is no longer than an epoch, so that it lies in two at most.
        in_next = position >= np.uint32(self.num_examples)
        position = xp.where(in_next, position - np.uint32(self.num_examples), position)
        if not self.shuffle:
            return position.astype(np.int32)
        of_seed = _fold_in(xp.zeros((len(cursor), 2), np.uint32), seed)
        keys = [_fold_in(of_seed, epoch + np.uint32(later)) for later in (0, 1)]
        if self.per_member:
            keys = [_fold_in(key, member_id) for key in keys]
        words = [xp.where(in_next, keys[1][:, i, None], keys[0][:, i, None]) for i in (0, 1)]
        index = _shuffled(position, words, self.num_examples, xp).astype(np.int32)
        if self.num_groups == 1:
            return index
        return index + member_id % self.num_groups * self.num_examples


def _shuffled(position: Any, key: list[Any], count: int, xp: Any) -> Any:
    """Where a keyed permutation of [0, count) takes positions: uint32, in the positions' shape.

    A Feistel network on the pairs of a grid that is hardly larger than `count`; what falls outside
    is sent through it again, as often as there are places outside, so that none is left there.

    Source: Black and Rogaway (2002), "Ciphers with arbitrary finite domains".
    """
    rows, columns = _grid(count)

    def permuted(at: Any) -> Any:
        row, column = at // np.uint32(columns), at % np.uint32(columns)
        for number in range(_ROUNDS):
            word = key[number % 2] + np.uint32((number + 1) * _GOLDEN % 2**32)
            if number % 2:
                row = _add_below(row, column ^ word, rows, xp)
            else:
                column = _add_below(column, row ^ word, columns, xp)
        return row * np.uint32(columns) + column

    at = permuted(position)
    for _ in range(rows * columns - count):
        at = xp.where(at < np.uint32(count), at, permuted(at))
    return at


@cache
def _grid(count: int) -> tuple[int, int]:
    """Rows and columns, at most about 1 to 4, with the fewest places too many."""
    root = math.isqrt(count - 1) + 1
    smallest = min(root, max(2, root // 2))
    rows = min(range(root, smallest - 1, -1), key=lambda n: -count % n)
    return rows, -(-count // rows)


def _add_below(value: Any, word: Any, bound: int, xp: Any) -> Any:
    """`value` and an amount in [0, bound) that the word chooses, added modulo the bound."""
    word = word * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0xC2B2AE35)  # its upper half depends on all
    total = value + ((word >> np.uint32(16)) * np.uint32(bound) >> np.uint32(16))
    return xp.where(total < np.uint32(bound), total, total - np.uint32(bound))


def _mixed(word: Any) -> Any:
    """A word whose every bit depends on every bit of the given one.

    Source: Appleby, MurmurHash3's finaliser, in the public domain.
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _fold_in(key: Any, word: Any) -> Any:
    """Another key, uint32[..., 2], from one and a word [...]."""
    word = word.astype(np.uint32)
    first = _mixed(key[..., 0] ^ _mixed(word + np.uint32(_GOLDEN)))
    second = _mixed(key[..., 1] + _mixed(word ^ np.uint32(_GOLDEN)))
    xp: Any = jnp if isinstance(first, jax.Array) else np
    return xp.stack([first, second], axis=-1)
