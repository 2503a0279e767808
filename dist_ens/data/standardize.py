"""Standardisation of inputs and real targets by the mean and deviation of the training rows."""

from typing import NamedTuple

import numpy as np

from dist_ens.data.source import Source
from dist_ens.data.spec import Spec, Standardization, in_tuples
from dist_ens.data.splits import ArraySplit
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import narrowed


class Examples(NamedTuple):
    """Inputs [splits, rows, ...] and real targets of all splits of a data set.

    Targets are [splits, rows], or [splits, rows, targets].
    """

    inputs: np.ndarray
    targets: np.ndarray


def standardized_source(train: Examples, test: Examples, name: str) -> Source:
    """Returns a source of standardised real targets. Each split is a group.

    Targets have mean 0 and standard deviation 1 in the training rows of their split, and so have
    the features of a table. A column that is constant there is only centred, as scikit-learn's
    `StandardScaler` does, and a constant target is refused. Inputs of other shapes are not changed.

    >>> table = Examples(np.array([[[1.0], [3.0]]]), np.array([[10.0, 20.0]]))
    >>> source = standardized_source(table, table, "table")
    >>> source.train.inputs.tolist(), source.spec.standardization.target_mean
    ([[-1.0], [1.0]], (15.0,))
    """
    num_splits, _, *shape = train.inputs.shape
    of_targets = train.targets.shape[2:]
    target_mean, target_std = _moments(train.targets)
    if not target_std.all():
        split, *target = np.argwhere(target_std == 0)[0].tolist()
        raise UserError(
            f"{name}: the target {''.join(f'{number} ' for number in target)}is constant in the "
            f"training rows{f' of split {split}' if num_splits > 1 else ''}. Check that it is the "
            "target."
        )
    mean = std = np.empty((num_splits, 0))
    is_table = len(shape) == 1
    if is_table:
        mean, std = _moments(train.inputs)
        std[std == 0] = 1

    def split_of(part: Examples) -> ArraySplit:
        inputs = _scaled(f"{name}, inputs", part.inputs, mean, std) if is_table else part.inputs
        targets = _scaled(f"{name}, targets", part.targets, target_mean, target_std)
        return ArraySplit(inputs.reshape(-1, *shape), targets.reshape(-1, *of_targets))

    standardization = Standardization(
        input_mean=tuple(map(tuple, mean.tolist())),
        input_std=tuple(map(tuple, std.tolist())),
        target_mean=in_tuples(target_mean),
        target_std=in_tuples(target_std),
    )
    train_split, test_split = split_of(train), split_of(test)
    dtype = train_split.inputs.dtype.name
    spec = Spec(
        tuple(shape),
        dtype,
        of_targets,
        None,
        num_splits,
        standardization,
        num_targets=next(iter(of_targets), None),
    )
    return Source(spec, train=train_split, test=test_split)


def _moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of rows [splits, rows, ...]; 0 for a constant column."""
    rows = rows.astype(np.float64, copy=False)
    mean, variance = rows.mean(axis=1), rows.var(axis=1)
    # The deviation of a constant column is a rounding error, which must not be a divisor.
    num_rows, eps = rows.shape[1], np.finfo(np.float64).eps
    varies = variance > num_rows * eps * variance + (num_rows * mean * eps) ** 2
    return mean, np.where(varies, np.sqrt(variance), 0.0)


def _scaled(where: str, rows: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Returns rows [splits, rows, ...] standardised, float32."""
    scaled = (rows.astype(np.float64, copy=False) - mean[:, None]) / std[:, None]
    return narrowed(scaled, np.float32, f"{where}, standardised, [split, row, column]")
