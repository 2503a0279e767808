"""A metric: a statistic of each row, and its reduction over the rows to a score."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import jax
import numpy as np

from dist_ens.ground.errors import RunError, UserError, did_you_mean, first_line, kind_of
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import require_one_of
from dist_ens.ground.types import Labels, Leaf, Score
from dist_ens.metrics.resampling import mean_of

# A metric lists these names among its statistics if it needs the sums of `classwise_sums`, or
# weights that are whole numbers.
CLASSWISE = "classwise"
WHOLE_WEIGHTS = "whole_weights"


class Rows:
    """The row statistics of one predictor, from which its metrics are computed.

    Args:
        statistics: Statistics by name; float32[rows] each.
        classwise: Sums over all rows, see `classwise_sums`. None or empty without classes.
        unit: Standard deviation by which the targets were divided, a number or float64[targets]. 1
            for the targets' own unit.
        weights: Weight of each row, positive; float64[rows]. Default: all rows count equally.
        draws: Number of times each row counts in each resample; float32[draws, rows]. Default: the
            metrics of the rows themselves are computed.
        seed: Seed of the resamples of the sums over classes.
        num_targets: Number of targets of an example. Its rows are one for each target, in order.

    >>> Rows({"correct": np.array([1.0, 0.0])}, weights=np.array([3.0, 1.0])).mean("correct")
    0.75
    """

    def __init__(
        self,
        statistics: Mapping[str, np.ndarray],
        classwise: np.ndarray | None = None,
        unit: float | np.ndarray = 1.0,
        weights: np.ndarray | None = None,
        draws: np.ndarray | None = None,
        seed: int = 0,
        num_targets: int = 1,
    ) -> None:
        self.statistics = statistics
        self.classwise = classwise
        self._units = np.broadcast_to(unit, num_targets)
        self.seed = seed
        self.num_draws = None if draws is None else len(draws)
        if weights is None:
            self._weights = draws
        elif draws is None:
            self._weights = np.asarray(weights, np.float64)[None]
        else:
            self._weights = draws * weights.astype(np.float32)
        self._has_whole_weights = weights is None or bool((weights % 1 == 0).all())
        self._means: dict[str, Score] = {}

    def __contains__(self, name: str) -> bool:
        """Returns whether the statistic exists."""
        if name == WHOLE_WEIGHTS:
            return self._has_whole_weights
        if name == CLASSWISE:
            return self.classwise is not None and self.classwise.size > 0
        return name in self.statistics

    @property
    def unit(self) -> float:
        """Standard deviation by which the target was divided, of the first of several targets."""
        return float(self._units[0])

    @cached_property
    def targets(self) -> "list[Rows]":
        """The rows of each target."""
        count = len(self._units)
        return [self] if count == 1 else [self._of_target(t, count) for t in range(count)]

    def _of_target(self, target: int, count: int) -> "Rows":
        own, rows = slice(target, None, count), copy.copy(self)
        rows.statistics = {name: values[own] for name, values in self.statistics.items()}
        rows._units, rows._means = self._units[target : target + 1], {}
        if self._weights is not None:
            rows._weights = np.ascontiguousarray(self._weights[:, own])
        return rows

    def mean(self, name: str) -> Score:
        """Returns the weighted mean of a statistic: a float, or float64[draws] of resamples."""
        if name not in self._means:
            self._means[name] = self.of_weights(
                lambda weights: mean_of(self.statistics[name], weights)
            )
        return self._means[name]

    def of_weights(self, score: Callable[[np.ndarray | None], Score]) -> Score:
        """Returns a score, or scores of classes, that are a function of the rows' weights.

        Args:
            score: Function of the weights float[draws, rows] that returns float64[draws, ...].
                Without weights it is called with None, and returns a float or float64[...].
        """
        value = score(self._weights)
        if self.num_draws is None and self._weights is not None:
            return float(value[0]) if np.ndim(value[0]) == 0 else value[0]
        return value

    def ordered(self, score: Callable[[], Score]) -> Score:
        """Returns a score that orders or counts predictions; NaN if a prediction is NaN."""
        confidence, nll = (self.statistics.get(name, np.zeros(1)) for name in ("confidence", "nll"))
        if np.isfinite(confidence).all() and not np.isnan(nll).any():
            return score()
        return math.nan if self.num_draws is None else np.full(self.num_draws, np.nan)


Reduction = Callable[[Rows], Score]
Statistic = Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]
# It returns float64[draws or nothing, classes], NaN for a class that has no score.
ScoresOfClasses = Callable[[Rows], Score]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A score of predictions: a statistic of each row, and its reduction over the rows.

    A custom metric is a function of predictions and labels. Its score is the weighted mean of the
    function's values over all rows.

    The score of several targets is the mean of the targets' own scores. A score in nats is their
    sum, as that of independent targets.

    Attributes:
        name: Key of the score in `Scores`, files and log lines.
        statistic: Function `statistic(prediction, labels) -> float[batch, ...]` that returns one
            number for each label. `prediction` is the summary of a predictive distribution:
            `log_probs` [batch, ..., classes]; `mean` and `variance` [batch]; or `quantiles`
            [batch, levels]. Standardised targets stay standardised in both arguments. Default: the
            distribution computes the statistics.
        label: Name in reports; default: `name` with spaces.
        unit: Unit of the score: "nats", "target" for the unit of the labels, "target^2" for its
            square, or "" for a number without a unit.
        direction: Whether "lower" or "higher" is better. None if neither is.
        statistics: Names of the row statistics that the reduction takes; default: `name`.
        reduce: Function of `Rows` that returns a float, or float64[draws] of resamples; default:
            the weighted mean of the statistic, in the labels' own unit.
        by_class: Name and function of the scores of each class, of which the score is the mean.
            Classes without a score, such as those without examples, do not count. Several labels
            of an example that are 0 or 1 are such classes. The statistic may then return
            float[batch, ..., k], which the row statistics `{name}_0` to `{name}_{k - 1}` hold.
        interval: Kind of bootstrap interval: "percentile", or "unbiased", which subtracts the bias
            that resampling adds to a sum of distances.
        in_table: Whether the table on the screen has a column for the metric.

    Raises:
        UserError: If the name is empty, or a unit, a direction or an interval is unknown.

    >>> miss = Metric("miss", lambda p, y: (p["log_probs"].argmax(-1) != y) * 1.0)
    >>> miss.label, miss.statistics
    ('miss', ('miss',))
    """

    name: str
    statistic: Statistic | None = None
    _: dataclasses.KW_ONLY
    label: str = ""
    unit: str = ""
    direction: str | None = None
    statistics: tuple[str, ...] = ()
    reduce: Reduction | None = None
    by_class: tuple[str, ScoresOfClasses] | None = None
    interval: str = "percentile"
    in_table: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name == "member_id":
            raise UserError(
                f"The metric's name is {self.name!r}, which cannot name a score. Choose another "
                "name."
            )
        require_one_of("unit", self.unit or "nats", ("nats", "target", "target^2"))
        require_one_of("direction", self.direction or "lower", ("lower", "higher"))
        require_one_of("interval", self.interval, ("percentile", "unbiased"))
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))
        object.__setattr__(self, "statistics", self.statistics or (self.name,))

    def score(self, rows: Rows) -> Score:
        """Returns the metric of some rows: a float, or float64[draws] of resamples.

        Raises:
            RunError: If `reduce` raises an exception, or returns no number.
        """
        if self.by_class is not None:
            of_classes = self.by_class[1]
            return rows.ordered(lambda: _mean_of_classes(np.asarray(of_classes(rows))))
        scores = [self._of_target(each) for each in rows.targets]
        value = np.sum(scores, axis=0) if self.unit == "nats" else np.mean(scores, axis=0)
        return float(value) if np.ndim(value) == 0 else value

    def _of_target(self, rows: Rows) -> Score:
        if self.reduce is None:
            return in_own_unit(self.unit, rows.mean(self.statistics[0]), rows.unit)
        try:
            value = self.reduce(rows)
            return float(value) if np.ndim(value) == 0 else value
        except Exception as error:  # A function of the user may raise anything.
            raise RunError(
                f"The function reduce of the metric {self.name!r} raised {type(error).__name__}: "
                f"{first_line(error)} Correct the function, or leave the metric out."
            ) from error

    def describe(self) -> JsonDict:
        """Returns label, unit and direction as JSON values."""
        return {"label": self.label, "unit": self.unit, "direction": self.direction}


