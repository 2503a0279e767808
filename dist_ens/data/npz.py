"""A source of .npz files."""

import pathlib
from collections.abc import Sequence

import numpy as np

from dist_ens.data.arrays import examples_in, source_of_arrays
from dist_ens.data.class_names import are_names
from dist_ens.data.source import Source
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_reading import explained_reading, opened_to_read
from dist_ens.ground.paths import given_path, shortened

# The names of the arrays, of which a file has those of one line. Without a test split of its own,
# a part of the examples becomes it.
_KEYS = (
    ("x", "y"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_TEST_EVERY = 5  # One of so many examples is a test example.
_ADVICE = (
    "Correct the path, or write the file again with numpy.savez: rows of equal length, numbers as "
    "numbers, and text with astype(str)."
)


def open_npz(file: str, num_classes: int | None = None) -> Source:
    """Opens an .npz file with inputs and labels.

    Its arrays are `x` and `y`, of which a fifth become the test split; or `x_train`, `y_train`,
    `x_test` and `y_test`; or `train_images`, `train_labels`, `test_images` and `test_labels`.

    Labels [examples] or [examples, 1] are class numbers (int), names of classes (text) or real
    targets (float). Several columns [examples, targets] are real targets (float), or labels that
    are 0 or 1 (int or bool). Real targets are standardised, and so are the features of a table,
    inputs [examples, features], beside them; see `source_of_arrays`.

    Args:
        file: Path of the file.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source.

    Raises:
        UserError: If the file cannot be read or lacks one of the arrays, or the arrays cannot be
            used.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", x=np.ones((20, 3)), y=np.array(["cat", "dog"] * 10))
    ...     source = open_npz(f"{folder}/a.npz")
    >>> len(source.train), len(source.test), source.spec.class_names
    (16, 4, ('cat', 'dog'))
    """
    path = given_path(file, "npz:FILE")
    name = f"npz:{shortened(str(path))}"
    arrays = read_npz(path, name, *_KEYS)
    if len(arrays) == 2:
        # The examples are checked before they are divided: messages give the rows of the file.
        arrays = _divided(*examples_in(name, *arrays))
    x, y, x_test, y_test = arrays
    return source_of_arrays(
        (x, y), (x_test, y_test), num_classes=num_classes, standardize=True, name=name
    )


def read_npz(path: pathlib.Path, name: str, *alternatives: Sequence[str]) -> list[np.ndarray]:
    """Reads the arrays of an .npz file with the names of that alternative which the file has."""
    with (
        explained_reading(name, _ADVICE),
        opened_to_read(path) as file,
        np.lib.npyio.NpzFile(file) as arrays,
    ):
        keys = max(alternatives, key=lambda names: len({*names} & {*arrays}))
        if missing := [key for key in keys if key not in arrays]:
            raise UserError(
                f"{name} lacks {', '.join(missing)}. It has {shortened(', '.join(arrays))}. "
                f"Save it again with {', '.join(keys)}."
            )
        return [arrays[key] for key in keys]


def _divided(inputs: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Returns inputs and labels of the training split and of a random fifth, the test split.

    A fifth of each class is held out if an example has one class. The choice is the same each time.
    """
    order = np.random.RandomState(0).permutation(len(labels))
    place = np.arange(len(labels))
    if labels.dtype.kind != "f" and labels.ndim == 1:
        of_order = labels[order]
        if are_names(of_order):
            of_order = np.unique(of_order, return_inverse=True)[1]
        by_class = np.argsort(of_order, kind="stable")
        order, of_order = order[by_class], of_order[by_class]
        place = place - np.searchsorted(of_order, of_order)  # among the examples of the class
    is_test = place % _TEST_EVERY == _TEST_EVERY - 1
    train, test = np.sort(order[~is_test]), np.sort(order[is_test])
    return [inputs[train], labels[train], inputs[test], labels[test]]
