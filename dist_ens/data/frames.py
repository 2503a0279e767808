"""Tables of any library, as frames of Narwhals, and their columns as numbers or text."""

import datetime
import decimal
import functools
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np

from dist_ens.ground.errors import UserError, first_line, kind_of
from dist_ens.ground.extras import imported
from dist_ens.ground.file_reading import explained_reading, require_readable
from dist_ens.ground.paths import given_path, shortened

if TYPE_CHECKING:
    from narwhals import DataFrame, Series
    from polars import DataFrame as PolarsFrame
    from polars import Series as PolarsSeries

Table: TypeAlias = "DataFrame"
"""A table in memory, as Narwhals shows a frame of any library."""

_EXTRA = "tables"
_PARQUET = (".parquet", ".pq")
# Texts of a CSV file that stand for a missing value.
_MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "?"]
_SEPARATORS = (",", ";", "\t", "|")
_DECIMAL_COMMA = r"^-?\d+(,\d+)?$"  # Such as 1,5 in a file that semicolons separate.
_CODE = r"^0\d+$"  # Such as 01067 among other codes of five digits.
_WHOLE = re.compile(r"(-?\d+)\.0+")
# Other ways to write a date are ambiguous: 01/04/2000 is in January or in April.
_DATE = r"^\d{4}-\d{2}-\d{2}$"
_TIME = r"^\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}"
_SECS_OF_DAY = 86_400
_MICROSECS_OF_DAY = 1e6 * _SECS_OF_DAY
_TRUTH = {"true": 1.0, "false": 0.0}
# Values that count as numbers in a column of any objects, as readers of SQL return them.
_NUMERIC = (
    *(numbers.Real, decimal.Decimal, np.bool_),
    *(datetime.date, datetime.time, datetime.timedelta),
)


def read_table(data: object, texts: Sequence[str] = ()) -> Table:
    """Returns a table: a file of CSV or Parquet, a frame, or a dict of columns of equal length.

    The columns `texts` of a CSV file are read as the text that stands there, and not as numbers.
    """
    narwhals, polars = imported("narwhals", _EXTRA), imported("polars", _EXTRA)
    if isinstance(data, str | os.PathLike):
        return _read_file(data, texts)
    try:
        if isinstance(data, Mapping):
            data = polars.DataFrame(dict(data))
        frame = narwhals.from_native(data, eager_only=True)
    except (TypeError, ValueError, polars.exceptions.PolarsError) as error:
        raise UserError(
            f"The table is {kind_of(data)}: {first_line(error)} Give the path of a CSV or Parquet "
            "file, a frame of pandas or polars, or a dict of columns of equal length."
        ) from error
    if unnamed := [name for name in frame.columns if not isinstance(name, str)]:
        raise UserError(
            f"The table has the column {unnamed[0]!r}. Give columns names that are text."
        )
    return frame


def write_csv(file: BinaryIO, columns: Mapping[str, np.ndarray]) -> None:
    """Writes columns of equal length, [rows] each, as CSV."""
    imported("polars", _EXTRA).DataFrame(dict(columns)).write_csv(file)


def is_text(series: "Series") -> bool:
    """Returns whether a column has text or categories, and no numbers, dates or truth values."""
    dtype = series.dtype
    if str(dtype) in ("Object", "Unknown"):  # Pandas holds numbers beside None so.
        values = [value for value in _values(series) if value is not None]
        return not values or not all(isinstance(value, _NUMERIC) for value in values)
    return not (dtype.is_numeric() or dtype.is_temporal() or str(dtype) == "Boolean")


def floats_of(series: "Series") -> np.ndarray:
    """Returns a column as float64[rows], NaN where a value is missing. Dates are counted in days.

    Times with a zone become those of UTC. Text that is a number, a date as 2000-12-31, or true or
    false, counts as such.

    Raises:
        UserError: If the column has other text.
    """
    dtype = str(series.dtype)
    if series.dtype.is_numeric() or dtype == "Boolean":
        return _as_floats(series)
    if dtype == "Date" or dtype.startswith("Datetime"):
        return _as_floats(series.dt.timestamp("us")) / _MICROSECS_OF_DAY
    numbers = np.full(len(series), np.nan)
    for row, value in enumerate(_values(series)):
        if value is None:
            continue
        try:
            numbers[row] = _number(value)
        except (TypeError, ValueError, ArithmeticError):
            raise UserError(
                f"The column {series.name!r} has {shortened(str(value))} in row {row}, and a "
                "number, a date or true or false is needed there. Correct it, or leave the row out."
            ) from None
    return numbers


def texts_of(series: "Series") -> list[str]:
    """Returns the values of a column as text, the empty text where one is missing.

    A whole number has the same text as an integer and as 1.0, which pandas makes of it.
    """
    is_plain = not series.dtype.is_nested() and str(series.dtype) != "Object"
    # Most values occur often. The type counts: 1 and True are equal and have other texts.
    text = functools.lru_cache(maxsize=None, typed=True)(_text) if is_plain else _text
    return ["" if value is None else text(value) for value in _values(series)]


def names_in_rows(series: "Series") -> np.ndarray:
    """Returns the names of rows as text, [rows]: text as it stands, "" for a missing one."""
    if str(series.dtype) in ("String", "Categorical", "Enum"):
        return np.array(["" if value is None else str(value) for value in _values(series)])
    return np.array([*texts_of(series)])


