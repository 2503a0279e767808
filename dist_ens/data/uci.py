"""A source of tables with real targets and several splits, as in the UCI benchmarks."""

import numpy as np

from dist_ens.data.npz import read_npz
from dist_ens.data.source import Source
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.ground.errors import UserError
from dist_ens.ground.finite import check_finite
from dist_ens.ground.narrowing import narrowed
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
        UserError: If the file cannot be read or lacks an array, or a row or column is not in the
            table. Also if a row is in both parts of a split, a number is not finite, or the target
            is constant.

    Source: Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336.
    """
    path = given_path(file, "uci:FILE")
    name = f"uci:{shortened(str(path))}"
    data, features, target, train_rows, test_rows = read_npz(path, name, _KEYS)
    train_rows, test_rows = np.atleast_2d(train_rows, test_rows)
    data = narrowed(data, np.float64, f"{name}, data", exact=True)
    check_finite(f"{name}, data", data)
    column = int(target.item())
    rows, columns = data.shape
    for key, indices, length in (
        ("index_features", features, columns),
        ("index_target", target, columns),
        ("train_idx", train_rows, rows),
        ("test_idx", test_rows, rows),
    ):
        # NumPy would count a negative index from the end.
        if not indices.size or indices.min() < 0 or indices.max() >= length:
            raise UserError(
                f"{name}: {key} is empty or has indices outside the table, which has 0 to "
                f"{length - 1}: {shortened(str(indices.tolist()))}. Correct it."
            )
    if column in features:
        raise UserError(
            f"{name}: column {column} is both the target and a feature. Take it out of "
            "index_features."
        )
    for number, parts in enumerate(zip(train_rows, test_rows, strict=True)):
        if (both := np.intersect1d(*parts)).size:
            raise UserError(
                f"{name}: row {both[0]} is in both parts of split {number}; {both.size:,} in all. "
                "Correct train_idx or test_idx."
            )
    inputs, targets = data[:, features], data[:, column]
    train, test = (Examples(inputs[rows], targets[rows]) for rows in (train_rows, test_rows))
    return standardized_source(train, test, name)
