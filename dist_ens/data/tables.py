"""A source of tables: files of CSV and Parquet, and frames of pandas and polars."""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np

from dist_ens.data.checks import check_numbers
from dist_ens.data.class_names import class_numbers, listed, names_in
from dist_ens.data.columns import TableRule, check_range, labels_of
from dist_ens.data.frames import (
    Table,
    floats_of,
    is_date,
    is_number,
    is_text,
    read_table,
    texts_of,
)
from dist_ens.data.held_out import Units
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.data.splits import ArraySplit, parts_of
from dist_ens.data.standardize import Examples, standardized_source
from dist_ens.ground.errors import UserError, counted, did_you_mean
from dist_ens.ground.narrowing import narrowed
from dist_ens.ground.numbers import require_one_of, require_share

_TASKS = ("classification", "regression")
_MOST_CLASSES = 10  # Whole numbers with at most so many different values are classes.
_ODD = 0.1  # Share of values that are no numbers, below which they may be slips.
_TEST_WORDS = ("test", "true", "1", "yes")  # Values in a column of splits.


def table(
    data: object,
    *,
    target: str,
    test: float | str | object = 0.2,
    task: str | None = None,
    row_id: str | None = None,
    group: str | None = None,
    time: str | None = None,
    categories: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    standardize: bool = False,
) -> Source:
    """Returns a source of a table with one column of labels.

    The rule by which columns become inputs is fitted on the training rows alone, and is
    `source.spec.table`:

    - Numbers, dates and truth values are standardised. A missing one becomes the median, and a
      further input says that it was missing. Dates are counted in days.
    - Text becomes one input for each of at most 32 categories. With more, the column is the number
      of the category, and the network needs `models.with_embeddings`; a run from a config adds it.
      A missing category is a category. One that training never saw is none of them: all inputs 0.
    - Constant columns, and text that differs in most rows, are left out.

    Args:
        data: Path of a CSV or Parquet file, frame of pandas or polars, or dict of columns.
        target: Name of the column of labels.
        test: Test rows: the share that is drawn, in (0, 1); the name of a column that holds "test"
            or True in those rows; or a second table. Of classes, the share of each is drawn.
        task: "classification" or "regression". Default: classes if the target has text, truth
            values, or whole numbers with at most 10 different values.
        row_id: Name of the column that names the rows. It is no input.
        group: Name of a column. Rows with the same value are all training, all validation or all
            test rows. It is no input.
        time: Name of a column by which the rows are sorted: the last ones are the test rows, and
            the last of the others those for validation. It is no input.
        categories: Names of columns of numbers that are categories, such as postal codes.
        leave_out: Names of columns that are no inputs.
        standardize: Whether real targets are standardised by the training rows, as in a run from a
            config. Default: False, for `gaussian(standardize=True)` and other losses.

    Returns:
        The source. Its inputs are float32[rows, inputs].

    Raises:
        UserError: If the table cannot be read, or a named column is absent. Also if the target has
            missing values, or text for a regression; or a test row has a class that no training
            row has.

    >>> rows = {"area": [30.0, 50, 70, 90, 110], "town": [*"abaab"], "price": [1.0, 2.5, 3, 4, 5.2]}
    >>> source = table(rows, target="price")
    >>> source.spec.table.input_names, len(source.test)
    (['area', 'town=a', 'town=b'], 1)
    """
    frame = read_table(data)
    named = [target, *filter(None, (row_id, group, time)), *categories, *leave_out]
    by_column = isinstance(test, str) and test in frame.columns
    for name in named:
        if name not in frame.columns:
            raise UserError(
                f"The table has no column {name!r}.{did_you_mean(name, frame.columns)} Its columns "
                f"are {listed(frame.columns)}."
            )
    if task is not None:
        require_one_of("task", task, _TASKS)
    has_classes = _are_classes(frame, target) if task is None else task == _TASKS[0]
    used = {*named[1:], *([str(test)] if by_column else [])}
    # Classes, categories and groups are the text of the file: 01 is not 1.
    texts = [*categories, *filter(None, [group]), *([target] if has_classes else [])]
    if group is not None and time is not None:
        raise UserError("A table is divided by group or by time. Leave one of them out.")
    if not all(is_text(frame[name]) for name in texts):
        frame = read_table(data, texts)
    # Messages give the row of the whole table.
    labels_of(frame[target], has_classes)
    _check_columns(frame, [n for n in frame.columns if n not in used])
    if isinstance(test, float | int):
        require_share("test", test, "0.2 is usual.")
        is_test = _drawn(frame, float(test), target if has_classes else None, group, time)
        train, rest = _parts(frame, is_test, f"test={test} means")
    elif by_column:
        is_test = np.isin([text.lower() for text in texts_of(frame[str(test)])], _TEST_WORDS)
        train, rest = _parts(frame, is_test, f"The column {test!r} says")
    else:
        train, rest = frame, None
    roles = {row_id: "the names of rows", group: "the group", time: "the time"}
    left_out = {name: why for name, why in roles.items() if name is not None}
    left_out |= dict.fromkeys(leave_out, "as asked") | (
        {str(test): "the split"} if by_column else {}
    )
    rule = TableRule.fitted(
        train,
        [name for name in frame.columns if name != target and name not in left_out],
        left_out,
        categories=categories,
        target=target,
        row_id=row_id,
        has_classes=has_classes,
    )
    if rest is None:
        rest = read_table(test, [*rule.texts, *filter(None, [group])])
    parts = [(rule.encode(part), rule.labels(part)) for part in (train, rest)]
    if group is not None:
        of_rest = {*texts_of(rest[group])} if group in rest.columns else set()
        if both := {*texts_of(train[group])} & of_rest - {""}:
            raise UserError(
                f"{counted(len(both), 'group')} of {group!r} have training rows and test rows, "
                f"such as {min(both)!r}. Leave group out, or give test rows of other groups."
            )
    source = _source_of(rule, parts, standardize)
    return dataclasses.replace(source, units=_units_of(train, group, time))


