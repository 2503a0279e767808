"""The rule for which examples a member sees at a step: order, shuffling and folds."""

from dist_ens.sampling import kfold
from dist_ens.sampling.order import Order

__all__ = ["Order", "kfold"]
