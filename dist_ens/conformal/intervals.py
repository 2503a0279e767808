"""Prediction intervals for real targets."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dist_ens.conformal.quantile import conformal_quantile, quantile_rank
from dist_ens.errors import UserError
from dist_ens.metrics import mean_of

# Size of one array of rows by training examples. Up to four of them exist at the same time.
_CHUNK_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class PredictionIntervals:
    """A map from intervals to calibrated intervals: it moves each end outwards by `margin`.

    Attributes:
        margin: Distance by which each end is moved, in the targets' unit. It is negative if the
            intervals were too wide.
    """

    margin: float

    def __call__(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the calibrated lower and upper ends, float64[rows] each.

        A negative margin can make the lower end larger than the upper end. Such an interval is
        empty.

        Args:
            lower: Lower ends, from the model that was calibrated, in the targets' unit;
                float[rows].
            upper: Upper ends, in the targets' unit; float[rows].

        Raises:
            UserError: If an end is NaN, there are no rows, or the lengths differ.
        """
        lower, upper = _numbers(lower=lower, upper=upper)
        return lower - self.margin, upper + self.margin


def split_cqr(
    lower: np.ndarray, upper: np.ndarray, targets: np.ndarray, level: float
) -> PredictionIntervals:
    """Calibrates intervals by conformalised quantile regression.

        score(x, y) = max(lower(x) - y, y - upper(x))
        margin = conformal_quantile(scores, level)

    An ensemble of normal distributions can use its central intervals:
    mean -+ scipy.stats.norm.ppf((1 + level) / 2) * sqrt(variance).

    Args:
        lower: Lower ends for the calibration examples, in the targets' unit; float[n].
        upper: Upper ends for the calibration examples, in the targets' unit; float[n].
        targets: Targets of the calibration examples; float[n].
        level: Requested coverage, in (0, 1). The given intervals may have another level.

    Returns:
        The map that widens or narrows the model's intervals.

    Raises:
        UserError: If a number is NaN, the lengths differ, `level` is not in (0, 1), or there are
            too few examples for the level.

    >>> zeros = np.zeros(4)  # the intervals [0, 0] miss the targets by 3, 1, 4 and 2
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
    """Computes CV+ intervals from the models of a k-fold cross-validation.

        lower(x) = the k-th largest of mu_{-i}(x) - residual_i,  k = ceil((n + 1) * level)
        upper(x) = the k-th smallest of mu_{-i}(x) + residual_i

    Both are taken over the training examples i. The model mu_{-i} was trained without the fold of
    example i, so no separate calibration examples are needed. Coverage is about `level`, and at
    least 2 * level - 1 - sqrt(2 / n). With one model for each example the method is the jackknife+,
    whose bound is 2 * level - 1.

    Args:
        residuals: |y_i - mu_{-i}(x_i)| of each training example, in the targets' unit; float[n].
        model_of_example: Index of the model that was trained without the example; int[n], in
            [0, models).
        held_out_predictions: Prediction of each model for each row to predict; float[models, rows].
        level: Requested coverage, in (0, 1).

    Returns:
        The lower and upper ends, float64[rows] each.

    Raises:
        UserError: If the shapes do not match, a model index or `level` is out of range, or there
            are too few examples; if a residual is negative or NaN, or a prediction is not finite.

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
            f"model_of_example is {model_of_example.dtype}{list(model_of_example.shape)}, which "
            f"does not give each of {len(residuals):,} residuals one of {len(predictions):,} "
            "models. Give the fold of each example, a whole number from 0."
        )
    return _plus(residuals, predictions, lambda part: part[:, model_of_example], level)


