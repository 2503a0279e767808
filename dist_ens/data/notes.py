"""Notes on surprising data, which are printed once when training starts."""

from collections.abc import Callable, Sequence

import numpy as np

RARE_SHARE = 0.01
"""Largest share of a split's training rows that differ from a rare column's most common value."""
FEWEST_ROWS_OF_RARE = 20
"""Smallest number of training rows with which a column can be rare."""
FAR_DEVIATIONS = 100.0
"""Distance from the training mean, in standard deviations, beyond which test values are noted."""
FEWEST_DIGITS_STEPS = 16
"""Smallest number of float32 steps over the range of a column that is not noted."""
_MOST_NOTES = 10  # There are at most this many notes of a kind.
_ROUNDING = 100 * np.finfo(np.float64).eps  # A smaller relative range is rounding error.


def notes_on_columns(
    train: np.ndarray,
    test: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    varies: np.ndarray,
    columns: Sequence[int],
) -> tuple[str, ...]:
    """Returns notes on features that are constant, rare in training, or far off in the test rows.

    Args:
        train: Training inputs in their own units, [splits, rows, features].
        test: Test inputs in their own units, [splits, rows, features].
        mean: Training means, [splits, features].
        std: Training standard deviations, [splits, features]. A constant feature has 1.
        varies: Whether a feature is not constant in the training rows, bool[splits, features].
        columns: Column of each feature in the table.

    Returns:
        Notes of one or more sentences, at most one for each column and kind. After ten notes of a
        kind, one note counts the other columns.
    """
    distance = np.abs(test - mean[:, None]).max(axis=1)
    rare = varies & _is_rare(train)
    far = varies & (distance > FAR_DEVIATIONS * std)
    deviations = distance / std
    total = len(train)

    def constant_note(column: int) -> str:
        splits = ~varies[:, column]
        rounding = _ROUNDING * np.abs(mean[splits, column])
        differs = np.where(distance[splits, column] > rounding, distance[splits, column], 0).max()
        return (
            f"Column {columns[column]} is constant in the training rows of "
            f"{_splits(splits, total)}. It is centred there and not scaled, as scikit-learn's "
            "StandardScaler does."
            + (f" Test rows differ from it by up to {differs:.4g}." if differs else "")
        )

    def rare_note(column: int) -> str:
        splits = rare[:, column]
        return (
            f"In column {columns[column]}, at most {RARE_SHARE:.0%} of the training rows, or one "
            f"row, differ from the most common value in {_splits(splits, total)}. Test rows lie up "
            f"to {deviations[splits, column].max():.4g} training standard deviations from the mean."
        )

    def far_note(column: int) -> str:
        splits = far[:, column]
        return (
            f"In column {columns[column]}, test rows of {_splits(splits, total)} lie up to "
            f"{deviations[splits, column].max():.4g} training standard deviations from the mean. "
            "Members extrapolate there."
        )

    return (
        *_capped(np.flatnonzero(~varies.all(axis=0)), constant_note, "are constant"),
        *_capped(np.flatnonzero(rare.any(axis=0)), rare_note, "are rare in training"),
        *_capped(np.flatnonzero((far & ~rare).any(axis=0)), far_note, "have test rows far off"),
    )


def notes_on_digits(inputs: np.ndarray) -> tuple[str, ...]:
    """Returns notes on inputs whose offset is so large that float32 loses their differences.

    Args:
        inputs: Training inputs in the type of the source, [examples, ...].

    Returns:
        Notes, at most one for each position of an example. After ten notes, one note counts the
        other positions.
    """
    if inputs.dtype.kind == "b" or np.can_cast(inputs.dtype, np.float32, "safe"):
        return ()
    low, high = (edge.astype(np.float64) for edge in (inputs.min(axis=0), inputs.max(axis=0)))
    largest = np.maximum(np.abs(low), np.abs(high))
    steps = (high - low) / np.spacing(largest.astype(np.float32)).astype(np.float64)
    coarse = (steps < FEWEST_DIGITS_STEPS) & (high - low > _ROUNDING * largest)

    def note(position: int) -> str:
        index = tuple(int(i) for i in np.unravel_index(position, coarse.shape))
        column = f"Column {index[0]}" if len(index) == 1 else f"Position {index} of the inputs"
        return (
            f"{column} spans {low[index]:.17g} to {high[index]:.17g}, and float32 has about "
            f"{steps[index]:.2g} steps between the two. Subtract an offset before you save the "
            "data, or its differences are lost."
        )

    return _capped(np.flatnonzero(coarse), note, "are as coarse in float32")


def _is_rare(train: np.ndarray) -> np.ndarray:
    """Returns whether almost all rows of a column have the same value, bool[splits, features]."""
    count = train.shape[1]
    if count < FEWEST_ROWS_OF_RARE:
        return np.zeros((train.shape[0], train.shape[2]), bool)
    # A value that more than half of the rows have is the median.
    middle = np.partition(train, count // 2, axis=1)[:, count // 2 : count // 2 + 1]
    return (train != middle).sum(axis=1) <= max(1, int(RARE_SHARE * count))


def _splits(chosen: np.ndarray, total: int) -> str:
    """Returns the number of chosen splits in words."""
    return "the split" if total == 1 else f"{np.count_nonzero(chosen)} of {total} splits"


def _capped(columns: np.ndarray, note: Callable[[int], str], what: str) -> tuple[str, ...]:
    """Returns the notes on the first columns, and a note with the number of other columns."""
    notes = tuple(note(int(column)) for column in columns[:_MOST_NOTES])
    more = len(columns) - len(notes)
    return (*notes, f"{more:,} more columns {what}.") if more else notes