def open_csv(
    file: str,
    target: str | None,
    test: float | str,
    task: str | None,
    row_id: str | None,
    group: str | None,
    time: str | None,
    categories: Sequence[str],
    leave_out: Sequence[str],
) -> Source:
    """Opens a table for a run from a config; see `table`. Real targets are standardised."""
    if target is None:
        columns = listed(read_table(file).columns)
        raise UserError(f"data.target must name the column of labels. The columns are {columns}.")
    return table(
        file,
        target=target,
        test=test,
        task=task,
        row_id=row_id,
        group=group,
        time=time,
        categories=categories,
        leave_out=leave_out,
        standardize=True,
    )


open_parquet = open_csv  # The file's name says which of the two it is.


def _source_of(
    rule: TableRule, parts: Sequence[tuple[np.ndarray, np.ndarray]], standardize: bool
) -> Source:
    """Returns the source of the encoded training and test rows."""
    (inputs, labels), (test_inputs, test_labels) = (
        (narrowed(x, np.float32, "The table, standardised"), y) for x, y in parts
    )
    for where, rows in (("The training part", inputs), ("The test part", test_inputs)):
        check_numbers(f"{where} of the table", rows)
    shape, dtype = inputs.shape[1:], inputs.dtype.name
    if rule.has_classes:
        names = names_in(labels, f"The target {rule.target!r}")
        numbers = [class_numbers(y, names, "The target") for y in (labels, test_labels)]
        is_numbered = names == tuple(map(str, range(len(names))))
        spec = Spec(
            shape, dtype, (), len(names), class_names=None if is_numbered else names, table=rule
        )
        return Source(spec, ArraySplit(inputs, numbers[0]), ArraySplit(test_inputs, numbers[1]))
    if not standardize:
        splits = ArraySplit(inputs, labels), ArraySplit(test_inputs, test_labels)
        return Source(Spec(shape, dtype, (), None, table=rule), *splits)
    # The rule has standardised the inputs already, so only the targets are left.
    train, test = (Examples(x[None, ..., None], y[None]) for x, y in parts)
    source = standardized_source(train, test, "The table")
    targets = [parts_of(split, ["labels"])["labels"] for split in (source.train, source.test)]
    splits = ArraySplit(inputs, targets[0]), ArraySplit(test_inputs, targets[1])
    return Source(dataclasses.replace(source.spec, input_shape=shape, table=rule), *splits)


