"""Standardisation of inputs and real targets by the mean and deviation of the training rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dist_ens.data.notes import notes_on_columns, notes_on_digits
from dist_ens.data.source import ArraySplit, Source
from dist_ens.data.spec import Spec, Standardization
from dist_ens.errors import UserError
from dist_ens.narrowing import held_dtype, narrowed


class Examples(NamedTuple):
    """The examples of one part of each division of a data set, in their own units.

    Attributes:
        inputs: Inputs, float64[splits, rows, features] of a table, or [splits, rows, ...].
        targets: Real targets, float64[splits, rows].
        name: Name of the part in error messages, such as `train`.
    """

    inputs: np.ndarray
    targets: np.ndarray
    name: str


def standardized_source(
    where: str, train: Examples, test: Examples, columns: Sequence[int]
) -> Source:
    """Returns a source of standardised real targets. Each split is a group.

    Targets have mean 0 and standard deviation 1 in the training rows of their split, and so have
    the features of a table. A feature that is constant there is only centred, as scikit-learn's
    `StandardScaler` does. Inputs of other shapes are not changed.

    Args:
        where: Name of the source in error messages.
        train: Training examples.
        test: Test examples.
        columns: Column of each feature of a table.

    Returns:
        The source, with means and standard deviations in `Spec.standardization`. Its notes name the
        features that are constant or almost constant in training, and those with test rows far from
        the mean.

    Raises:
        UserError: If the targets are constant, or a mean or deviation does not fit in float64.
    """
    names = (train.name, test.name)
    num_splits, _, *shape = train.inputs.shape
    if len(shape) == 1:
        scaled = _scaled(where, train.inputs, test.inputs, "input", names)
        inputs, means, stds = (scaled.train, scaled.test), scaled.mean.tolist(), scaled.std.tolist()
        notes = notes_on_columns(
            train.inputs, test.inputs, scaled.mean, scaled.std, scaled.varies, columns
        )
    else:
        means = stds = [[]] * num_splits
        held = held_dtype(train.inputs.dtype)
        inputs = (
            narrowed(train.inputs.reshape(-1, *shape), held, f"{where}, inputs"),
            narrowed(test.inputs.reshape(-1, *shape), held, f"{where}, inputs"),
        )
        notes = notes_on_digits(train.inputs.reshape(-1, *shape))
    targets = _scaled(where, train.targets[..., None], test.targets[..., None], "target", names)
    constant = np.flatnonzero(~targets.varies)
    if len(constant):
        raise UserError(
            f"{where}: the target is constant in the training rows of split {constant[0]}. Check "
            "that it is the target, or leave the split out."
        )
    standardization = Standardization(
        input_mean=tuple(map(tuple, means)),
        input_std=tuple(map(tuple, stds)),
        target_mean=tuple(targets.mean[:, 0].tolist()),
        target_std=tuple(targets.std[:, 0].tolist()),
    )
    return Source(
        Spec(tuple(shape), inputs[0].dtype.name, (), None, num_splits, standardization),
        train=ArraySplit(inputs[0], targets.train[:, 0]),
        test=ArraySplit(inputs[1], targets.test[:, 0]),
        notes=notes,
    )


class _Scaled(NamedTuple):
    """Columns, standardised on each split's training rows.

    Attributes:
        train: Standardised training rows, float32[splits * training rows, columns].
        test: Standardised test rows, float32[splits * test rows, columns].
        mean: Training means, [splits, columns].
        std: Training standard deviations, [splits, columns]. A constant column has 1.
        varies: Whether a column is not constant, bool[splits, columns].
    """

    train: np.ndarray
    test: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    varies: np.ndarray


def _scaled(
    where: str, train: np.ndarray, test: np.ndarray, name: str, parts: tuple[str, str]
) -> _Scaled:
    """Standardises columns [splits, rows, columns] as scikit-learn's `StandardScaler` does."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, variance = train.mean(axis=1), train.var(axis=1)
        # The deviation of a constant column is a rounding error, which must not be a divisor.
        num_rows, eps = train.shape[1], np.finfo(np.float64).eps
        varies = variance > num_rows * eps * variance + (num_rows * mean * eps) ** 2
        std = np.where(varies, np.sqrt(variance), 1.0)
    finite = np.isfinite(mean) & np.isfinite(variance)
    if not finite.all():
        split, column = np.argwhere(~finite)[0]
        raise UserError(
            f"{where}: the mean or deviation of {name} {column} in split {split} is too large for "
            "float64. Divide the column by a large number."
        )

    def standardised(rows: np.ndarray, part: str) -> np.ndarray:
        standard = (rows - mean[:, None]) / std[:, None]
        told = f"{where}, standardised {name}s of {part}, [split, row, column]"
        return narrowed(standard, np.float32, told).reshape(-1, train.shape[2])

    return _Scaled(
        standardised(train, parts[0]),
        standardised(test, parts[1]),
        mean,
        std,
        varies,
    )
