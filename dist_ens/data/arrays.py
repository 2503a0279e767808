"""A source of arrays in memory."""

import numpy as np

from dist_ens.data.checks import (
    check_alike,
    check_finite,
    check_headers,
    check_labels,
    count_classes,
)
from dist_ens.data.notes import notes_on_digits
from dist_ens.data.source import ArraySplit, Source
from dist_ens.data.spec import Spec
from dist_ens.errors import UserError, first_line, kind_of
from dist_ens.narrowing import held_dtype, narrowed


def source_of_arrays(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    num_classes: int | None = None,
    name: str = "arrays",
) -> Source:
    """Returns a source of plain arrays, after a check of their values.

    Inputs are kept in the type in which JAX holds them: int64 becomes int32, and float64 becomes
    float32. A value that does not fit in that type is refused.

    Args:
        train: Inputs [examples, ...] and labels int[examples] of the training split.
        test: Inputs and labels of the test split.
        num_classes: Number of classes. None counts those of the training labels, which must all be
            present.
        name: Name of the source in error messages.

    Returns:
        The source.

    Raises:
        UserError: If a split is empty, or inputs and labels have different lengths. Also if inputs
            are not finite numbers or do not fit in 32 bits, or labels are not integers in range.

    >>> train = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    >>> source = source_of_arrays(train, (np.ones((2, 2)), np.array([1, 0])))
    >>> source.num_train_examples, source.spec.num_classes, source.spec.input_dtype
    (4, 2, 'float32')
    """
    pairs = {
        split: (
            _array(f"{name}, split {split}, inputs", inputs),
            _array(f"{name}, split {split}, labels", labels),
        )
        for split, (inputs, labels) in (("train", train), ("test", test))
    }
    for split, (inputs, labels) in pairs.items():
        check_headers(f"{name}, split {split}", inputs, labels)
    check_alike(name, pairs["train"][0], pairs["test"][0])
    train_split, test_split = (
        checked_split(f"{name}, split {split}", *pair) for split, pair in pairs.items()
    )
    classes = num_classes or count_classes(f"{name}, split train", train_split.labels)
    for split, each in zip(pairs, (train_split, test_split), strict=True):
        check_labels(f"{name}, split {split}", each.labels, classes)
    inputs = train_split.inputs
    return Source(
        Spec(inputs.shape[1:], inputs.dtype.name, (), classes),
        train=train_split,
        test=test_split,
        notes=notes_on_digits(pairs["train"][0]),
    )


def checked_split(where: str, inputs: np.ndarray, labels: np.ndarray) -> ArraySplit:
    """Returns a split of plain arrays, in the types in which JAX holds them.

    Args:
        where: Name of the split in error messages.
        inputs: Inputs, [examples, ...].
        labels: Class numbers, int[examples].

    Raises:
        UserError: If the arrays cannot be a split, or a value does not fit in 32 bits.
    """
    check_headers(where, inputs, labels)
    check_finite(where, inputs)
    return ArraySplit(
        narrowed(inputs, held_dtype(inputs.dtype), f"{where}, inputs"),
        narrowed(labels, np.int32, f"{where}, labels"),
    )


def _array(where: str, values: object) -> np.ndarray:
    """Converts a value that a person gave to an array. Raises a `UserError` if it is none."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # NumPy raises it for lists of unequal length.
        raise UserError(
            f"{where} cannot be converted to an array: {first_line(error)} Make its rows equally "
            "long."
        ) from error
    if array.dtype.kind not in "biuf" and not isinstance(values, np.ndarray):
        raise UserError(
            f"{where} is {kind_of(values)}, which NumPy converts to {array.dtype}"
            f"{list(array.shape)} and not to numbers. Give an array of numbers. Read an iterator "
            "or a loader into an array first."
        )
    return array
