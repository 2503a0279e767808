"""Rules for which examples a member sees at a step: the argument `order` of `fit`."""

import dataclasses

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import whole_number
from dist_ens.sampling import Order


@dataclasses.dataclass(frozen=True)
class OrderRule:
    """A rule for which examples a member sees, for data of any length.

    `shared`, `permuted` and `kfold` make one.

    Attributes:
        shuffle: Whether every epoch has a new order. False keeps the order of the data.
        per_member: Whether each member has its own order. False gives all members the same batches.
        num_folds: Number of folds, one of which each member leaves out. 0 leaves none out.

    >>> OrderRule(per_member=True) == permuted()
    True
    """

    shuffle: bool = True
    per_member: bool = False
    num_folds: int = 0

    def __post_init__(self) -> None:
        if (self.per_member and not self.shuffle) or (self.num_folds and not self.per_member):
            raise UserError(f"{self} is no order. Use permuted() or kfold(num_folds).")

    def is_per_member(self, num_groups: int) -> bool:
        """Returns whether members have an order each, as members of several groups always do."""
        return self.per_member or num_groups > 1

    def order(self, num_examples: int, batch_size: int, num_groups: int = 1) -> Order:
        """Returns the order of a number of examples of each group, in global batches of a size."""
        return Order(
            num_examples,
            batch_size,
            shuffle=self.shuffle,
            per_member=self.is_per_member(num_groups),
            num_groups=num_groups,
            num_folds=self.num_folds,
        )


def shared(*, shuffle: bool = True) -> OrderRule:
    """Gives all members the same batches.

    Args:
        shuffle: Whether every epoch has a new order. False keeps the order of the data.

    >>> shared(shuffle=False)
    OrderRule(shuffle=False, per_member=False, num_folds=0)
    """
    return OrderRule(shuffle=shuffle)


def permuted() -> OrderRule:
    """Gives each member the whole training set in an order of its own.

    >>> permuted().order(num_examples=100, batch_size=10).epoch_steps
    Fraction(10, 1)
    """
    return OrderRule(per_member=True)


def kfold(num_folds: int) -> OrderRule:
    """Lets each member leave one fold of the training set out.

    Member i leaves out fold i modulo the number of folds, and has an order of its own.

    Args:
        num_folds: Number of folds, from 2 to the number of examples.

    >>> kfold(5).order(num_examples=100, batch_size=10).epoch_steps
    Fraction(8, 1)
    """
    return OrderRule(per_member=True, num_folds=whole_number("num_folds", num_folds, least=2))
