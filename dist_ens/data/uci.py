"""A source of tables with real targets and several splits, as in the UCI benchmarks."""

import math

import numpy as np

from dist_ens.array_files import StoredArray, opened_npz, require_memory
from dist_ens.data.source import Source
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.errors import UserError
from dist_ens.narrowing import narrowed
from dist_ens.paths import given_path, shortened

_NAME = "uci:FILE"
# All splits are in memory in four forms: original, sorted, standardised, and as float32.
_COPIES = 4

# The arrays of a file, and the kinds of NumPy types that each of them may have.
_KINDS = {
    "data": "iuf",
    "index_features": "iu",
    "index_target": "iu",
    "train_idx": "iu",
    "test_idx": "iu",
}


def open_uci(file: str) -> Source:
    """Opens a table with several splits into training and test rows. Each split is a group.

    Features and target are standardised: they have mean 0 and standard deviation 1 in the training
    rows of the split. A feature that is constant there is only centred, as scikit-learn's
    `StandardScaler` does. `Spec.standardization` holds the means and standard deviations.

    Args:
        file: Path of an `.npz` file. It holds `data` [rows, columns], `index_features`
            int[features] and `index_target` int[]. `train_idx` int[splits, train] and `test_idx`
            int[splits, test] hold the rows of each split.

    Returns:
        The source, in float32, with one group for each split. Its notes name the features that are
        constant or almost constant in training, and those with test rows far from the mean.

    Raises:
        UserError: If the file cannot be read or lacks an array, or splits are not equally long.
            Also if a row or column is not in the table, or a row is in both parts of a split. Also
            if a number is not finite, or the target is constant.

    Source: Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336.
    """
    where = f"uci:{shortened(str(given_path(file, _NAME)))}"
    data, features, target, train_rows, test_rows = _read(file, where)
    _check_values(where, data, features, target, train_rows, test_rows)
    inputs, targets = data[:, features], data[:, int(target.item())]
    train, test = (
        Examples(inputs[rows], targets[rows], part)
        for rows, part in ((train_rows, "train_idx"), (test_rows, "test_idx"))
    )
    return standardized_source(where, train, test, features.tolist())


def _check_headers(
    where: str,
    data: StoredArray,
    features: StoredArray,
    target: StoredArray,
    train_rows: StoredArray,
    test_rows: StoredArray,
) -> None:
    """Raises a `UserError` unless the shapes and types of a file's arrays are those of a table."""
    for key, rows in (("train_idx", train_rows), ("test_idx", test_rows)):
        if rows.dtype.kind == "O":
            raise UserError(
                f"{where}: {key} holds Python objects, as NumPy makes of splits of unequal length. "
                "All splits must have equally many training rows, and equally many test rows. Cut "
                "each to the shortest, numpy.stack([rows[:shortest] for rows in splits]), or save "
                "a file for each split."
            )
    arrays = (data, features, target, train_rows, test_rows)
    for (key, kinds), array in zip(_KINDS.items(), arrays, strict=True):
        array.require_numbers()
        if array.dtype.kind not in kinds:
            raise UserError(
                f"{where}: {key} has the type {array.dtype}. Convert data to integers or floats, "
                "and columns and rows to integers."
            )
    shapes = [list(array.shape) for array in arrays]
    if len(data.shape) != 2 or len(features.shape) != 1 or math.prod(target.shape) != 1:
        raise UserError(
            f"{where}: data, index_features and index_target have the shapes {shapes[0]}, "
            f"{shapes[1]} and {shapes[2]}, not [rows, columns], [features] and []. Save them in "
            "these shapes."
        )
    if not features.shape[0]:
        raise UserError(f"{where}: index_features is empty. Name at least one column in it.")
    if len(train_rows.shape) != 2 or len(test_rows.shape) != 2 or shapes[3][0] != shapes[4][0]:
        raise UserError(
            f"{where}: train_idx and test_idx have the shapes {shapes[3]} and {shapes[4]}, not "
            "[splits, rows] with equally many splits. Save them in these shapes, one split as one "
            "row."
        )
    if not math.prod(train_rows.shape) or not math.prod(test_rows.shape):
        raise UserError(
            f"{where}: train_idx and test_idx have the shapes {shapes[3]} and {shapes[4]}, and one "
            "of them has no rows. Give each part of each split at least one row."
        )


def _check_values(
    where: str,
    data: np.ndarray,
    features: np.ndarray,
    target: np.ndarray,
    train_rows: np.ndarray,
    test_rows: np.ndarray,
) -> None:
    """Raises a `UserError` unless the splits name rows and columns of a table of finite numbers."""
    for name, indices, length in (
        ("index_features", features, data.shape[1]),
        ("index_target", target, data.shape[1]),
        ("train_idx", train_rows, data.shape[0]),
        ("test_idx", test_rows, data.shape[0]),
    ):
        outside = indices[(indices < 0) | (indices >= length)]
        if outside.size:
            raise UserError(
                f"{where}: {name} has {outside.ravel()[0]}, and the table has 0 to {length - 1}. "
                "Correct it; the first row and the first column are 0."
            )
    if int(target.item()) in features:
        raise UserError(
            f"{where}: column {int(target.item())} is both the target and a feature. Take it out "
            "of index_features."
        )
    for number, (train, test) in enumerate(zip(train_rows, test_rows, strict=True)):
        both = np.intersect1d(train, test)
        if len(both):
            raise UserError(
                f"{where}: row {both[0]} is in both parts of split {number}; {len(both):,} in all. "
                "Correct train_idx or test_idx."
            )
    bad = ~np.isfinite(data)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise UserError(
            f"{where}: the value in row {row}, column {column} is {data[row, column]}; "
            f"{np.count_nonzero(bad):,} values are not finite. Remove or replace them."
        )


def _read(file: str, where: str) -> list[np.ndarray]:
    """Reads the arrays of a file in the order of `_KINDS`, as float64 and int64."""
    with opened_npz(given_path(file, _NAME), tuple(_KINDS), _NAME) as arrays:
        _check_headers(where, *arrays)
        data, features, _, train_rows, test_rows = arrays
        rows = math.prod(train_rows.shape) + math.prod(test_rows.shape)
        copies = _COPIES * rows * (features.shape[0] + 1) * np.dtype(np.float64).itemsize
        stored = sum(array.num_bytes for array in arrays) + math.prod(data.shape) * 8
        require_memory(stored + copies, where)
        return [
            narrowed(
                array.read(),
                np.float64 if key == "data" else np.int64,
                f"{where}, {key}",
                exact=True,
            )
            for key, array in zip(_KINDS, arrays, strict=True)
        ]
