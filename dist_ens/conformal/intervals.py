"""Intervals for real targets."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dist_ens.conformal.quantile import conformal_quantile, quantile_rank
from dist_ens.errors import UserError
from dist_ens.metrics import mean_of

# Of one array of rows by training examples, of which up to four exist at a time.
_CHUNK_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class PredictionIntervals:
    """From intervals, calibrated ones: each end is moved outwards by `margin`.

    Attributes:
        margin: In the targets' unit; negative where the intervals were too wide.
    """

    margin: float

    def __call__(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The calibrated lower and upper ends, float64[rows] each.

        An interval that a negative margin turns around, lower > upper, is empty.

        Args:
            lower: Of the same model as at calibration, in the targets' unit; float[rows].
            upper: Likewise.

        Raises:
            UserError: For NaN, or not equally many.
        """
        lower, upper = _numbers(lower=lower, upper=upper)
        return lower - self.margin, upper + self.margin


def split_cqr(
    lower: np.ndarray, upper: np.ndarray, targets: np.ndarray, level: float
) -> PredictionIntervals:
    """Conformalised quantile regression: intervals widened, or narrowed, to their level.

        score(x, y) = max(lower(x) - y, y - upper(x))

    For an ensemble of normal distributions give its own central interval,
    mean -+ scipy.stats.norm.ppf((1 + level) / 2) * sqrt(variance).

    Args:
        lower: Of calibration examples, in the targets' unit; float[n].
        upper: Likewise.
        targets: float[n].
        level: In (0, 1); that of the intervals given need not be the same.

    Returns:
        What moves the ends of intervals.

    Raises:
        UserError: For numbers or a level that cannot be, or too few examples.

    >>> zeros = np.zeros(4)  # with targets 1 to 4 the intervals [0, 0] miss by 1 to 4
    >>> split_cqr(zeros, zeros, np.array([3.0, 1.0, 4.0, 2.0]), level=0.6)
    PredictionIntervals(margin=3.0)

    Source: Romano et al. (2019), https://arxiv.org/abs/1905.03222.
    """
    lower, upper, targets = _numbers(lower=lower, upper=upper, targets=targets)
    scores = np.maximum(lower - targets, targets - upper)
    return PredictionIntervals(conformal_quantile(scores, level))


