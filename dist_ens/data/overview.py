"""Facts about the columns of a table that show what a network is fed."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.data.columns import Column, TableRule
from dist_ens.data.frames import floats_of, is_text, read_table, texts_of

if TYPE_CHECKING:
    from narwhals import Series

# A column leaks if it alone predicts this share of other rows: balanced accuracy, or R^2.
_LEAKS_FROM = 0.99
_MOST_ROWS = 10_000  # Largest number of rows with which leaks are looked for.
_FOLDS = 3


@dataclasses.dataclass(frozen=True)
class ColumnFacts:
    """Facts about a column of a table.

    Attributes:
        name: Name of the column.
        kind: "numbers", "dates", "true or false" or "text".
        values: The range of numbers and dates, or the most frequent texts.
        num_values: Number of different values.
        missing: Share of the rows that have no value, in [0, 1].
        use: Inputs that the column becomes, or the reason why it has none.
        leak: Score with which the column alone predicts the target in other rows; None if it is
            below 0.99. It is the balanced accuracy, or R^2 of real targets.
    """

    name: str
    kind: str
    values: str
    num_values: int
    missing: float
    use: str
    leak: float | None = None


def column_facts(data: object, rule: TableRule) -> list[ColumnFacts]:
    """Returns the facts about each column of a table, given the rule of its training rows.

    A column that leaks is found by a decision tree of this column alone, in cross-validation.

    Args:
        data: Table, as `table` takes it.
        rule: Rule of the source, `source.spec.table`.

    >>> from dist_ens.data import table
    >>> rows = {"a": np.arange(40.0), "b": ["x"] * 40, "y": np.arange(40) % 2 * 1}
    >>> rows["c"] = rows["y"] * 3.0 - 1
    >>> facts = column_facts(rows, table(rows, target="y").spec.table)
    >>> [(each.name, each.use, each.leak) for each in facts]
    [('a', 'number', None), ('b', 'left out: constant', None), ('y', 'target, classes', None), \
('c', 'number', 1.0)]
    """
    frame = read_table(data, rule.texts)
    labels = rule.labels(frame)
    columns, left_out = {each.name: each for each in rule.columns}, dict(rule.left_out)
    found = []
    for name in frame.columns:
        column, series, leak = columns.get(name), frame[name], None
        if column is not None:
            use = _use_of(column)
            inputs = column.encoded(column.numbers(series))
            score = _score_alone(inputs, labels, rule.has_classes)
            leak = score if score >= _LEAKS_FROM else None
        elif name == rule.target:
            use = f"target, {'classes' if rule.has_classes else 'real'}"
        else:
            use = f"left out: {left_out.get(name, 'not asked for')}"
        found.append(ColumnFacts(name, *_values_of(series), use, leak))
    return found


def _use_of(column: Column) -> str:
    if column.categories is None:
        return "number and whether it is missing" if column.has_missing else "number"
    if column.is_embedded:
        return f"embedding of {len(column.categories):,} categories"
    return f"{len(column.categories)} categories"


def _values_of(series: "Series") -> tuple[str, str, int, float]:
    """Returns the kind of a column, its values in words, their number, and the share missing."""
    if is_text(series):
        texts = np.array(texts_of(series))
        values, counts = np.unique(texts[texts != ""], return_counts=True)
        most = values[np.argsort(-counts, kind="stable")][:3]
        shown = ", ".join(most.tolist()) + (", …" if len(values) > len(most) else "")
        return "text", shown, len(values), float((texts == "").mean())
    numbers = floats_of(series)
    known = numbers[~np.isnan(numbers)]
    missing = float(np.isnan(numbers).mean())
    kind = "true or false" if str(series.dtype) == "Boolean" else "numbers"
    if not len(known):
        return kind, "", 0, missing
    low, high = known.min(), known.max()
    shown = f"{low:.4g} to {high:.4g}"
    if str(series.dtype).startswith(("Date", "Time")):
        days = np.array([low, high]).astype("datetime64[D]")
        kind, shown = "dates", f"{days[0]} to {days[1]}"
    return kind, shown, len({*texts_of(series)} - {""}), missing


def _score_alone(inputs: np.ndarray, labels: np.ndarray, has_classes: bool) -> float:
    """Returns how well some inputs alone predict the labels of rows that a tree did not see."""
    from sklearn.model_selection import cross_val_score  # The import is slow.
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    rows = np.random.RandomState(0).permutation(len(labels))[:_MOST_ROWS]
    labels = labels[rows]
    if has_classes:  # A class with fewer rows than folds tells nothing.
        names, counts = np.unique(labels, return_counts=True)
        is_common = np.isin(labels, names[counts >= _FOLDS])
        rows, labels = rows[is_common], labels[is_common]
    if len(rows) < 2 * _FOLDS or (has_classes and len({*labels}) < 2):
        return 0.0
    tree, scoring = (
        (DecisionTreeClassifier(random_state=0), "balanced_accuracy")
        if has_classes
        else (DecisionTreeRegressor(random_state=0), "r2")
    )
    return float(cross_val_score(tree, inputs[rows], labels, cv=_FOLDS, scoring=scoring).mean())
