"""A source of tables with real targets and several splits, as in the UCI benchmarks."""

import numpy as np

from dist_ens.data.npz import read_npz
from dist_ens.data.source import Source
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import check_finite, narrowed
from dist_ens.ground.paths import given_path, shortened

_KEYS = ("data", "index_features", "index_target", "train_idx", "test_idx")


def open_uci(file: str) -> Source:
    """Opens a table with several splits into training and test rows. Each split is a group.

    Features and target are standardised; see `standardized_source`.

    Args:
        file: Path of an `.npz` file. It holds `data` [rows, columns], `index_features`
            int[features] and `index_target` int[]. `train_idx` int[splits, train] and `test_idx`
            int[splits, test] hold the rows of each split, or int[train] and int[test] of one.

    Returns:
        The source, in float32, with one group for each split.

    Raises:
        UserError: If the file cannot be read or lacks an array, or a number is not finite. Also if
            a row or column is not in the table, the target is a feature or constant, or a row is in
            both parts of a split.

    >>> import tempfile
    >>> columns = {"index_features": [0, 1], "index_target": 2}
    >>> rows = {"train_idx": [[0, 1, 2], [1, 2, 3]], "test_idx": [[3], [0]]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", data=np.arange(12.0).reshape(4, 3), **columns, **rows)
    ...     source = open_uci(f"{folder}/a.npz")
    >>> source.spec.num_groups, source.num_train_examples
    (2, 3)

    Source: Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336.
    """
    path = given_path(file, "uci:FILE")
    name = f"uci:{shortened(str(path))}"
    data, features, target, train_rows, test_rows = read_npz(path, name, _KEYS)
    train_rows, test_rows = np.atleast_2d(train_rows, test_rows)
    data = narrowed(data, np.float64, f"{name}, data", exact=True)
    check_finite(f"{name}, data", data)
    indices = (features, target, train_rows, test_rows)
    dims = [data.ndim, features.ndim, target.size, train_rows.ndim, test_rows.ndim]
    is_filled = all(part.size for part in indices)
    if dims != [2, 1, 1, 2, 2] or len(train_rows) != len(test_rows) or not is_filled:
        given = zip(_KEYS, (data, *indices), strict=True)
        shapes = ", ".join(f"{key} {list(array.shape)}" for key, array in given)
        raise UserError(
            f"{name} has the shapes {shapes}. Save data [rows, columns], one target, at least one "
            "feature, and equally many splits [splits, rows] for training and testing, none empty."
        )
    lengths = (data.shape[1], data.shape[1], len(data), len(data))
    for key, part, length in zip(_KEYS[1:], indices, lengths, strict=True):
        if part.dtype.kind not in "iu":
            raise UserError(f"{name}: {key} has the type {part.dtype}. Convert it to integers.")
        if (outside := part[(part < 0) | (part >= length)]).size:
            has = f"{key} has {outside[0]}, and the table has 0 to {length - 1}"
            raise UserError(f"{name}: {has}. The first row and the first column are 0.")
    column = int(target.item())
    if column in features:
        raise UserError(f"{name}: column {column} is the target. Take it out of index_features.")
    for number, parts in enumerate(zip(train_rows, test_rows, strict=True)):
        if (both := np.intersect1d(*parts)).size:
            raise UserError(f"{name}: row {both[0]} is in both parts of split {number}.")
    inputs, targets = data[:, features], data[:, column]
    train, test = (Examples(inputs[rows], targets[rows]) for rows in (train_rows, test_rows))
    return standardized_source(train, test, name)