def checked_metrics(metrics: object) -> tuple[Metric | str, ...]:
    """Returns a user's metrics as a tuple; raises a `UserError` if they are no list of them."""
    if isinstance(metrics, Metric | str) or not isinstance(metrics, Iterable):
        raise UserError(
            f"metrics is {kind_of(metrics)}, not a list. Give a list of metrics: metrics=[...]."
        )
    metrics = tuple(metrics)
    for metric in metrics:
        if not isinstance(metric, Metric | str):
            raise UserError(
                f"metrics holds {kind_of(metric)}, not a Metric. Make one of a function: "
                'dist_ens.metrics.Metric("name", function).'
            )
    return metrics


def named_metrics(
    metrics: Iterable[Metric | str], optional: Iterable[Metric]
) -> tuple[Metric, ...]:
    """Returns metrics, of which names are those of optional ones; raises if there is none."""
    known = {metric.name: metric for metric in optional}
    for metric in metrics:
        if isinstance(metric, str) and metric not in known:
            raise UserError(
                f"metrics has the name {metric!r}.{did_you_mean(metric, known)} These predictions "
                f"have the optional metrics {', '.join(known) or 'none'}."
            )
    return tuple(known[metric] if isinstance(metric, str) else metric for metric in metrics)


def _mean_of_classes(scores: np.ndarray) -> Score:
    """Returns the mean over the last axis without NaN; NaN if nothing else is there."""
    are_there = ~np.isnan(scores)
    with np.errstate(invalid="ignore"):
        value = np.where(are_there, scores, 0).sum(axis=-1) / are_there.sum(axis=-1)
    return float(value) if np.ndim(value) == 0 else value


