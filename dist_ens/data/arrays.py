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
from dist_ens.ground.finite import check_finite
from dist_ens.ground.narrowing import held_dtype, narrowed


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
        checked_arrays(f"{name}, split {split}", *pair)
        for split, pair in (("train", train), ("test", test))
    )
    if _form(inputs, labels) != _form(test_inputs, test_labels):
        raise UserError(
            f"{name} has training examples of {_form(inputs, labels)} and test examples of "
            f"{_form(test_inputs, test_labels)}. Give both the same."
        )
    names = None
    if are_names(labels):
        names = names_in(labels, f"{where}, labels")
        if num_classes not in (None, len(names)):
            raise UserError(
                f"{where} has the {len(names)} classes {listed(names)}. Leave "
                f"num_classes={num_classes} out."
            )
        num_classes = len(names)
    elif labels.dtype.kind != "f":
        num_classes = num_classes or count_classes(where, labels)
    elif num_classes is not None:
        raise UserError(f"{where} has real targets. Leave num_classes={num_classes} out.")
    elif standardize:
        return standardized_source(
            Examples(inputs[None], labels[None]),
            Examples(test_inputs[None], test_labels[None]),
            name,
        )
    splits = [split_of(where, inputs, labels, names)]
    splits.append(split_of(f"{name}, split test", test_inputs, test_labels, names))
    if num_classes is not None:
        for split, each in zip(("train", "test"), splits, strict=True):
            check_labels(f"{name}, split {split}", each.labels, num_classes)
    dtype = held_dtype(inputs.dtype).name
    return Source(Spec(inputs.shape[1:], dtype, (), num_classes, class_names=names), *splits)


def checked_arrays(
    where: str, inputs: ArrayLike, labels: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels of a split as arrays that are checked, with labels [examples]."""
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


def split_of(
    where: str, inputs: np.ndarray, labels: np.ndarray, names: tuple[str, ...] | None = None
) -> ArraySplit:
    """Returns a split of arrays from `checked_arrays`, in the types in which JAX holds them.

    Labels that are text become numbers by the sorted names of the training split's classes.
    """
    if names is not None:
        labels = class_numbers(labels, names, f"{where}, labels")
    to = np.float32 if labels.dtype.kind == "f" else np.int32
    return ArraySplit(
        narrowed(inputs, held_dtype(inputs.dtype), f"{where}, inputs"),
        narrowed(labels, to, f"{where}, labels"),
    )


def _form(inputs: np.ndarray, labels: np.ndarray) -> str:
    """Returns the shape and type of an input, and the kind of the labels, in words."""
    numbers = "real targets" if labels.dtype.kind == "f" else "class numbers"
    kind = "names of classes" if are_names(labels) else numbers
    return f"{held_dtype(inputs.dtype)}{list(inputs.shape[1:])} and {kind}"
