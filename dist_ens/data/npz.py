"""A source of .npz files."""

import contextlib
from collections.abc import Iterator

import numpy as np

from dist_ens.array_files import names_in_npz, opened_npz, require_memory
from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.checks import check_finite
from dist_ens.data.class_names import are_names
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.data.stored import StoredSplit, describe_stored, source_of_stored
from dist_ens.paths import given_path, shortened

# The names of the arrays, of which a file has those of one line. Without a test split of its own,
# a part of the examples becomes it.
_KEYS = (
    ("x", "y"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_NAME = "npz:FILE"
_TEST_EVERY = 5  # One of so many examples is a test example.
_COPIES = 4  # Inputs and targets are in memory as stored, in float64, and standardised twice.


def open_npz(file: str, num_classes: int | None) -> Source:
    """Opens an .npz file with inputs and labels.

    Its arrays are `x` and `y`, of which a fifth become the test split; or `x_train`, `y_train`,
    `x_test` and `y_test`; or `train_images`, `train_labels`, `test_images` and `test_labels`.

    Labels [examples] or [examples, 1] are class numbers (int), names of classes (text) or real
    targets (float). Real targets are standardised, and so are the features of a table, inputs
    [examples, features], beside them; see `standardized_source`.

    Args:
        file: Path of the file.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source.

    Raises:
        UserError: If the file cannot be read, lacks one of the arrays, or has another length than
            its headers declare. Also if the arrays cannot be used.
    """
    with _stored(file) as splits:
        first = splits[0]
        if len(splits) == 2 and first.labels.dtype.kind != "f":
            return source_of_stored(first, splits[1], num_classes)
        require_memory(_COPIES * sum(split.num_bytes for split in splits), first.name)
        arrays = [split.arrays() for split in splits]
    if len(arrays) == 1:
        # The messages give the rows of the file, and not those of a part.
        for part, array in zip(("inputs", "labels"), arrays[0], strict=True):
            check_finite(f"{first.where}, {part}", array)
        arrays = _divided(*arrays[0])
    train, test = arrays
    source = source_of_arrays(train, test, num_classes=num_classes, name=first.name)
    if source.spec.num_classes is not None:
        return source
    return standardized_source(
        first.name,
        _examples(*train, "train"),
        _examples(*test, "test"),
        range(first.inputs.shape[-1]),
    )


def describe_npz(file: str, num_classes: int | None) -> tuple[Spec, int]:
    """Describes the source that `open_npz` returns.

    Only the headers are read if the file has a test split and the labels are classes.

    Args:
        file: Path of the file.
        num_classes: Number of classes. None reads the training labels and counts them.

    Returns:
        Description of the examples, and the number of training examples.

    Raises:
        UserError: If a header or the training labels cannot be used.
    """
    with _stored(file) as splits:
        if len(splits) == 2 and splits[0].labels.dtype.kind != "f":
            return describe_stored(splits[0], splits[1], num_classes)
    source = open_npz(file, num_classes)
    return source.spec, source.num_train_examples


@contextlib.contextmanager
def _stored(file: str) -> Iterator[list[StoredSplit]]:
    """Opens a file as a context manager, and reads the headers of its two splits, or of one."""
    path = given_path(file, _NAME)
    there = {*names_in_npz(path, _NAME)}
    keys = max(_KEYS, key=lambda names: len(there.intersection(names)))
    with opened_npz(path, keys, _NAME) as arrays:
        name = f"npz:{shortened(str(path))}"
        names = ("train", "test") if len(arrays) > 2 else ("x and y",)
        yield [
            StoredSplit(name, split, *arrays[2 * at : 2 * at + 2]) for at, split in enumerate(names)
        ]


def _divided(inputs: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns training and test examples: a random fifth is held out, of classes a fifth of each.

    The choice is the same each time.
    """
    order = np.random.RandomState(0).permutation(len(labels))
    place = np.arange(len(labels))
    if labels.dtype.kind != "f":
        of_order = labels.reshape(len(labels))[order]
        if are_names(of_order):
            of_order = np.unique(of_order, return_inverse=True)[1]
        by_class = np.argsort(of_order, kind="stable")
        order, of_order = order[by_class], of_order[by_class]
        place = place - np.searchsorted(of_order, of_order)  # among the examples of the class
    is_test = place % _TEST_EVERY == _TEST_EVERY - 1
    test, train = np.sort(order[is_test]), np.sort(order[~is_test])
    return [(inputs[train], labels[train]), (inputs[test], labels[test])]


def _examples(inputs: np.ndarray, targets: np.ndarray, name: str) -> Examples:
    """Returns the examples of a part as one split; the features of a table in float64."""
    inputs = inputs.astype(np.float64) if inputs.ndim == 2 else inputs
    return Examples(inputs[None], targets.reshape(1, -1).astype(np.float64), name)
