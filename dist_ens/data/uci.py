"""Tables with real targets, in splits for training and test: the protocol of the UCI benchmarks."""

import pathlib

import numpy as np

from dist_ens.data.npz import opened_npz
from dist_ens.data.source import ArraySplit, Source, Spec, Standardization
from dist_ens.errors import UserError

# The arrays of a file, and the kinds of NumPy types that each may have.
_KINDS = {
    "data": "iuf",
    "index_features": "iu",
    "index_target": "iu",
    "train_idx": "iu",
    "test_idx": "iu",
}


def open_uci(file: str) -> Source:
    """A table and its splits, each one a group with a training and a test set of its own.

    Features and target are standardised on the split's training rows: what a member is given has
    mean 0 and standard deviation 1 there. `Spec.standardization` leads back to their own units.

    Args:
        file: An `.npz` file with `data` [rows, columns], `index_features` int[features],
            `index_target` int[], and the rows of each split, `train_idx` int[splits, train] and
            `test_idx` int[splits, test].

    Returns:
        The source, float32, as many groups as there are splits.

    Raises:
        UserError: For a file that cannot be read or lacks an array, a row or column that is not in
            the table, a row in both parts of a split, a number that is not finite, or a target that
            does not vary.

    Source: Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336, whose splits are in
    use since.
    """
    path = pathlib.Path(file).expanduser()
    where = f"uci:{path}"
    arrays = _read(path)
    data = arrays["data"]
    features, target = arrays["index_features"], arrays["index_target"]
    train_rows, test_rows = arrays["train_idx"], arrays["test_idx"]
    _check(where, data, features, target, train_rows, test_rows)

    inputs, targets = data[:, features], data[:, int(target.item())]
    input_mean, input_std = _moments(inputs[train_rows])
    target_mean, target_std = _moments(targets[train_rows])
    constant = np.flatnonzero(~_varies(targets[train_rows]))
    if len(constant):
        raise UserError(
            "A target varies over the training rows. Received: the same number in all of them, in "
            f"split {constant[0]} ({where}). Check index_target, or leave the split out."
        )

    def split(rows: np.ndarray) -> ArraySplit:
        standard_inputs = (inputs[rows] - input_mean[:, None]) / input_std[:, None]
        standard_targets = (targets[rows] - target_mean[:, None]) / target_std[:, None]
        return ArraySplit(
            standard_inputs.reshape(-1, len(features)).astype(np.float32),
            standard_targets.ravel().astype(np.float32),
        )

    standardization = Standardization(
        input_mean=tuple(map(tuple, input_mean.tolist())),
        input_std=tuple(map(tuple, input_std.tolist())),
        target_mean=tuple(target_mean.tolist()),
        target_std=tuple(target_std.tolist()),
    )
    spec = Spec((len(features),), "float32", (), None, len(train_rows), standardization)
    return Source(spec, train=split(train_rows), test=split(test_rows))


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the rows, [splits, rows, ...]; 1 where all are the same."""
    return values.mean(axis=1), np.where(_varies(values), values.std(axis=1), 1.0)


def _varies(values: np.ndarray) -> np.ndarray:
    """Whether values [splits, rows, ...] differ over the rows by more than by their rounding."""
    # What rounding makes of the deviation of a constant must not be divided by.
    return np.ptp(values, axis=1) > 1e-12 * np.abs(values).max(axis=1)


def _check(
    where: str,
    data: np.ndarray,
    features: np.ndarray,
    target: np.ndarray,
    train_rows: np.ndarray,
    test_rows: np.ndarray,
) -> None:
    if data.ndim != 2 or features.ndim != 1 or target.size != 1 or not len(features):
        raise UserError(
            "A table is data[rows, columns], index_features[features] and one index_target. "
            f"Received: shapes {list(data.shape)}, {list(features.shape)} and "
            f"{list(target.shape)} ({where}). Write the file again."
        )
    if train_rows.ndim != 2 or test_rows.ndim != 2 or len(train_rows) != len(test_rows):
        raise UserError(
            "Splits are train_idx[splits, rows] and test_idx[splits, rows]. Received: shapes "
            f"{list(train_rows.shape)} and {list(test_rows.shape)} ({where}). Write the file again."
        )
    if not train_rows.size or not test_rows.size:
        raise UserError(
            "Each part of a split holds at least one row. Received: shapes "
            f"{list(train_rows.shape)} and {list(test_rows.shape)} ({where}). Add rows."
        )
    for name, indices, length in (
        ("index_features", features, data.shape[1]),
        ("index_target", target, data.shape[1]),
        ("train_idx", train_rows, data.shape[0]),
        ("test_idx", test_rows, data.shape[0]),
    ):
        outside = indices[(indices < 0) | (indices >= length)]
        if outside.size:
            raise UserError(
                f"{name} names rows or columns of the table, 0 to {length - 1}. Received: "
                f"{outside.ravel()[0]} ({where}). Correct it; the first is 0."
            )
    if int(target.item()) in features:
        raise UserError(
            f"The target is no feature. Received: column {int(target.item())} as both ({where}). "
            "Take it out of index_features."
        )
    for number, (train, test) in enumerate(zip(train_rows, test_rows, strict=True)):
        both = np.intersect1d(train, test)
        if len(both):
            raise UserError(
                f"No row is in both parts of a split. Received: row {both[0]} in both parts of "
                f"split {number}, {len(both)} in all ({where}). Correct train_idx or test_idx."
            )
    bad = np.argwhere(~np.isfinite(data))
    if len(bad):
        raise UserError(
            f"Numbers of a table are finite. Received: {data[tuple(bad[0])]} in row {bad[0][0]}, "
            f"column {bad[0][1]}, {len(bad)} in all ({where}). Remove or fill them in."
        )


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file, as float64 and int64."""
    with opened_npz(path, tuple(_KINDS)) as archive:
        arrays = {key: archive[key] for key in _KINDS}
    for key, array in arrays.items():
        if array.dtype.kind not in _KINDS[key]:
            raise UserError(
                "A table's data are numbers, its columns and rows are named by integers. Received: "
                f"{key} of type {array.dtype} ({path}). Convert it."
            )
    return {
        key: array.astype(np.float64 if key == "data" else np.int64)
        for key, array in arrays.items()
    }
