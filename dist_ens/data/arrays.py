"""A source of arrays in memory."""

from collections.abc import Sequence
from itertools import starmap

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
            (int), names of classes (text), or real targets (float). Several targets of an example
            are real targets (float) or labels that are 0 or 1 (int or bool), [examples, targets].
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
    where = f"{name}, split train", f"{name}, split test"
    examples = [examples_in(at, *pair) for at, pair in zip(where, (train, test), strict=True)]
    forms = [_form(*each) for each in examples]
    if forms[0] != forms[1]:
        raise UserError(
            f"{name} has training examples of {forms[0]} and test examples of {forms[1]}. Give "
            "both the same."
        )
    _, labels = examples[0]
    if labels.dtype.kind != "f" and labels.ndim == 1:
        return _source_of_classes(where, examples, num_classes)
    if num_classes is not None:
        raise UserError(f"{where[0]} has {_kind(labels)}. Leave num_classes={num_classes} out.")
    if labels.dtype.kind != "f":
        return _source_of_targets([(x, y.astype(np.int32)) for x, y in examples], 2)
    if standardize:
        rows, test_rows = (Examples(x[None], y[None]) for x, y in examples)
        return standardized_source(rows, test_rows, name)
    return _source_of_targets(examples, None)


def _source_of_targets(
    examples: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int | None
) -> Source:
    """Returns a source of two splits whose labels are one target or several, [examples, ...]."""
    (inputs, labels), _ = examples
    shape, num_targets = labels.shape[1:], next(iter(labels.shape[1:]), None)
    spec = Spec(inputs.shape[1:], inputs.dtype.name, shape, num_classes, num_targets=num_targets)
    return Source(spec, *starmap(ArraySplit, examples))


def _source_of_classes(
    where: Sequence[str],
    examples: Sequence[tuple[np.ndarray, np.ndarray]],
    num_classes: int | None,
) -> Source:
    """Returns a source of two splits whose labels are numbers or names of classes."""
    (inputs, labels), _ = examples
    names = names_in(labels, f"{where[0]}, labels") if are_names(labels) else None
    count = len(names) if names else num_classes or count_classes(where[0], labels)
    if names and num_classes not in (None, count):
        raise UserError(
            f"{where[0]} has the classes {listed(names)}. Leave num_classes={num_classes} out."
        )
    splits = []
    for at, (x, y) in zip(where, examples, strict=True):
        splits.append(ArraySplit(x, class_numbers(y, names, f"{at}, labels") if names else y))
    for at, split in zip(where, splits, strict=True):
        check_labels(at, split.labels, count)
    return Source(Spec(inputs.shape[1:], inputs.dtype.name, (), count, class_names=names), *splits)


def examples_in(where: str, inputs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and labels of a split as arrays, which are checked.

    Labels are [examples], or [examples, targets] for several targets.
    """
    try:
        inputs, labels = np.asarray(inputs), np.asarray(labels)
    except ValueError as error:  # NumPy raises it for lists of unequal length.
        raise UserError(f"{where}: {first_line(error)} Make its rows equally long.") from error
    check_numbers(where, inputs)
    are_several = _are_several(labels) and len(labels) == len(inputs)
    is_one = labels.shape in ((len(inputs),), (len(inputs), 1)) and labels.dtype.kind in "iufOSTU"
    if not (is_one or are_several):
        raise UserError(
            f"{where} has {len(inputs)} inputs and labels {labels.dtype}{list(labels.shape)}. Give "
            "one label for each example: a class number (int), the name of a class (text), or a "
            "real target (float). Several targets of an example are columns of float, or of 0 and "
            "1 (int). Convert one-hot rows to class numbers with argmax(axis=1)."
        )
    check_finite(f"{where}, labels", labels)
    if are_several and labels.dtype.kind != "f" and not np.isin(labels, (0, 1)).all():
        raise UserError(
            f"{where} has whole numbers from {labels.min()} to {labels.max()} in "
            f"{labels.shape[1]} columns of labels. Labels of several columns are 0 or 1 each. Save "
            "real targets as floats."
        )
    return inputs, labels if are_several else labels.reshape(-1)


def _are_several(labels: np.ndarray) -> bool:
    """Returns whether labels have several columns, and are no one-hot rows of floats."""
    if labels.ndim != 2 or labels.shape[1] < 2 or labels.dtype.kind not in "iubf":
        return False
    is_one_hot = np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()
    return labels.dtype.kind != "f" or not is_one_hot


def _form(inputs: np.ndarray, labels: np.ndarray) -> str:
    """Returns the shape and type of an input, and the kind of the labels, in words."""
    return f"{held_dtype(inputs.dtype)}{list(inputs.shape[1:])} and {_kind(labels)}"


def _kind(labels: np.ndarray) -> str:
    """Returns the kind of some labels in words."""
    kind = "real targets" if labels.dtype.kind == "f" else "class numbers"
    if labels.ndim == 2:
        each = "real targets" if labels.dtype.kind == "f" else "labels that are 0 or 1"
        return f"{labels.shape[1]} {each} for each example"
    return "names of classes" if are_names(labels) else kind