def _check_columns(frame: Table, names: Sequence[str]) -> None:
    """Checks the range of columns of numbers, and warns of text that is mostly numbers or dates."""
    for name in names:
        if not is_text(frame[name]):
            check_range(f"The column {name!r}", floats_of(frame[name]))
            continue
        texts = texts_of(frame[name])
        numbers = {text for text in {*texts} if is_number(text)}
        odd = [row for row, text in enumerate(texts) if text and text not in numbers]
        known = len(texts) - texts.count("")
        if known and not odd and all(is_date(text) for text in texts if text):
            warnings.warn(
                f"The column {name!r} is text, although all its values are dates. Write them in "
                "one form, or give a column of dates.",
                stacklevel=3,
            )
        if 0 < len(odd) < _ODD * known:
            warnings.warn(
                f"The column {name!r} is text, since row {odd[0]} has {texts[odd[0]]!r}: "
                f"{known - len(odd):,} of its {known:,} values are numbers or dates. Correct such "
                "values, or name the column in categories.",
                stacklevel=3,
            )


def _are_classes(frame: Table, target: str) -> bool:
    """Returns whether a column is one of classes: text, or few whole numbers."""
    series = frame[target]
    if is_text(series) or str(series.dtype) == "Boolean":
        return True
    numbers = floats_of(series)
    known = numbers[~np.isnan(numbers)]
    if (known != np.trunc(known)).any():
        return False
    # Large integers are equal as floats, and differ as text.
    return len({*texts_of(series)} - {""}) <= _MOST_CLASSES


def _units_of(frame: Table, group: str | None, time: str | None) -> Units | None:
    """Returns the units of the rows by their group or time, if a column is named."""
    if group is not None:
        return Units.of(np.array(texts_of(frame[group])), in_time=False)
    if time is None:
        return None
    when = floats_of(frame[time])
    if np.isnan(when).any():
        raise UserError(f"The column {time!r} has missing times. Leave these rows out.")
    return Units.of(when, in_time=True)


def _drawn(
    frame: Table, share: float, classes: str | None, group: str | None, time: str | None
) -> np.ndarray:
    """Returns which rows are test rows, bool[rows]: a share of them, of the groups, or the last."""
    if (units := _units_of(frame, group, time)) is not None:
        return units.held_out(share)
    count = len(frame)
    places = np.random.RandomState(0).permutation(count)
    texts = texts_of(frame[classes]) if classes else [""] * count
    of_class = np.unique(texts, return_inverse=True)[1][places]
    by_class = np.argsort(of_class, kind="stable")
    place = np.arange(count) - np.searchsorted(of_class[by_class], of_class[by_class])
    is_test = np.zeros(count, bool)
    # Of each class, the rows at which the share makes another whole number.
    is_test[places[by_class]] = np.floor((place + 1) * share) > np.floor(place * share)
    if classes and not is_test.any():
        raise UserError(
            f"test={share:g} takes that share of each class, and the largest of the "
            f"{of_class.max() + 1:,} classes of {classes!r} has {np.bincount(of_class).max():,} of "
            f"the {count:,} rows. Give a larger share, or task='regression' for a number."
        )
    return is_test


def _parts(frame: Table, is_test: np.ndarray, told: str) -> tuple[Table, Table]:
    """Returns the rows that are not test rows, and those that are; there must be both."""
    if is_test.all() or not is_test.any():
        raise UserError(
            f"{told} {int(is_test.sum()):,} of {len(frame):,} rows for the test part. Leave at "
            "least one row for each part."
        )
    return frame.filter((~is_test).tolist()), frame.filter(is_test.tolist())