def cv_plus(
    residuals: np.ndarray,
    model_of_example: np.ndarray,
    held_out_predictions: np.ndarray,
    level: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Intervals from models that each left out a fold; no examples are kept for calibration.

        lower(x) = the k-th largest of mu_{-i}(x) - residual_i,  k = ceil((n + 1) * level)
        upper(x) = the k-th smallest of mu_{-i}(x) + residual_i

    over the training examples i, where mu_{-i} is the model that left out i. Coverage is about
    `level`, and never below 2 * level - 1 - sqrt(2 / n). With one model for each example these are
    the intervals of the jackknife+, whose bound is 2 * level - 1.

    Args:
        residuals: |y_i - mu_{-i}(x_i)| of each training example, in the targets' unit; float[n].
        model_of_example: The model that left the example out; int[n], in [0, models).
        held_out_predictions: Of each model at the rows to predict; float[models, rows].
        level: In (0, 1).

    Returns:
        The lower and upper ends, float64[rows] each.

    Raises:
        UserError: For arrays that do not fit together, numbers or a level that cannot be, or too
            few examples.

    >>> cv_plus(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]), np.array([[10.0], [20.0]]), 0.5)
    (array([9.]), array([12.]))

    Source: Barber et al. (2021), https://arxiv.org/abs/1905.02928.
    """
    residuals, predictions = _checked_held_out(residuals, held_out_predictions)
    model_of_example = np.asarray(model_of_example)
    if (
        model_of_example.shape != residuals.shape
        or model_of_example.dtype.kind not in "iu"
        or not ((model_of_example >= 0) & (model_of_example < len(predictions))).all()
    ):
        raise UserError(
            "model_of_example is int[examples], the index of the model that left the example out. "
            f"Received: {model_of_example.dtype}{list(model_of_example.shape)} for "
            f"{len(residuals):,} residuals and {len(predictions):,} models. Give the fold of each "
            "example, from 0."
        )
    return _plus(residuals, predictions, lambda part: part[:, model_of_example], level)


def jackknife_plus(
    residuals: np.ndarray, out_of_bag: np.ndarray, member_predictions: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """The intervals of `cv_plus` from an ensemble trained on bootstrap samples: no model is added.

        mu_{-i}(x) = mean of the predictions of the members whose sample lacks example i

    Coverage is about `level`; the bound 2 * level - 1 holds where the number of members was drawn
    from a binomial distribution.

    Args:
        residuals: |y_i - mu_{-i}(x_i)| of each training example, with `out_of_bag_means`, in the
            targets' unit; float[n].
        out_of_bag: Whether a member's sample lacks an example; bool[members, n].
        member_predictions: At the rows to predict; float[members, rows].
        level: In (0, 1).

    Returns:
        The lower and upper ends, float64[rows] each.

    Raises:
        UserError: For an example in the samples of all members, arrays that do not fit together,
            numbers or a level that cannot be, or too few examples.

    >>> out_of_bag = np.array([[True, True, False], [False, True, True]])
    >>> jackknife_plus(np.array([1.0, 2.0, 3.0]), out_of_bag, np.array([[10.0], [20.0]]), 0.5)
    (array([13.]), array([17.]))

    Source: Kim, Xu and Barber (2020), https://arxiv.org/abs/2002.09025.
    """
    residuals, predictions = _checked_held_out(residuals, member_predictions)
    weights = _out_of_bag_weights(out_of_bag, (len(predictions), len(residuals)))
    return _plus(residuals, predictions, lambda part: part @ weights, level)


def out_of_bag_means(out_of_bag: np.ndarray, member_predictions: np.ndarray) -> np.ndarray:
    """For each training example the mean prediction of the members that were not trained on it.

    Args:
        out_of_bag: Whether a member's sample lacks an example; bool[members, n].
        member_predictions: At the training examples; float[members, n].

    Returns:
        float64[n]. The residuals of `jackknife_plus` are |targets - out_of_bag_means(…)|.

    Raises:
        UserError: For an example in the samples of all members, or arrays that do not fit together.

    >>> out_of_bag = np.array([[True, True, False], [False, True, True]])
    >>> out_of_bag_means(out_of_bag, np.array([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]))
    array([1., 4., 7.])
    """
    predictions = np.asarray(member_predictions, np.float64)
    weights = _out_of_bag_weights(out_of_bag, predictions.shape)
    return (weights * predictions).sum(axis=0)


def coverage_of_intervals(
    lower: np.ndarray, upper: np.ndarray, targets: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """The share of rows whose interval, ends included, holds the target, in [0, 1].

    Args:
        lower: In the targets' unit; float[rows].
        upper: Likewise.
        targets: float[rows].
        weights: How often each row is drawn; float[draws, rows]. None: once.

    Returns:
        A float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, not equally many, or NaN.

    >>> coverage_of_intervals(np.zeros(2), np.ones(2), np.array([1.0, 2.0]))
    0.5
    """
    lower, upper, targets = _numbers(lower=lower, upper=upper, targets=targets)
    return mean_of((lower <= targets) & (targets <= upper), weights)


def mean_width(
    lower: np.ndarray, upper: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """The mean width of the intervals, in the targets' unit; that of an empty one is 0.

    Args:
        lower: In the targets' unit; float[rows].
        upper: Likewise.
        weights: As in `coverage_of_intervals`.

    Returns:
        Likewise.

    Raises:
        UserError: If there are no rows, not equally many, or NaN.

    >>> mean_width(np.array([0.0, 2.0]), np.array([3.0, 1.0]))
    1.5
    """
    lower, upper = _numbers(lower=lower, upper=upper)
    return mean_of(np.maximum(upper - lower, 0), weights)


def _plus(
    residuals: np.ndarray,
    predictions: np.ndarray,
    held_out: Callable[[np.ndarray], np.ndarray],
    level: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The intervals of `cv_plus`; `held_out`: predictions [rows, models] -> mu_{-i} [rows, n]."""
    rank = quantile_rank(len(residuals), level)
    num_rows = predictions.shape[1]
    lower, upper = np.empty(num_rows), np.empty(num_rows)
    # All rows by all examples at once could be more than there is memory.
    chunk = max(1, _CHUNK_BYTES // residuals.nbytes)
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        centres = held_out(predictions[:, part].T)
        upper[part] = _kth_smallest(centres + residuals, rank)
        lower[part] = -_kth_smallest(residuals - centres, rank)
    return lower, upper


def _kth_smallest(values: np.ndarray, k: int) -> np.ndarray:
    """The k-th smallest of each row, k from 1; leaves the rows in another order."""
    values.partition(k - 1, axis=1)
    return values[:, k - 1]


def _out_of_bag_weights(out_of_bag: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of each member in mu_{-i}, float64[members, n]; those of an example sum to 1."""
    out_of_bag = np.asarray(out_of_bag)
    if out_of_bag.dtype != bool or out_of_bag.ndim != 2 or out_of_bag.shape != shape:
        raise UserError(
            "out_of_bag is bool[members, examples]. Received: "
            f"{out_of_bag.dtype}{list(out_of_bag.shape)}, with predictions and examples of shape "
            f"{list(shape)}. Give a row for each member, True where it did not see the example."
        )
    num_members = out_of_bag.sum(axis=0)
    seen_by_all = np.count_nonzero(num_members == 0)
    if seen_by_all:
        raise UserError(
            "Every example is left out by at least one member. Received: "
            f"{seen_by_all:,} of {out_of_bag.shape[1]:,} examples that all "
            f"{len(out_of_bag)} members were trained on. Train more members."
        )
    return out_of_bag / num_members


def _checked_held_out(
    residuals: np.ndarray, predictions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    (residuals,) = _numbers(residuals=residuals)
    predictions = np.asarray(predictions)
    if not (residuals >= 0).all():
        raise UserError(
            f"A residual is at least 0. Received: {residuals.min()}. Give |target - prediction|."
        )
    if predictions.ndim != 2 or not len(predictions) or not np.isfinite(predictions).all():
        raise UserError(
            "Predictions are float[models, rows], all finite. Received: shape "
            f"{list(predictions.shape)}, {np.count_nonzero(~np.isfinite(predictions)):,} not "
            "finite. Give those of every model at every row."
        )
    return residuals, predictions


def _numbers(**arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays as float64[rows], if they have the same rows, at least one, and no NaN."""
    numbers = [np.asarray(array, np.float64) for array in arrays.values()]
    rows = numbers[0].shape
    if len(rows) != 1 or not rows[0] or any(array.shape != rows for array in numbers):
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in zip(arrays, numbers, strict=True))
        raise UserError(
            "Numbers are float[rows], at least one row, of the same rows. Received: "
            f"{shapes}. Give one number for each row."
        )
    for name, array in zip(arrays, numbers, strict=True):
        if np.isnan(array).any():
            raise UserError(
                f"Numbers are never NaN. Received: {np.count_nonzero(np.isnan(array)):,} NaN of "
                f"{len(array):,} in {name}. Leave these rows out."
            )
    return numbers
