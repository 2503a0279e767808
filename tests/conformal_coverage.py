"""How often conformal sets and intervals hold the truth."""

import numpy as np


def coverage_of_sets(sets, labels):
    return sets[np.arange(len(labels)), labels].mean()


def coverage_of_intervals(lower, upper, targets):
    return ((lower <= targets) & (targets <= upper)).mean()
