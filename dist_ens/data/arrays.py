"""A source of arrays in memory."""

import numpy as np
from numpy.typing import ArrayLike

from dist_ens.data.checks import check_labels, check_numbers, count_classes
from dist_ens.data.class_names import are_names, class_numbers, listed, names_in
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.data.splits import ArraySplit
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.narrowing import check_finite, held_dtype


def source_of_arrays(
    train: tuple[ArrayLike, ArrayLike],
    test: tuple[ArrayLike, ArrayLike],
    *,
    num_classes: int | None = None,
    standardize: bool = False,
    name: str = "arrays",
) -> Source:
    """Returns a source of plain arrays, whose values are checked.

    Inputs are kept in the type in which JAX holds them: int64 becomes int32, and float64 becomes
    float32. A value that does not fit in that type is refused.

    Args:
        train: Inputs [examples, ...] and labels [examples] of the training split: class numbers
            (int), names of classes (text), or real targets (float).
        test: Inputs and labels of the test split.
        num_classes: Number of classes. None counts those of the training labels, which must all be
            present. Classes with names are numbered in the order of their sorted names.
        standardize: Whether real targets, and beside them the features of a table, are standardised
            by the training examples, as in a run from a config. Default: False.
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
    where = f"{name}, split train"
    (inputs, labels), (test_inputs, test_labels) = (
        examples_in(f"{name}, split {split}", *pair)
        for split, pair in (("train", train), ("test", test))
    )
    if _form(inputs, labels) != _form(test_inputs, test_labels):
        raise UserError(
            f"{name} has training examples of {_form(inputs, labels)} and test examples of "
            f"{_form(test_inputs, test_labels)}. Give both the same."
        )
    names = names_in(labels, f"{where}, labels") if are_names(labels) else None
    is_real = labels.dtype.kind == "f"
    count = len(names) if names else None
    if num_classes not in (None, count) and (names or is_real):
        kind = f"the classes {listed(names)}" if names else "real targets"
        raise UserError(f"{where} has {kind}. Leave num_classes={num_classes} out.")
    if is_real and standardize:
        train_rows, test_rows = (
            Examples(x[None], y[None]) for x, y in ((inputs, labels), (test_inputs, test_labels))
        )
        return standardized_source(train_rows, test_rows, name)
    if names:
        labels = class_numbers(labels, names, f"{where}, labels")
        test_labels = class_numbers(test_labels, names, f"{name}, split test, labels")
    elif not is_real:
        count = num_classes or count_classes(where, labels)
    splits = ArraySplit(inputs, labels), ArraySplit(test_inputs, test_labels)
    if count is not None:
        for split, each in zip(("train", "test"), splits, strict=True):
            check_labels(f"{name}, split {split}", each.labels, count)
    dtype = held_dtype(inputs.dtype).name
    return Source(Spec(inputs.shape[1:], dtype, (), count, class_names=names), *splits)


def examples_in(where: str, inputs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and labels of a split as arrays, which are checked, labels [examples]."""
    try:
        inputs, labels = np.asarray(inputs), np.asarray(labels)
    except ValueError as error:  # NumPy raises it for lists of unequal length.
        raise UserError(f"{where}: {first_line(error)} Make its rows equally long.") from error
    check_numbers(where, inputs)
    if labels.shape not in ((len(inputs),), (len(inputs), 1)) or labels.dtype.kind not in "iufOSTU":
        raise UserError(
            f"{where} has {len(inputs)} inputs and labels {labels.dtype}{list(labels.shape)}. Give "
            "one label for each example: a class number (int), the name of a class (text), or a "
            "real target (float)."
        )
    check_finite(f"{where}, labels", labels)
    return inputs, labels.reshape(-1)


def _form(inputs: np.ndarray, labels: np.ndarray) -> str:
    """Returns the shape and type of an input, and the kind of the labels, in words."""
    numbers = "real targets" if labels.dtype.kind == "f" else "class numbers"
    kind = "names of classes" if are_names(labels) else numbers
    return f"{held_dtype(inputs.dtype)}{list(inputs.shape[1:])} and {kind}"
