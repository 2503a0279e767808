"""Names of classes, such as 'cat': the classes are numbered in the order of their sorted names."""

from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.ground.errors import UserError, counted, did_you_mean
from dist_ens.ground.paths import shortened
from dist_ens.ground.types import Data

_MOST_NAMED = 10  # Largest number of names that a message lists.


def are_names(labels: object) -> bool:
    """Returns whether labels are an array of text or of Python objects, and so not of numbers."""
    return getattr(getattr(labels, "dtype", None), "kind", None) in ("O", "S", "T", "U")


def names_in(labels: np.ndarray, where: str) -> tuple[str, ...]:
    """Returns the sorted names that occur in labels.

    Args:
        labels: Names of classes, of any shape.
        where: Name of the labels in error messages.

    Raises:
        UserError: If a label is no text.
    """
    return tuple(np.unique(_as_text(labels, where)).tolist())


def class_numbers(labels: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
    """Returns the numbers of classes that are given by their names, int32[...].

    Args:
        labels: Names of classes, [...].
        names: Sorted names of the classes of training.
        where: Name of the labels in error messages.

    Raises:
        UserError: If a label is not one of the names.

    >>> class_numbers(np.array(["dog", "cat"]), ("cat", "dog"), "The labels").tolist()
    [1, 0]
    """
    text, known = _as_text(labels, where), np.array(names)
    numbers = np.minimum(np.searchsorted(known, text), len(known) - 1)
    unknown = known[numbers] != text
    if unknown.any():
        name = str(text[unknown][0])
        raise UserError(
            f"{where} has the class {shortened(name)}, which training did not see "
            f"({counted(int(unknown.sum()), 'such label')} in all).{did_you_mean(name, names)} The "
            f"classes are {listed(names)}."
        )
    return numbers.astype(np.int32)


def with_class_numbers(data: Data, key: str, names: Sequence[str], where: str) -> Data:
    """Returns data with class numbers in place of names.

    Args:
        data: Dict of arrays. Other data, and labels that are no names, are returned unchanged.
        key: Key of the labels.
        names: Sorted names of the classes of training; empty if it had none.
        where: Name of the data in error messages.

    Raises:
        UserError: If there are no names, or a label is not one of them.
    """
    if not isinstance(data, Mapping) or not are_names(data.get(key)):
        return data
    where = f"{where}[{key!r}]"
    if not names:
        raise UserError(
            f"{where} has names of classes, and the members were trained on class numbers. Give "
            "class numbers."
        )
    return {**data, key: class_numbers(np.asarray(data[key]), names, where)}


def listed(names: Sequence[str]) -> str:
    """Returns names in words, the first of many.

    >>> listed(("cat", "dog"))
    "'cat', 'dog'"
    """
    shown = ", ".join(map(shortened, names[:_MOST_NAMED]))
    more = len(names) - _MOST_NAMED
    return f"{shown} and {counted(more, 'other')}" if more > 0 else shown


def _as_text(labels: np.ndarray, where: str) -> np.ndarray:
    """Returns labels as an array of text; raises a `UserError` if one of them is no text."""
    no_text = [each for each in labels.ravel() if not isinstance(each, str | bytes)]
    if no_text:
        raise UserError(
            f"{where} has {shortened(repr(no_text[0]))} among its names of classes, which is no "
            f"text ({counted(len(no_text), 'such label')} in all). Remove these examples, or give "
            "text or numbers alone."
        )
    return labels.astype(str)