def scores_of(metrics: Iterable[Metric], rows: Rows) -> dict[str, Score]:
    """Computes the metrics whose statistics exist; a float or float64[draws] each.

    Args:
        metrics: Metrics, in the order of the result. If two have the same name, the first one that
            can be computed is used.
        rows: Row statistics of one predictor.

    Raises:
        ValueError: If there is no row.

    >>> scores_of([Metric("miss")], Rows({"miss": np.array([1.0, 0.0])}))
    {'miss': 0.5}
    """
    if not all(len(values) for values in rows.statistics.values()):
        raise ValueError("There are no rows to score. Give at least one example.")
    scores: dict[str, Score] = {}
    for metric in metrics:
        if metric.name not in scores and all(name in rows for name in metric.statistics):
            scores[metric.name] = metric.score(rows)
    return scores


def in_own_unit(unit: str, value: Score, scale: Leaf, shift: float = 0.0) -> Score:
    """Converts a number about standardised targets to the targets' own unit, if it has one.

    The unit may also be "position" for a target itself, or "log density" for the negative logarithm
    of a density over targets.
    """
    if unit == "target":
        return value * scale
    if unit == "target^2":
        return value * scale**2
    if unit == "position":
        return value * scale + shift
    if unit == "log density":
        return value + math.log(scale)
    return value


def one_a_row(labels: Labels, rows: tuple[int, ...]) -> Labels:
    """Returns labels without an axis of length 1 that the predictions do not have.

    A column of labels [batch, 1] and predictions [batch] would broadcast to [batch, batch].
    """
    at, shape = len(rows), np.shape(labels)
    if shape[: at + 1] == (*rows, 1):
        shape = rows + shape[at + 1 :]
        labels = labels.reshape(shape)
    try:
        both = np.broadcast_shapes(shape, rows)
    except ValueError:
        return labels  # The caller compares the shapes.
    if both not in (shape, rows):
        raise UserError(
            f"The labels have the shape {list(shape)}, and the predictions {list(rows)}: together "
            f"they would have {list(both)}. Give one label for each prediction."
        )
    return labels


def along(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Returns values [n] or [n, targets] as they broadcast against `like`, [n, ..., targets]."""
    count, *targets = values.shape
    return values.reshape(count, *(1,) * (like.ndim - values.ndim), *targets)
