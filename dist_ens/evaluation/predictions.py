"""Functions on predictions on the host: joining batches, finding NaN, restoring units."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dist_ens.data import Standardization
from dist_ens.losses import Distribution
from dist_ens.types import Tree


def joined(parts: Sequence[Tree]) -> Tree:
    """Returns batches of predictions joined, leaves [groups or members, examples, ...]."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def broken_positions(member_predictions: Mapping[str, np.ndarray]) -> list[int]:
    """Returns the positions of the members with NaN among their predictions.

    Args:
        member_predictions: Predictions by name, leaves [members, examples, ...].
    """
    broken = [
        np.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in member_predictions.values()
    ]
    return np.flatnonzero(np.any(broken, axis=0)).tolist()


def shown(
    distribution: Distribution,
    summary: Mapping[str, np.ndarray],
    standardization: Standardization | None,
) -> dict[str, np.ndarray]:
    """Returns predictions in the form that users see, with real targets in their own unit.

    They are scaled in float64 on the host, because float32 would lose a deviation of 1 around a
    mean of 1e8.

    Args:
        distribution: Predictive distribution of the summary.
        summary: Summary with leaves [groups or members, examples, ...]. Member m is in group
            m % groups.
        standardization: Standardization of the source. None if it did not standardise.
    """
    if standardization is None:
        return distribution.shown(summary)
    leading = len(next(iter(summary.values())))
    mean, std = (
        np.tile(np.array(numbers), leading // len(numbers))
        for numbers in (standardization.target_mean, standardization.target_std)
    )
    return distribution.shown(summary, mean, std)
