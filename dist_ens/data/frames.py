"""Tables of any library, as frames of Narwhals, and their columns as numbers or text."""

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np

from dist_ens.ground.errors import UserError, first_line, kind_of
from dist_ens.ground.extras import imported
from dist_ens.ground.file_reading import explained_reading, require_readable
from dist_ens.ground.paths import given_path, shortened

if TYPE_CHECKING:
    from narwhals import DataFrame, Series

Table: TypeAlias = "DataFrame"
"""A table in memory, as Narwhals shows a frame of any library."""

_EXTRA = "tables"
_PARQUET = (".parquet", ".pq")
# Texts of a CSV file that stand for a missing value.
_MISSING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?"]
_SEPARATORS = (",", ";", "\t", "|")
_DECIMAL_COMMA = r"^-?\d+,\d+$"  # Such as 1,5 in a file that semicolons separate.
_SECS_OF_DAY = 86_400


def read_table(data: object) -> Table:
    """Returns a table: a file of CSV or Parquet, a frame, or a dict of columns of equal length."""
    narwhals = imported("narwhals", _EXTRA)
    if isinstance(data, str | os.PathLike):
        return _read_file(data)
    try:
        if isinstance(data, Mapping):
            data = imported("polars", _EXTRA).DataFrame(dict(data))
        return narwhals.from_native(data, eager_only=True)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The table is {kind_of(data)}: {first_line(error)} Give the path of a CSV or Parquet "
            "file, a frame of pandas or polars, or a dict of columns."
        ) from error


def write_csv(file: BinaryIO, columns: Mapping[str, np.ndarray]) -> None:
    """Writes columns of equal length, [rows] each, as CSV."""
    imported("polars", _EXTRA).DataFrame(dict(columns)).write_csv(file)


def is_text(series: "Series") -> bool:
    """Returns whether a column has text or categories, and no numbers, dates or truth values."""
    dtype = series.dtype
    if str(dtype) == "Object":  # Text of pandas beside missing values; or anything else.
        return True
    return not (dtype.is_numeric() or dtype.is_temporal() or str(dtype) == "Boolean")


def floats_of(series: "Series") -> np.ndarray:
    """Returns a column as float64[rows], NaN where a value is missing. Dates are counted in days.

    Raises:
        UserError: If the column has text.
    """
    if series.dtype.is_temporal():
        # Without a time zone, 0 is the beginning of 1970.
        dates = np.array(series.to_list(), "datetime64[s]")
        days = dates.astype(np.float64) / _SECS_OF_DAY
        return np.where(np.isnat(dates), np.nan, days)
    if is_text(series):
        values = [value for value in series.to_list() if value is not None]
        if not values:  # A column without any value has no type of its own.
            return np.full(len(series), np.nan)
        raise UserError(
            f"The column {series.name!r} has the text {shortened(str(values[0]))}, and numbers are "
            "needed there. Correct the value, or leave its row out."
        )
    return np.array([np.nan if v is None else v for v in series.to_list()], np.float64)


def texts_of(series: "Series") -> list[str]:
    """Returns the values of a column as text, the empty text where one is missing.

    A whole number has the same text as an integer and as a float, which pandas makes of it.
    """
    return [_text(value) for value in series.to_list()]


def _text(value: object) -> str:
    if value is None or value != value:  # NaN is the only value that differs from itself.
        return ""
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else str(value)  # type: ignore[call-overload]


def _read_file(file: str | os.PathLike[str]) -> Table:
    """Reads a file of CSV, which may be compressed, or of Parquet."""
    polars = imported("polars", _EXTRA)
    path = given_path(file, "The path of the table")
    advice = "Correct the path, or write a CSV file with one row of names, or a Parquet file."
    with explained_reading(f"The table {shortened(str(path))}", advice):
        require_readable(path)
        try:
            if path.suffix in _PARQUET:
                frame = polars.read_parquet(path)
            else:
                read = functools.partial(
                    polars.read_csv,
                    path,
                    separator=_separator(path),
                    null_values=_MISSING,
                    infer_schema_length=None,  # All rows decide on the type of a column.
                    try_parse_dates=True,
                )
                frame = read()
                texts = frame.select(polars.col(polars.String).drop_nulls().implode())
                if any(
                    each[0].str.contains(_DECIMAL_COMMA).all() for each in texts if len(each[0])
                ):
                    frame = read(decimal_comma=True)
        except polars.exceptions.PolarsError as error:
            raise ValueError(first_line(error)) from error
    return imported("narwhals", _EXTRA).from_native(frame, eager_only=True)


def _separator(path: os.PathLike[str]) -> str:
    """Returns the character that occurs most often in the first line of a file of CSV."""
    import gzip

    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        line = file.readline()
    return max(_SEPARATORS, key=line.count)
