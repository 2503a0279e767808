"""A source of data sets of the library `datasets` of Hugging Face."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np

from dist_ens.data.checks import check_labels, count_classes
from dist_ens.data.class_names import listed
from dist_ens.data.pictures import colours_of
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.extras import imported
from dist_ens.ground.narrowing import held_dtype, narrowed

_GREY = ("L", "1", "I", "F", "I;16", "I;16B", "I;16L")


class _Dataset(Protocol):
    """A `datasets.Dataset`."""

    column_names: Sequence[str]
    features: Mapping[str, object]

    def __len__(self) -> int: ...

    def __getitem__(self, rows: list[int] | slice) -> Mapping[str, Sequence[object]]: ...

    def select_columns(self, column_names: str) -> "_Dataset": ...


@dataclasses.dataclass(frozen=True)
class DatasetSplit:
    """A `datasets.Dataset`, whose rows are read on demand; `names` are those of two columns."""

    in_memory: ClassVar[bool] = False
    rows: _Dataset
    names: tuple[str, str]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the rows at some positions, int64[...]."""
        read = self.rows[indices.ravel().tolist()]
        inputs, labels = (_stacked(read[name], name) for name in self.names)
        dtype = np.int32 if labels.dtype.kind in "iub" else np.float32
        inputs = narrowed(inputs, held_dtype(inputs.dtype), self.names[0])
        if labels.ndim > 1:
            raise UserError(
                f"The column {self.names[1]!r} has labels of the shape {labels.shape[1:]}, and one "
                "number a row is needed. Give another column, or arrays to Ensemble and fit."
            )
        return {
            "inputs": inputs.reshape(*indices.shape, *inputs.shape[1:]),
            "labels": narrowed(labels, dtype, self.names[1]).reshape(indices.shape),
        }


def _stacked(values: Sequence[object], name: str) -> np.ndarray:
    """Returns the values of a column as one array, [rows, ...]."""
    arrays = [
        # Pictures of Pillow have a mode. Grey ones are numbers already.
        np.asarray(value) if getattr(value, "mode", "L") in _GREY else colours_of(value)  # type: ignore[arg-type]
        for value in values
    ]
    if len(shapes := {array.shape for array in arrays}) > 1:
        first, second = sorted(shapes)[:2]
        raise UserError(
            f"The column {name!r} has rows of the shapes {first} and {second}. "
            "Give all rows one shape, such as pictures of one size."
        )
    return np.stack(arrays)


def hugging_face(
    train: _Dataset, test: _Dataset, *, inputs: str = "image", labels: str = "label"
) -> Source:
    """Returns a source of two data sets of the library `datasets`, such as two splits of one.

    Rows are read when they are needed. Pictures become uint8[height, width, 3], and
    grey ones arrays of their numbers, [height, width].

    Args:
        train: Training rows, a `datasets.Dataset`.
        test: Test rows.
        inputs: Name of the column of inputs, of one shape.
        labels: Name of the column of labels: integers for classes, floats for real targets.

    Returns:
        The source. Its classes have the names of the feature `ClassLabel`.

    Raises:
        UserError: If a column is absent, or the labels are no classes from 0 on.

    >>> import datasets
    >>> rows = datasets.Dataset.from_dict({"x": [[0.5, 1.0], [1.5, 2.0]], "y": [0, 1]})
    >>> source = hugging_face(rows, rows, inputs="x", labels="y")
    >>> source.spec.input_shape, source.spec.num_classes
    ((2,), 2)
    """
    for where, rows in (("training", train), ("test", test)):
        if not isinstance(rows, imported("datasets", "hf").Dataset):
            raise UserError(
                f"The {where} rows are {kind_of(rows)}. Give a datasets.Dataset, such as one split "
                'of a DatasetDict: rows["train"].'
            )
        absent = [name for name in (inputs, labels) if name not in rows.column_names]
        if absent:
            raise UserError(
                f"The {where} rows have no column {absent[0]!r}. They have "
                f"{listed(rows.column_names)}. Name two as inputs and labels."
            )
        if not len(rows):
            raise UserError(f"There are no {where} rows. Give at least one.")
    splits = DatasetSplit(train, (inputs, labels)), DatasetSplit(test, (inputs, labels))
    example = splits[0].take(np.zeros(1, np.int64))
    shape, dtype = example["inputs"].shape[1:], example["inputs"].dtype.name
    if example["labels"].dtype.kind == "f":
        return Source(Spec(shape, dtype, (), None), *splits)
    names = getattr(train.features[labels], "names", None)
    of_splits = [np.asarray(rows.select_columns(labels)[:][labels]) for rows in (train, test)]
    for where, values in zip(("training", "test"), of_splits, strict=True):
        if values.dtype.kind not in "iub":
            raise UserError(
                f"Labels are missing in the column {labels!r} of the {where} rows. Leave these "
                "rows out."
            )
    count = len(names) if names else count_classes("The training rows", of_splits[0])
    for where, values in zip(("The training rows", "The test rows"), of_splits, strict=True):
        check_labels(f"{where}, {labels}", values, count)
    named = tuple(names) if names else None
    return Source(Spec(shape, dtype, (), count, class_names=named), *splits)
