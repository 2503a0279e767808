"""A source of arrays in memory."""

from collections.abc import Sequence

import numpy as np

from dist_ens.data.checks import (
    check_alike,
    check_finite,
    check_headers,
    check_label_forms,
    check_labels,
    count_classes,
)
from dist_ens.data.class_names import are_names, class_numbers, listed, names_in
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
        train: Inputs [examples, ...] and labels [examples] of the training split: class numbers
            (int), names of classes (text), or real targets (float). Targets are not standardised.
        test: Inputs and labels of the test split.
        num_classes: Number of classes. None counts those of the training labels, which must all be
            present. Classes with names are numbered in the order of their sorted names.
        name: Name of the source in error messages.

    Returns:
        The source.

    Raises:
        UserError: If a split is empty, or inputs and labels have different lengths. Also if inputs
            are not finite numbers or do not fit in 32 bits, labels are not integers in range or
            finite targets, or the test split has a class that the training split lacks.

    >>> train = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    >>> source = source_of_arrays(train, (np.ones((2, 2)), np.array([1, 0])))
    >>> source.num_train_examples, source.spec.num_classes, source.spec.input_dtype
    (4, 2, 'float32')
    """
    pairs = {
        split: (
            _array(f"{name}, split {split}, inputs", inputs),
            _array(f"{name}, split {split}, labels", labels, or_text=True),
        )
        for split, (inputs, labels) in (("train", train), ("test", test))
    }
    for split, (inputs, labels) in pairs.items():
        check_headers(f"{name}, split {split}", inputs, labels)
    check_alike(name, pairs["train"][0], pairs["test"][0])
    labels = pairs["train"][1]
    check_label_forms(name, labels, pairs["test"][1])
    names = names_in(labels, f"{name}, split train, labels") if are_names(labels) else None
    train_split, test_split = (
        checked_split(f"{name}, split {split}", *pair, names) for split, pair in pairs.items()
    )
    classes = classes_of(f"{name}, split train", train_split.labels, num_classes, names)
    for split, each in zip(pairs, (train_split, test_split), strict=True):
        if classes is None:
            check_finite(f"{name}, split {split}, labels", each.labels)
        else:
            check_labels(f"{name}, split {split}", each.labels, classes)
    inputs = train_split.inputs
    return Source(
        Spec(inputs.shape[1:], inputs.dtype.name, (), classes, class_names=names),
        train=train_split,
        test=test_split,
        notes=notes_on_digits(pairs["train"][0]),
    )


def classes_of(
    where: str, labels: np.ndarray, num_classes: int | None, names: Sequence[str] | None
) -> int | None:
    """Returns the number of classes of training labels; None for real targets.

    Args:
        where: Name of the split in error messages.
        labels: Class numbers, int[examples], or real targets, float[examples].
        num_classes: Number of classes that was given. None counts those of the labels.
        names: Names of the classes; None if they have none.

    Raises:
        UserError: If the number that was given does not fit the labels, or a class does not occur.
    """
    if labels.dtype.kind == "f":
        if num_classes is not None:
            raise UserError(
                f"{where} has real targets, and data.num_classes={num_classes} was given. Leave "
                "it out, or convert the labels to class numbers with astype(int)."
            )
        return None
    if names is None:
        return num_classes or count_classes(where, labels)
    if num_classes not in (None, len(names)):
        raise UserError(
            f"{where} has the {len(names)} classes {listed(names)}, and "
            f"data.num_classes={num_classes} was given. Leave it out."
        )
    return len(names)


def checked_split(
    where: str, inputs: np.ndarray, labels: np.ndarray, names: Sequence[str] | None = None
) -> ArraySplit:
    """Returns a split of plain arrays, in the types in which JAX holds them.

    Args:
        where: Name of the split in error messages.
        inputs: Inputs, [examples, ...].
        labels: Class numbers, names of classes or real targets, [examples] or [examples, 1].
        names: Names of the classes of the training split; None if they have none.

    Raises:
        UserError: If the arrays cannot be a split, or a value does not fit in 32 bits.
    """
    check_headers(where, inputs, labels)
    check_finite(where, inputs)
    if names is not None:
        labels = class_numbers(labels, names, f"{where}, labels")
    to = np.float32 if labels.dtype.kind == "f" else np.int32
    return ArraySplit(
        narrowed(inputs, held_dtype(inputs.dtype), f"{where}, inputs"),
        narrowed(labels.reshape(-1), to, f"{where}, labels"),
    )


def _array(where: str, values: object, *, or_text: bool = False) -> np.ndarray:
    """Converts a value that a person gave to an array. Raises a `UserError` if it is none."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # NumPy raises it for lists of unequal length.
        raise UserError(
            f"{where} cannot be converted to an array: {first_line(error)} Make its rows equally "
            "long."
        ) from error
    known = "biufU" if or_text else "biuf"
    if array.dtype.kind not in known and not isinstance(values, np.ndarray):
        raise UserError(
            f"{where} is {kind_of(values)}, which NumPy converts to {array.dtype}"
            f"{list(array.shape)} and not to numbers. Give an array of numbers. Read an iterator "
            "or a loader into an array first."
        )
    return array
