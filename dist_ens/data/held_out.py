"""Divides examples into those to train on and those that are held out."""

import dataclasses

import numpy as np

from dist_ens.ground.errors import UserError


@dataclasses.dataclass(frozen=True)
class Units:
    """Rows that belong together, such as those of a customer or of a day.

    Attributes:
        numbers: Number of the unit of each row, int64[rows].
        in_time: Whether the numbers are in the order of time, so that the last units are held out.
            Otherwise they are drawn.

    >>> Units(np.array([0, 0, 1, 2, 1, 3]), in_time=True).held_out(0.5)
    array([False, False, False,  True, False,  True])
    """

    numbers: np.ndarray
    in_time: bool

    @classmethod
    def of(cls, values: np.ndarray, *, in_time: bool) -> "Units":
        """Returns the units of rows with equal values, [rows]."""
        return cls(np.unique(values, return_inverse=True)[1], in_time)

    def held_out(self, share: float) -> np.ndarray:
        """Returns whether each row belongs to a share of the units, or of the rows in time."""
        if self.in_time:
            count = len(self.numbers)
            last = max(0, count - round(share * count) - 1)
            return self.numbers > np.sort(self.numbers)[last]
        units = np.unique(self.numbers)
        drawn = np.random.RandomState(0).permutation(units)[: round(share * len(units))]
        return np.isin(self.numbers, drawn)

    def take(self, rows: np.ndarray) -> "Units":
        """Returns the units of some rows."""
        return dataclasses.replace(self, numbers=self.numbers[rows])


def num_held_out(share: float, num_examples: int) -> int:
    """Returns the number of a group's training examples that are held out for validation."""
    count = round(share * num_examples)
    if share:
        _require_both(share, count, num_examples)
    return count


def divided(
    share: float, num_examples: int, units: Units | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted positions of the examples to train on, and of a held-out share.

    They are the same for every seed. Examples of a unit are not divided.
    """
    if units is None:
        order = np.random.RandomState(0).permutation(num_examples)
        count = num_held_out(share, num_examples)
        return np.sort(order[count:]), np.sort(order[:count])
    is_held_out = units.held_out(share)
    _require_both(share, int(is_held_out.sum()), num_examples)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _require_both(share: float, count: int, num_examples: int) -> None:
    if not 0 < count < num_examples:
        raise UserError(
            f"validation={share} holds out {count:,} of {num_examples:,} training examples. "
            "Hold out at least one, and leave at least one."
        )