def _as_floats(series: "Series") -> np.ndarray:
    floats = series.cast(imported("narwhals", _EXTRA).Float64)
    return np.asarray(floats.to_numpy(), np.float64)


def _values(series: "Series") -> list[object]:
    """Returns the values of a column, None where one is missing, in any library's way."""
    values, missing = series.to_list(), series.is_null()
    if missing.any():
        both = zip(values, missing.to_list(), strict=True)
        values = [None if is_missing else value for value, is_missing in both]
    # NaN is the value that differs from itself.
    return [None if value is not None and value != value else value for value in values]


def _number(value: object) -> float:
    """Returns a value as a number; a date or a duration in days, from the beginning of 1970."""
    if isinstance(value, datetime.timedelta):
        return value.total_seconds() / _SECS_OF_DAY
    if isinstance(value, datetime.time):
        return (value.hour * 60 + value.minute) / 1440 + value.second / _SECS_OF_DAY
    if isinstance(value, datetime.date):
        if isinstance(value, datetime.datetime) and value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return float(np.datetime64(value, "us").astype(np.int64)) / _MICROSECS_OF_DAY
    if isinstance(value, str):
        text = value.strip()
        if is_date(text):
            return _number(datetime.datetime.fromisoformat(text))
        return _TRUTH[text.lower()] if text.lower() in _TRUTH else float(text)
    return float(value)  # type: ignore[arg-type]


def is_number(text: str) -> bool:
    """Returns whether a text is a number, a date or a time."""
    try:
        return bool(np.isfinite(_number(text))) and text.lower() not in _TRUTH
    except (ValueError, OverflowError):
        return False


def is_date(text: str) -> bool:
    """Returns whether a text is written like a date or a time."""
    return bool(re.match(_DATE, text) or re.match(_TIME, text))


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    if whole := _WHOLE.fullmatch(text):
        return whole[1]
    return text.lower() if text.lower() in _TRUTH else text


def _read_file(file: str | os.PathLike[str], texts: Sequence[str]) -> Table:
    """Reads a file of CSV, which may be compressed, or of Parquet."""
    polars = imported("polars", _EXTRA)
    path = given_path(file, "The path of the table")
    advice = (
        "Check the path. Write a CSV file in UTF-8, with one row of names and as many values in "
        "each other row, or a Parquet file."
    )
    with explained_reading(f"The table {shortened(str(path))}", advice):
        require_readable(path)
        try:
            frame = (
                polars.read_parquet(path)
                if path.suffix.lower() in _PARQUET
                else _read_csv(path, texts)
            )
        except polars.exceptions.PolarsError as error:
            raise ValueError(first_line(error)) from error
    return imported("narwhals", _EXTRA).from_native(frame, eager_only=True)


def _read_csv(path: os.PathLike[str], texts: Sequence[str]) -> "PolarsFrame":
    """Returns a file of CSV as a frame of polars. All rows decide on the type of a column."""
    polars = imported("polars", _EXTRA)
    separator = _separator(path)
    text = polars.read_csv(path, separator=separator, null_values=_MISSING, infer_schema=False)
    text = text.rename({name: name.strip() for name in text.columns})
    text = text.with_columns(polars.all().str.strip_chars())
    if text.width > 1:  # Rows at the end without any value, such as empty lines, are dropped.
        is_row = text.select(polars.any_horizontal(polars.all().is_not_null())).to_series()
        text = text.head(len(is_row) - (is_row.reverse().arg_max() or 0))
    # In other files, 1,037 is one number in some countries and another one in others.
    has_commas = separator == ";"
    return text.with_columns([_typed(text[n], has_commas) for n in text.columns if n not in texts])


def _typed(series: "PolarsSeries", has_commas: bool) -> "PolarsSeries":
    """Returns a column of text of polars as numbers, truth values or dates, if all of it is.

    With `has_commas`, numbers may have a decimal comma.
    """
    polars = imported("polars", _EXTRA)
    known = series.drop_nulls()
    if not len(known) or _are_codes(known):
        return series
    for kind in (polars.Int64, polars.Float64):
        numbers = known.cast(kind, strict=False)
        if not numbers.null_count():
            return series.cast(kind)
    if has_commas and known.str.contains(_DECIMAL_COMMA).all():
        return series.str.replace(",", ".").cast(polars.Float64)
    if known.str.to_lowercase().is_in([*_TRUTH]).all():
        return series.str.to_lowercase() == "true"
    if known.str.contains(_DATE).all():
        dates = series.str.to_date("%Y-%m-%d", strict=False)
    elif known.str.contains(_TIME).all():
        try:
            dates = series.str.to_datetime(strict=False)
        except polars.exceptions.ComputeError:  # The first of the texts only begins with a time.
            return series
    else:
        return series
    return dates if dates.null_count() == series.null_count() else series


def _are_codes(known: "PolarsSeries") -> bool:
    """Returns whether texts are digits of one length, some with zeros in front, such as 01067."""
    if not known.str.contains(_CODE).any() or known.str.len_chars().n_unique() > 1:
        return False
    return bool(known.str.contains(r"^\d+$").all())


def _separator(path: os.PathLike[str]) -> str:
    """Returns the character that occurs most often in the first line of a file, outside quotes."""
    import gzip

    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        line = re.sub('"[^"]*"', "", file.readline())
    return max(_SEPARATORS, key=line.count)
