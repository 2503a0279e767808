"""Checks of the shapes, types and values of examples and labels."""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data.class_names import are_names
from dist_ens.errors import UserError
from dist_ens.narrowing import first_index, held_dtype
from dist_ens.types import Inputs

_MOST_NAMED = 5  # Largest number of columns that a message names.


class Header(Protocol):
    """Shape and type of an array, in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """NumPy type of the values."""
        ...


def check_headers(where: str, inputs: Header, labels: Header) -> None:
    """Raises a `UserError` unless two arrays are numeric inputs and one label for each.

    Labels are class numbers, names of classes or real targets, [examples] or [examples, 1].

    Args:
        where: Name of the split in error messages.
        inputs: Shape and type of the inputs.
        labels: Shape and type of the labels.
    """
    check_numbers(where, inputs)
    if not labels.shape or inputs.shape[0] != labels.shape[0]:
        raise UserError(
            f"{where} has {inputs.shape[0]} inputs and labels of shape {list(labels.shape)}. Give "
            "each input one label."
        )
    if labels.shape[1:] not in ((), (1,)) or labels.dtype.kind not in "iufOSTU":
        raise UserError(
            f"{where} has labels {labels.dtype}{list(labels.shape)}. Give one label for each "
            "example: a class number (int), the name of a class (text), or a real target (float)."
        )


def check_numbers(where: str, inputs: Header) -> None:
    """Raises a `UserError` unless an array has at least one example and holds real numbers.

    Args:
        where: Name of the array in error messages.
        inputs: Shape and type of the array.
    """
    if not inputs.shape or not inputs.shape[0]:
        raise UserError(f"{where} has no examples: shape {list(inputs.shape)}. Add one or more.")
    if inputs.dtype.kind not in "biuf":
        raise UserError(
            f"{where} has inputs of type {inputs.dtype}, which holds no real numbers. Convert them "
            "to floats or integers."
        )


def check_alike(name: str, train: Header, test: Header) -> None:
    """Raises a `UserError` unless training and test inputs have the same shape and type.

    Args:
        name: Name of the source in error messages.
        train: Shape and type of the training inputs.
        test: Shape and type of the test inputs.
    """
    if train.shape[1:] != test.shape[1:] or held_dtype(train.dtype) != held_dtype(test.dtype):
        raise UserError(
            f"{name} has training examples {train.dtype}{list(train.shape[1:])} and test examples "
            f"{test.dtype}{list(test.shape[1:])}. Give both the same shape and type."
        )


def check_label_forms(name: str, train: Header, test: Header) -> None:
    """Raises a `UserError` unless training and test labels have the same form.

    Args:
        name: Name of the source in error messages.
        train: Shape and type of the training labels.
        test: Shape and type of the test labels.
    """
    forms = [
        "names" if are_names(each) else "targets" if each.dtype.kind == "f" else "numbers"
        for each in (train, test)
    ]
    if forms[0] != forms[1]:
        raise UserError(
            f"{name} has training labels {train.dtype} and test labels {test.dtype}. Give both as "
            "class numbers (int), as names of classes (text), or as real targets (float)."
        )


def check_finite(where: str, inputs: np.ndarray) -> None:
    """Raises a `UserError` if an input is NaN or infinite.

    Args:
        where: Name of the inputs in error messages.
        inputs: Inputs, [examples, ...]. Only floats are read.
    """
    if not jnp.issubdtype(inputs.dtype, jnp.inexact) or np.isfinite(inputs).all():
        return
    bad = ~np.isfinite(inputs)
    rows = np.flatnonzero(bad.reshape(len(inputs), -1).any(axis=1))
    column = f" in {_columns(np.flatnonzero(bad.any(axis=0)))}" if inputs.ndim == 2 else ""
    raise UserError(
        f"{where} has {'NaN' if np.isnan(inputs).any() else 'infinity'}{column}, in {len(rows):,} "
        f"of {len(inputs):,} examples, the first at index {first_index(bad)}. Remove these "
        "examples, or replace the values."
    )


def check_finite_inputs(name: str, inputs: Inputs) -> None:
    """Raises a `UserError` if inputs on the host are NaN or infinite.

    Args:
        name: Name of the inputs in error messages.
        inputs: Pytree of arrays, leaves [examples, ...]. Arrays of JAX are not read, because that
            would wait for their devices.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(inputs):
        if isinstance(leaf, np.ndarray):
            check_finite(f"{name}{jax.tree_util.keystr(path)}", leaf)


def _columns(numbers: np.ndarray) -> str:
    """Returns the numbers of columns in words, the first few of many."""
    listed = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = len(numbers) - _MOST_NAMED
    others = f" and {more:,} more" if more > 0 else ""
    return f"column{'' if len(numbers) == 1 else 's'} {listed}{others}"


def count_classes(where: str, labels: np.ndarray) -> int:
    """Returns the number of classes of training labels, one more than the largest label.

    Args:
        where: Name of the split in error messages.
        labels: Class numbers, int[examples], of at least one example.

    Raises:
        UserError: If a label is negative, a label below the largest does not occur, or all are 0.
    """
    present = np.unique(labels)
    count = int(present[-1]) + 1
    if present[0] < 0 or len(present) != count:
        raise UserError(
            f"{where} has {len(present)} different labels from {present[0]} to {present[-1]}, not "
            "all of 0, 1, 2, … Correct the labels, or say how many classes there are: "
            "num_classes, in a config data.num_classes. Save real targets as floats."
        )
    if count == 1:
        raise UserError(
            f"{where} has one class: all training labels are 0. Check that they are the labels, or "
            "say how many classes there are: num_classes, in a config data.num_classes."
        )
    return count


def check_labels(where: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises a `UserError` unless every label lies in [0, num_classes).

    Args:
        where: Name of the labels in error messages.
        labels: Class numbers, int[...].
        num_classes: Number of classes.
    """
    if labels.size and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        bad = (labels < 0) | (labels >= num_classes)
        index = first_index(bad)
        raise UserError(
            f"{where} has the label {labels[index]} at index {index}, outside [0, {num_classes}); "
            f"{np.count_nonzero(bad):,} in all. Correct the labels, or set "
            "num_classes, in a config data.num_classes."
        )