def jackknife_plus(
    residuals: np.ndarray, out_of_bag: np.ndarray, member_predictions: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Computes jackknife+-after-bootstrap intervals from an ensemble trained on bootstrap samples.

        mu_{-i}(x) = mean of the predictions of the members whose sample lacks example i

    The ends are those of `cv_plus` with this mu_{-i}, so no further model is trained. Coverage is
    about `level`. The bound 2 * level - 1 holds if the number of members was drawn from a binomial
    distribution.

    Args:
        residuals: |y_i - mu_{-i}(x_i)| of each training example, where mu_{-i}(x_i) comes from
            `out_of_bag_means`, in the targets' unit; float[n].
        out_of_bag: Whether a member's sample lacks an example; bool[members, n].
        member_predictions: Prediction of each member for each row to predict;
            float[members, rows].
        level: Requested coverage, in (0, 1).

    Returns:
        The lower and upper ends, float64[rows] each.

    Raises:
        UserError: If an example is in the samples of all members, the shapes do not match, `level`
            is out of range, or there are too few examples; if a residual is negative or NaN, or a
            prediction is not finite.

    >>> out_of_bag = np.array([[True, True, False], [False, True, True]])
    >>> jackknife_plus(np.array([1.0, 2.0, 3.0]), out_of_bag, np.array([[10.0], [20.0]]), 0.5)
    (array([13.]), array([17.]))

    Source: Kim, Xu and Barber (2020), https://arxiv.org/abs/2002.09025.
    """
    residuals, predictions = _checked_held_out(residuals, member_predictions)
    weights = _out_of_bag_weights(out_of_bag, (len(predictions), len(residuals)))
    return _plus(residuals, predictions, lambda part: part @ weights, level)


def out_of_bag_means(out_of_bag: np.ndarray, member_predictions: np.ndarray) -> np.ndarray:
    """Computes the out-of-bag mean prediction of each training example.

        mean_i = mean of member_predictions[m, i] over the members m with out_of_bag[m, i]

    Args:
        out_of_bag: Whether a member's sample lacks an example; bool[members, n].
        member_predictions: Prediction of each member for each training example; float[members, n].

    Returns:
        The means, float64[n]. The residuals of `jackknife_plus` are
        |targets - out_of_bag_means(…)|.

    Raises:
        UserError: If an example is in the samples of all members, or the shapes do not match.

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
    """Computes the fraction of rows whose interval contains the target.

        coverage = mean of [lower <= target <= upper]

    Args:
        lower: Lower ends, in the targets' unit; float[rows].
        upper: Upper ends, in the targets' unit; float[rows].
        targets: Targets; float[rows].
        weights: Number of times each row is drawn in each resample; float[draws, rows]. Default:
            every row counts once.

    Returns:
        Coverage in [0, 1]: a float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, the lengths differ, or a number is NaN.

    >>> coverage_of_intervals(np.zeros(2), np.ones(2), np.array([1.0, 2.0]))
    0.5
    """
    lower, upper, targets = _numbers(lower=lower, upper=upper, targets=targets)
    return mean_of((lower <= targets) & (targets <= upper), weights)


def mean_width(
    lower: np.ndarray, upper: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """Computes the mean width of the intervals.

        width = mean of max(upper - lower, 0)

    Args:
        lower: Lower ends, in the targets' unit; float[rows].
        upper: Upper ends, in the targets' unit; float[rows].
        weights: Number of times each row is drawn in each resample; float[draws, rows]. Default:
            every row counts once.

    Returns:
        Mean width in the targets' unit: a float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, the lengths differ, or a number is NaN.

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
    """Computes the intervals of `cv_plus`.

    Args:
        residuals: Residuals of the training examples; float64[n].
        predictions: Prediction of each model for each row to predict; float[models, rows].
        held_out: Function from predictions [rows, models] to the values mu_{-i}, [rows, n].
        level: Requested coverage, in (0, 1).
    """
    rank = quantile_rank(len(residuals), level)
    num_rows = predictions.shape[1]
    lower, upper = np.empty(num_rows), np.empty(num_rows)
    # An array of all rows by all examples may not fit in memory.
    chunk = max(1, _CHUNK_BYTES // residuals.nbytes)
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        centres = held_out(predictions[:, part].T)
        upper[part] = _kth_smallest(centres + residuals, rank)
        lower[part] = -_kth_smallest(residuals - centres, rank)
    return lower, upper


def _kth_smallest(values: np.ndarray, k: int) -> np.ndarray:
    """Returns the k-th smallest value of each row, k from 1. Reorders the rows in place."""
    values.partition(k - 1, axis=1)
    return values[:, k - 1]


def _out_of_bag_weights(out_of_bag: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weight of each member in mu_{-i}, float64[members, n].

    The weights of an example sum to 1.
    """
    out_of_bag = np.asarray(out_of_bag)
    if out_of_bag.dtype != bool or out_of_bag.ndim != 2 or out_of_bag.shape != shape:
        raise UserError(
            f"out_of_bag is {out_of_bag.dtype}{list(out_of_bag.shape)}, and the members and "
            f"examples need bool{list(shape)}. Give a row for each member, True for the examples "
            "that its sample lacks."
        )
    num_members = out_of_bag.sum(axis=0)
    seen_by_all = np.count_nonzero(num_members == 0)
    if seen_by_all:
        raise UserError(
            f"{seen_by_all:,} of {out_of_bag.shape[1]:,} examples are in the samples of all "
            f"{len(out_of_bag)} members, so that no member predicts them out-of-bag. Train more "
            "members."
        )
    return out_of_bag / num_members


def _checked_held_out(
    residuals: np.ndarray, predictions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the residuals as float64[n] and the predictions; raises if they are invalid."""
    (residuals,) = _numbers(residuals=residuals)
    predictions = np.asarray(predictions)
    if not (residuals >= 0).all():
        raise UserError(
            f"Residuals are negative, the smallest is {residuals.min()}. Give "
            "|target - prediction|."
        )
    if predictions.ndim != 2 or not len(predictions) or not np.isfinite(predictions).all():
        raise UserError(
            f"The predictions have the shape {list(predictions.shape)}, and "
            f"{np.count_nonzero(~np.isfinite(predictions)):,} of them are not finite. Give the "
            "finite prediction of every model for every row, float[models, rows]."
        )
    return residuals, predictions


def _numbers(**arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays as float64[rows]; raises if lengths differ or are 0, or for NaN."""
    numbers = [np.asarray(array, np.float64) for array in arrays.values()]
    rows = numbers[0].shape
    if len(rows) != 1 or not rows[0] or any(array.shape != rows for array in numbers):
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in zip(arrays, numbers, strict=True))
        raise UserError(
            f"The shapes {shapes} are not those of the same rows. Give each array one number for "
            "each row, and at least one row."
        )
    for name, array in zip(arrays, numbers, strict=True):
        if np.isnan(array).any():
            raise UserError(
                f"{np.count_nonzero(np.isnan(array)):,} of {len(array):,} numbers in {name} are "
                "NaN. Leave these rows out."
            )
    return numbers
