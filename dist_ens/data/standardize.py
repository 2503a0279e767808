"""Standardisation of inputs and real targets by the mean and deviation of the training rows."""

from typing import NamedTuple

import numpy as np

from dist_ens.data.source import Source
from dist_ens.data.spec import Spec, Standardization
from dist_ens.data.splits import ArraySplit
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import held_dtype, narrowed


class Examples(NamedTuple):
    """Inputs [splits, rows, ...] and real targets [splits, rows] of all splits of a data set."""

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
    targets = _scaled(f"{name}, targets", train.targets[..., None], test.targets[..., None])
    if not targets.varies.all():
        raise UserError(
            f"{name}: the target is constant in the training rows of split "
            f"{np.argmin(targets.varies)}. Check that it is the target, or leave the split out."
        )
    if len(shape) == 1:
        features = _scaled(f"{name}, inputs", train.inputs, test.inputs)
        inputs, mean, std = features.parts, features.mean.tolist(), features.std.tolist()
    else:
        held = held_dtype(train.inputs.dtype)
        inputs = [
            narrowed(part.inputs.reshape(-1, *shape), held, f"{name}, inputs")
            for part in (train, test)
        ]
        mean = std = [[]] * num_splits
    standardization = Standardization(
        input_mean=tuple(map(tuple, mean)),
        input_std=tuple(map(tuple, std)),
        target_mean=tuple(targets.mean[:, 0].tolist()),
        target_std=tuple(targets.std[:, 0].tolist()),
    )
    spec = Spec(tuple(shape), inputs[0].dtype.name, (), None, num_splits, standardization)
    train_split, test_split = (
        ArraySplit(x, y[:, 0]) for x, y in zip(inputs, targets.parts, strict=True)
    )
    return Source(spec, train=train_split, test=test_split)


class _Scaled(NamedTuple):
    """Training and test rows, float32[splits * rows, columns], and what they were scaled by.

    Mean, standard deviation and `varies` are [splits, columns]. A constant column does not vary,
    and has the deviation 1.
    """

    parts: list[np.ndarray]
    mean: np.ndarray
    std: np.ndarray
    varies: np.ndarray


def _scaled(where: str, train: np.ndarray, test: np.ndarray) -> _Scaled:
    """Standardises columns [splits, rows, columns] as scikit-learn's `StandardScaler` does."""
    train, test = train.astype(np.float64, copy=False), test.astype(np.float64, copy=False)
    mean, variance = train.mean(axis=1), train.var(axis=1)
    # The deviation of a constant column is a rounding error, which must not be a divisor.
    num_rows, eps = train.shape[1], np.finfo(np.float64).eps
    varies = variance > num_rows * eps * variance + (num_rows * mean * eps) ** 2
    std = np.where(varies, np.sqrt(variance), 1.0)
    parts = [
        narrowed(
            (rows - mean[:, None]) / std[:, None],
            np.float32,
            f"{where}, standardised, [split, row, column]",
        ).reshape(-1, train.shape[2])
        for rows in (train, test)
    ]
    return _Scaled(parts, mean, std, varies)
