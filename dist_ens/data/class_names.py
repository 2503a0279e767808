"""Names of classes, such as 'cat': the classes are numbered in the order of their sorted names."""

from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.ground.errors import UserError, counted, did_you_mean
from dist_ens.ground.paths import shortened
from dist_ens.ground.types import Data

_MOST_NAMED = 10


def are_names(labels: object) -> bool:
    """Returns whether labels are an array of text or of Python objects, and so not of numbers."""
    return getattr(getattr(labels, "dtype", None), "kind", None) in ("O", "S", "T", "U")


def names_in(labels: np.ndarray, where: str) -> tuple[str, ...]:
    """Returns the sorted names that occur in labels."""
    names = tuple(np.unique(_as_text(labels, where)).tolist())
    if len(names) == 1:
        raise UserError(
            f"{where} has one class: all labels are {listed(names)}. Check that this is right."
        )
    return names


def class_numbers(labels: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
    """Returns the numbers of classes that are given by their names, int32[...].

    >>> class_numbers(np.array(["dog", "cat"]), ("cat", "dog"), "The labels").tolist()
    [1, 0]
    """
    text, known = _as_text(labels, where), np.array(names)
    numbers = np.minimum(np.searchsorted(known, text), len(known) - 1)
    unknown = known[numbers] != text
    if unknown.any():
        name = str(text[unknown][0])
        many, meant = counted(int(unknown.sum()), "such label"), did_you_mean(name, names)
        raise UserError(
            f"{where} has the class {shortened(name)}, which training did not see ({many} in all)."
            f"{meant} The classes are {listed(names)}."
        )
    return numbers.astype(np.int32)


def with_class_numbers(data: Data, key: str, names: Sequence[str], where: str) -> Data:
    """Returns a dict of arrays with class numbers in place of names; other data unchanged.

    `names` are the sorted names of the classes of training, empty if it had none.
    """
    if not isinstance(data, Mapping) or not are_names(data.get(key)):
        return data
    where = f"{where}[{key!r}]"
    if not names:
        raise UserError(f"{where} has names, and the members were trained on class numbers.")
    return {**data, key: class_numbers(np.asarray(data[key]), names, where)}


def listed(names: Sequence[str]) -> str:
    """Returns names in words, the first ten of many."""
    shown = ", ".join(map(shortened, names[:_MOST_NAMED]))
    more = len(names) - _MOST_NAMED
    return f"{shown} and {counted(more, 'other')}" if more > 0 else shown


def _as_text(labels: np.ndarray, where: str) -> np.ndarray:
    """Returns labels as text. A missing name, such as NaN, would become the text 'nan'."""
    text = [
        each.decode("utf-8", "backslashreplace") if isinstance(each, bytes) else each
        for each in labels.ravel()
    ]
    no_text = [each for each in text if not isinstance(each, str)]
    if no_text:
        raise UserError(
            f"{where} has {shortened(repr(no_text[0]))} among its names of classes, which is no "
            "text. Remove such examples, or give text or numbers alone."
        )
    return np.array(text, str).reshape(labels.shape)
