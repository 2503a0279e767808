"""Splits in files, described by the headers of their arrays and read on demand.

Opening a source and describing it use the same checks of the headers.
"""

import dataclasses

import numpy as np

from dist_ens.array_files import StoredArray, require_memory
from dist_ens.data.arrays import checked_split, classes_of, source_of_arrays
from dist_ens.data.checks import check_alike, check_headers, check_label_forms
from dist_ens.data.class_names import are_names, names_in
from dist_ens.data.source import ArraySplit, Source
from dist_ens.data.spec import Spec
from dist_ens.narrowing import held_dtype, narrowed


@dataclasses.dataclass(frozen=True)
class StoredSplit:
    """A split in a file, of which only the headers have been read.

    Attributes:
        name: Name of the source in error messages.
        split: Name of the split in error messages, `train` or `test`.
        inputs: Inputs, [examples, ...].
        labels: Class numbers, names of classes or real targets, [examples] or [examples, 1].

    Raises:
        UserError: If the headers cannot be those of inputs and labels.
    """

    name: str
    split: str
    inputs: StoredArray
    labels: StoredArray

    def __post_init__(self) -> None:
        self.inputs.require_numbers()
        self.labels.require_numbers(or_text=True)
        check_headers(self.where, self.inputs, self.labels)

    @property
    def where(self) -> str:
        """Name of the split in an error message."""
        return f"{self.name}, split {self.split}"

    @property
    def num_bytes(self) -> int:
        """Number of bytes that reading needs: the arrays as stored, and their narrowed copies."""
        return sum(
            array.num_bytes * (1 if held_dtype(array.dtype) == array.dtype else 2)
            for array in (self.inputs, self.labels)
        )

    def check_narrowing(self) -> None:
        """Checks that inputs of a type wider than 32 bits fit in 32 bits, by reading them.

        Raises:
            UserError: If a value does not fit, or the inputs do not fit in memory.
        """
        held = held_dtype(self.inputs.dtype)
        if held != self.inputs.dtype:
            require_memory(self.num_bytes, self.where)
            narrowed(self.inputs.read(), held, f"{self.where}, inputs")

    def read(self) -> ArraySplit:
        """Reads the split and checks its values.

        Raises:
            UserError: If the split does not fit in memory, or its values cannot be used.
        """
        require_memory(self.num_bytes, self.where)
        return checked_split(self.where, *self.arrays())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads inputs and labels, and checks nothing but the file."""
        return self.inputs.read(), self.labels.read(or_text=True)


def source_of_stored(train: StoredSplit, test: StoredSplit, num_classes: int | None) -> Source:
    """Reads two splits into a source.

    Args:
        train: Training split.
        test: Test split.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source.

    Raises:
        UserError: If the splits do not match or do not fit in memory, or their values cannot be
            used.
    """
    check_alike(train.name, train.inputs, test.inputs)
    require_memory(train.num_bytes + test.num_bytes, train.name)
    return source_of_arrays(train.arrays(), test.arrays(), num_classes=num_classes, name=train.name)


def describe_stored(
    train: StoredSplit, test: StoredSplit, num_classes: int | None
) -> tuple[Spec, int]:
    """Describes the source that `source_of_stored` returns, from the headers.

    Inputs are read only if their type is wider than 32 bits. So a value that does not fit is
    refused here too.

    Args:
        train: Training split.
        test: Test split.
        num_classes: Number of classes. None reads the training labels and counts them.

    Returns:
        Description of the examples, and the number of training examples.

    Raises:
        UserError: If the headers do not match, an input does not fit in 32 bits, or the training
            labels cannot be used.
    """
    check_alike(train.name, train.inputs, test.inputs)
    for split in (train, test):
        split.check_narrowing()
    check_label_forms(train.name, train.labels, test.labels)
    names = None
    if num_classes is None or are_names(train.labels):
        labels = train.labels.read(or_text=True)
        names = names_in(labels, f"{train.where}, labels") if are_names(labels) else None
        num_classes = classes_of(train.where, labels, num_classes, names)
    count, *shape = train.inputs.shape
    dtype = held_dtype(train.inputs.dtype).name
    return Spec(tuple(shape), dtype, (), num_classes, class_names=names), count
