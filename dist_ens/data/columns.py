"""The columns of a table as inputs and labels of a network, by rules that training rows decide."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.data.class_names import listed
from dist_ens.data.frames import (
    Table,
    floats_of,
    is_text,
    names_in_rows,
    read_table,
    texts_of,
)
from dist_ens.ground.errors import UserError, counted, did_you_mean
from dist_ens.ground.json_text import Json, fields_from_record
from dist_ens.ground.narrowing import first_index

if TYPE_CHECKING:
    from narwhals import Series

MOST_ONE_HOT = 32  # Largest number of categories that become one input each.
# Text is left out if it has more different values than this share of the rows, and than a few.
_MOST_DIFFERENT, _FEW = 0.5, 10
# Numbers whose relative difference is at most this are one number, computed in two ways.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table, and the inputs that it becomes.

    A number becomes `(number - mean) / std`. A missing one becomes the median of training, and a
    second input says whether it was missing, if training has missing ones. Categories become one
    input for each of them, or one number of 0, 1, 2, … that an embedding reads.

    Attributes:
        name: Name of the column.
        median: Median of the known numbers of training.
        mean: Mean of the numbers of training, with the median for missing ones.
        std: Standard deviation of the same numbers, positive.
        has_missing: Whether training has missing numbers.
        categories: Sorted categories of training. None for a column of numbers. A missing category
            is the empty text.

    >>> Column("town", categories=("Bonn", "Kiel")).input_names
    ['town=Bonn', 'town=Kiel']
    """

    name: str
    median: float = 0.0
    mean: float = 0.0
    std: float = 1.0
    has_missing: bool = False
    categories: tuple[str, ...] | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether an embedding reads the number of the category."""
        return self.categories is not None and len(self.categories) > MOST_ONE_HOT

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs that the column becomes."""
        if self.categories is None:
            return [self.name, *([f"{self.name} is missing"] if self.has_missing else [])]
        if self.is_embedded:
            return [self.name]
        return [f"{self.name}={each or 'missing'}" for each in self.categories]

    def codes(self, values: Sequence[str]) -> np.ndarray:
        """Returns the number of each category; that of all categories for an unknown one."""
        numbers = {value: number for number, value in enumerate(self.categories or ())}
        return np.array([numbers.get(value, len(numbers)) for value in values], np.int64)

    def numbers(self, series: "Series") -> np.ndarray:
        """Returns the numbers of a column, NaN where one is missing, or of its categories."""
        return floats_of(series) if self.categories is None else self.codes(texts_of(series))

    def encoded(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the inputs that the numbers of a column become, [rows, inputs]."""
        if self.categories is None:
            is_missing = np.isnan(numbers)
            scaled = (np.where(is_missing, self.median, numbers) - self.mean) / self.std
            return np.stack([scaled, *([is_missing] if self.has_missing else [])], axis=1)
        if self.is_embedded:
            return numbers[:, None]
        return numbers[:, None] == np.arange(len(self.categories))


@dataclasses.dataclass(frozen=True)
class TableRule:
    """The rule by which the rows of a table become inputs and labels.

    Attributes:
        columns: Columns that are inputs. Those that an embedding reads are the last ones.
        target: Name of the column of labels.
        row_id: Name of the column that names the rows. None numbers them.
        left_out: Names of the columns that are no inputs, each with the reason.
        has_classes: Whether the labels are classes.

    >>> from dist_ens.data import table
    >>> rows = {"size": [1.0, 2.0, None, 4.0], "price": [1.0, 2.5, 3.0, 4.5]}
    >>> source = table(rows, target="price", test=0.25)
    >>> source.spec.table.input_names
    ['size', 'size is missing']
    """

    columns: tuple[Column, ...]
    target: str
    row_id: str | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    has_classes: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> "TableRule":
        """Returns the rule of a dict that `dataclasses.asdict` made, which JSON has stored."""

        def columns(values: Sequence[Mapping[str, Json]]) -> tuple[Column, ...]:
            return tuple(Column(**fields_from_record(Column, each)) for each in values)

        return cls(**fields_from_record(cls, values, {"columns": columns}))

    @classmethod
    def fitted(
        cls,
        train: Table,
        names: Sequence[str],
        left_out: Mapping[str, str],
        *,
        categories: Sequence[str] = (),
        **others: Json,
    ) -> "TableRule":
        """Returns the rule of the training rows, of those columns with a name that hold something.

        Columns of numbers whose name is among `categories` are read as text.
        """
        columns, left_out = [], dict(left_out)
        for name in names:
            column, reason = _fitted(name, train[name], is_text(train[name]) or name in categories)
            if reason:
                left_out[name] = reason
            else:
                columns.append(column)
        if not columns:
            raise UserError(
                "No column of the table can be an input: "
                f"{', '.join(f'{name} ({why})' for name, why in left_out.items())}. Give others."
            )
        ordered = sorted(columns, key=lambda column: column.is_embedded)
        return cls(tuple(ordered), left_out=tuple(left_out.items()), **others)

    @property
    def input_names(self) -> list[str]:
        """Name of each input of a network."""
        return [name for column in self.columns for name in column.input_names]

    @property
    def embedded(self) -> tuple[int, ...]:
        """Number of categories of each of the last columns, which an embedding reads."""
        return tuple(len(each.categories or ()) for each in self.columns if each.is_embedded)

    def encode(self, table: object) -> np.ndarray:
        """Returns the inputs of the rows of a table, float64[rows, inputs].

        Args:
            table: File of CSV or Parquet, frame of pandas or polars, or dict of columns, in the
                units of the training table. Further columns are not read.

        Raises:
            UserError: If a column is absent, or holds text in the place of numbers.

        Warns of categories that training never saw.
        """
        frame = read_table(table, self.texts)
        numbers = self.numbers(frame).T
        for column, codes in zip(self.columns, numbers, strict=True):
            if column.categories is not None and (codes == len(column.categories)).any():
                texts = {*texts_of(frame[column.name])}
                unknown = sorted(texts - {*column.categories, ""})
                if unknown:
                    others = "They count as none of the others."
                    if not texts & {*column.categories}:
                        others += f" It saw {listed(column.categories[:3])}."
                    warnings.warn(
                        f"Training never saw these categories of {column.name!r}: "
                        f"{listed(unknown)}. {others}",
                        stacklevel=2,
                    )
        inputs = [each.encoded(rows) for each, rows in zip(self.columns, numbers, strict=True)]
        return np.concatenate(inputs, axis=1)

    def numbers(self, table: object) -> np.ndarray:
        """Returns the columns of a table before they are encoded, float64[rows, columns].

        A missing number is NaN. A category is its place among those of training, from 0 on, and an
        unknown one has the next number. An exported prediction takes these; see `encode`.
        """
        frame = read_table(table, self.texts)
        if not len(frame):
            raise UserError("The table has no rows. Give at least one.")
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            meant = did_you_mean(absent[0], frame.columns)
            raise UserError(
                f"The table lacks {listed(absent)}, which training had.{meant} It has "
                f"{listed(frame.columns)}."
            )
        columns = [each.numbers(frame[each.name]) for each in self.columns]
        numbers = np.stack(columns, axis=1).astype(np.float64)
        if (infinite := np.isinf(numbers)).any():
            row, at = first_index(infinite)  # type: ignore[misc]
            name = self.columns[at].name
            raise UserError(f"The column {name!r} has infinity in row {row}. Correct the value.")
        return numbers

    @property
    def texts(self) -> list[str]:
        """Names of the columns that are read as text: categories, names of rows, and classes."""
        names = [each.name for each in self.columns if each.categories is not None]
        # A name of a row is the text of the file: 01067 is not 1067.
        names += [] if self.row_id is None else [self.row_id]
        return [*names, *([self.target] if self.has_classes else [])]

    def labels(self, table: object) -> np.ndarray:
        """Returns the labels of a table: float64[rows] of real targets, and text of classes."""
        frame = read_table(table, self.texts)
        if self.target not in frame.columns:
            raise UserError(
                f"The table has no column {self.target!r}, the target, and so no labels. It has "
                f"{listed(frame.columns)}."
            )
        return labels_of(frame[self.target], self.has_classes)

    def row_ids(self, table: object) -> tuple[str, np.ndarray]:
        """Returns the name of the column that names the rows, and the names as text, [rows].

        Without such a column they are "row", and the numbers 0, 1, 2, …
        """
        frame = read_table(table, self.texts)
        if self.row_id is None or self.row_id not in frame.columns:
            return "row", np.arange(len(frame))
        return self.row_id, names_in_rows(frame[self.row_id])

    def __str__(self) -> str:
        without = f", without {listed([n for n, _ in self.left_out])}" if self.left_out else ""
        return f"{counted(len(self.columns), 'column')}{without}"


def check_range(what: str, numbers: np.ndarray) -> None:
    """Raises a `UserError` if numbers, float64[rows], are too large or too small for float32."""
    held = np.finfo(np.float32)
    sizes = np.abs(np.nan_to_num(numbers, posinf=np.inf, neginf=np.inf))
    row = int(sizes.argmax()) if len(sizes) else 0
    if np.isinf(sizes).any():
        raise UserError(f"{what} has infinity in row {row}. Correct the value.")
    if len(sizes) and (sizes[row] > held.max or 0 < sizes[row] < held.tiny):
        raise UserError(
            f"{what} has numbers of up to {sizes[row]:g}, in row {row}, which do not fit in "
            "float32. Change their unit, or correct the value."
        )


def labels_of(series: "Series", has_classes: bool) -> np.ndarray:
    """Returns labels of a column, none of which may be missing."""
    if has_classes:
        labels = np.array(texts_of(series))
        missing = labels == ""
    else:
        try:
            labels = floats_of(series)
        except UserError as error:
            raise UserError(
                f"{error} A regression takes numbers. Choose another target, or "
                "task='classification'."
            ) from error
        missing = np.isnan(labels)
    if not has_classes:
        check_range(f"The target {series.name!r}", labels)
    if missing.any():
        raise UserError(
            f"The target {series.name!r} is missing in {int(missing.sum()):,} of {len(labels):,} "
            f"rows, the first in row {first_index(missing)}. Leave these rows out."
        )
    return labels


def _fitted(name: str, series: "Series", has_categories: bool) -> tuple[Column, str]:
    """Returns the rule of a column of training, or why it is left out."""
    if has_categories:
        texts = texts_of(series)
        categories = tuple(sorted({*texts}))
        if len(categories) == 1:
            return Column(name), "all its values are missing" if categories == ("",) else "constant"
        if len(categories) > max(_FEW, _MOST_DIFFERENT * len(texts)):
            return Column(name), f"text with {len(categories):,} different values"
        return Column(name, categories=categories), ""
    numbers = floats_of(series)
    is_missing = np.isnan(numbers)
    known = numbers[~is_missing]
    if not len(known):
        return Column(name), "all its values are missing"
    is_constant = np.ptp(known) <= _ROUNDING * np.abs(known).max()
    if is_constant and not is_missing.any():
        return Column(name), "constant"
    filled = np.where(is_missing, np.median(known), numbers)
    std = 1.0 if is_constant else float(filled.std())
    mean, median = float(filled.mean()), float(np.median(known))
    return Column(name, median, mean, std, bool(is_missing.any())), ""
