"""Objectives, and the predictive distributions that interpret, pool and score outputs."""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.json_text import JsonDict
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.metric import Metric, along
from dist_ens.metrics.pooling import mean_of_members

Values = dict[str, jax.Array]
# A `Summary` is like `Values`, but its arrays are on the host. To export a calibrated prediction,
# methods that take one are traced, with arrays of JAX.
Summary = Mapping[str, np.ndarray]
Loss = Callable[[jax.Array, jax.Array], jax.Array]
TrainingScores = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]


class Distribution(Protocol):
    """The predictive distribution that outputs parametrise.

    A custom distribution is a frozen dataclass that inherits from this class. It must define
    `from_outputs`, `pool`, `row_statistics`, `predict` and `metrics`. The other methods have
    defaults for real targets.

    A *prediction* is a dict of arrays, each of which begins with the axes of the batch. Predictions
    of several members have a leading axis [members]. A *summary* is the part of a prediction that
    is copied to the host. Custom metrics, `predict` and calibration read it.

    Attributes:
        metrics: Metrics, in the order of the scores. A metric is computed if its row statistics
            exist.
        optional_metrics: Metrics that are computed only if they are asked for by name.
        error_statistic: Row statistic that measures the error of a prediction. It is NaN where the
            prediction is NaN. The hardest examples of a report are the wrong ones where it is
            highest.
        uncertainty_statistic: Row statistic that measures the uncertainty of a prediction. None if
            there is no such statistic.
        poolings: Ways to pool members, the default first.
        pooling: Way in which members are pooled.
        num_targets: Number of targets of an example, which are the last axis of its labels, its
            row statistics and the leaves of its summary. None if an example has one label, or one
            at each position.
        calibrations: Names of the maps that `calibrate` can fit.
        conformal: Names of the conformal methods for this distribution.
        lost_in_summary: Row statistics that a summary does not determine.

    >>> from dist_ens.losses import Gaussian
    >>> prediction = Gaussian().from_outputs(jnp.array([[[2.0, 0.0]]]))  # one sample, one example
    >>> Gaussian().row_statistics(prediction, jnp.array([5.0]))["absolute_error"].tolist()
    [3.0]
    """

    metrics: ClassVar[tuple[Metric, ...]]
    optional_metrics: ClassVar[tuple[Metric, ...]] = ()
    error_statistic: ClassVar[str] = "squared_error"
    uncertainty_statistic: ClassVar[str | None] = None
    poolings: ClassVar[tuple[str, ...]] = ("probs",)
    pooling: str = "probs"
    num_targets: int | None = None
    calibrations: ClassVar[tuple[str, ...]] = ()
    conformal: ClassVar[tuple[str, ...]] = ()
    lost_in_summary: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def from_outputs(self, outputs: jax.Array) -> Values:
        """Returns a member's prediction from its outputs, [samples, batch, ..., outputs].

        There is one sample, or several samples that were drawn with dropout.
        """
        ...

    @abc.abstractmethod
    def pool(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        """Returns the ensemble's prediction from its members', leaves [members, batch, ...].

        `weights` are those of the members, not negative and of sum 1, float32[members]. It is not
        passed if they are equal, so a distribution may leave it out, here and below.
        """
        ...

    @abc.abstractmethod
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """Returns the statistics from which metrics are computed, float32[batch, ...] each."""
        ...

    @abc.abstractmethod
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the ensemble's prediction and its uncertainty.

        Outputs are [members, batch, ..., outputs], with an axis behind the members if
        `has_samples`.
        """
        ...

    def diversity(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        """Returns statistics of the members' diversity, float32[batch, ...] each; default: none."""
        return {}

    def classwise(self, prediction: Values, labels: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the terms that a batch adds to sums over classes; default: an empty array.

        `weights` are a mask of the examples that count, bool[batch], or weights, float[batch, ...].
        """
        return jnp.zeros(0)

    def summary(self, prediction: Values) -> Values:
        """Returns the part of a prediction that is kept; default: all of it."""
        return dict(prediction)

    def from_summary(self, summary: Summary) -> Values:
        """Returns a prediction again from its summary."""
        return {name: jnp.asarray(values, jnp.float32) for name, values in summary.items()}

    def pool_summaries(self, summaries: Summary, weights: np.ndarray) -> Summary:
        """Returns the summaries pooled with weights of the members for each example.

        Default: the mean of each leaf, in float64. `weights` are float64[members, examples], and 0
        for a member that does not count.
        """
        return {
            name: mean_of_members(values.astype(np.float64), weights)
            for name, values in summaries.items()
        }

    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the predictions that users see; default: the summary, as locations of targets.

        Mean and std, float64[n] or float64[n, targets], are those by which the targets of each of n
        predictors were standardised; None if they were not.
        """
        if mean is None or std is None:
            return dict(summary)
        return {
            name: values * along(std, values) + along(mean, values)
            for name, values in summary.items()
        }

    def from_shown(self, shown: Summary) -> Summary:
        """Returns the summary of what `shown` returned, in the unit of the latter."""
        return dict(shown)

    def shown_of(self, prediction: Prediction) -> dict[str, np.ndarray]:
        """Returns the ensemble's part of a prediction in the form of `shown`; default: `mean`."""
        return {"mean": prediction.mean}

    def point(self, summary: Summary) -> np.ndarray:
        """Returns the point prediction, such as a mean or a median; default: `mean`."""
        return summary["mean"]

    def central_interval(self, summary: Summary, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the central intervals of probability `level`, for the method cqr."""
        raise TypeError(f"{type(self).__name__} predictions have no interval.")

    def probabilities(self, summary: Summary) -> np.ndarray:
        """Returns the probabilities of the classes, float64[..., classes], for conformal sets."""
        raise TypeError(f"{type(self).__name__} predictions have no classes.")

    def calibrate(
        self, method: str, summary: Summary, labels: np.ndarray
    ) -> tuple[JsonDict, tuple[str, ...]]:
        """Fits one of the maps in `calibrations` on summaries of validation data.

        Returns the parameters of the map as JSON values, and sentences about parameters that the
        data do not determine.
        """
        raise TypeError(f"{type(self).__name__} predictions have no calibration {method!r}.")

    def calibrated(self, method: str, parameters: JsonDict, summary: Summary) -> Summary:
        """Returns a summary after a map that `calibrate` has fitted; default: unchanged."""
        return summary

    def with_shown(self, prediction: Prediction, shown: Summary) -> Prediction:
        """Returns a prediction with a calibrated part as `shown` gives it; default: unchanged."""
        return prediction

    def with_pooling(self, name: str) -> Self:
        """Returns the distribution with another of its `poolings`; else raises a `UserError`."""
        if name not in self.poolings:
            raise UserError(
                f"pooling={name!r} does not fit {type(self).__name__} predictions, which are "
                f"pooled by one of {', '.join(self.poolings)}. Try pooling='probs'."
            )
        if name == self.pooling:
            return self
        return dataclasses.replace(self, pooling=name)  # type: ignore[type-var]


def with_samples(outputs: jax.Array, has_samples: bool) -> jax.Array:
    """Returns outputs with an axis of samples behind the members, of length 1 if it was absent."""
    return outputs if has_samples else outputs[:, None]


def checked_weights(
    weights: ArrayLike | None, num_members: int, distribution: Distribution | None = None
) -> np.ndarray | None:
    """Returns the weights of members in a pool, float64[members] with sum 1; None without weights.

    Raises a `UserError` if they are not one finite number for each member, one is negative or all
    are 0, or the distribution does not take weights.

    >>> checked_weights([3, 1], num_members=2)
    array([0.75, 0.25])
    """
    if weights is None:
        return None
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"weights is {kind_of(weights)}. Give one number a member.") from error
    if found.shape != (num_members,):
        raise UserError(
            f"weights have the shape {list(found.shape)}, and the members are {num_members}. "
            f"Give float[{num_members}], in the order of the state."
        )
    if not np.isfinite(found).all() or (found < 0).any() or not found.any():
        raise UserError(
            f"weights are {str(found.tolist())[:200]}. Give finite numbers of at least 0, of which "
            "one is above 0."
        )
    if distribution is not None and any(
        "weights" not in inspect.signature(method).parameters
        for method in (distribution.pool, distribution.predict, distribution.diversity)
    ):
        raise UserError(
            f"{type(distribution).__name__} pools all members equally. Give its methods pool, "
            "predict and diversity an argument weights=None, or leave weights out."
        )
    return found / found.sum()


def passed(weights: jax.Array | None) -> dict[str, jax.Array]:
    """Returns weights as an argument by name; none if the members have equal weights."""
    return {} if weights is None else {"weights": weights}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss of outputs and labels, with the predictive distribution that it trains.

    Attributes:
        name: Name of the objective.
        example_loss: Function of outputs [batch, ..., outputs] and labels [batch, ...] that
            returns the loss of each label, float[batch, ...]. Labels of several targets are
            [batch, ..., targets], and their loss is one number for each row of the outputs.
        distribution: Predictive distribution that the outputs parametrise. It brings the default
            metrics.
        training_scores: Function of outputs and labels that returns the scores to report with the
            training loss, `{name: float[batch, ...]}`.
        num_outputs: Number of outputs of the network for each label.
        num_classes: Number of classes; None for real targets. It is 2 for several labels of an
            example that are 0 or 1.
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, which `fit` sets in a state at step 0.
        has_heads: Whether outputs are those of a member with heads, [heads, batch, ..., outputs],
            which `of_heads` sets. The functions above are those of one head.
        joint: Loss of all heads together, from their outputs and the labels. Default: the mean of
            the heads' losses.

    >>> from dist_ens.losses import Point
    >>> absolute_error = Objective(
    ...     "absolute_error",
    ...     lambda outputs, targets: abs(targets - outputs[..., 0]),
    ...     Point(),
    ...     lambda outputs, targets: {},
    ...     num_outputs=1,
    ... )
    >>> absolute_error.example_loss(jax.numpy.array([[1.0]]), jax.numpy.array([3.0])).tolist()
    [2.0]
    """

    # These are the keys of a batch.
    INPUTS: ClassVar[str] = "inputs"
    LABELS: ClassVar[str] = "labels"
    WEIGHTS: ClassVar[str] = "weights"

    name: str
    example_loss: Loss
    distribution: Distribution
    training_scores: TrainingScores
    num_outputs: int
    num_classes: int | None = None
    standardize: bool = False
    has_heads: bool = False
    joint: Loss | None = None

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the labels of one row of the outputs: (), or (targets,) for several targets."""
        targets = self.distribution.num_targets
        return () if targets is None else (targets,)

    def losses(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the loss of each label, float[batch, ...], of a member's outputs."""
        if not self.has_heads:
            return self.example_loss(outputs, labels)
        if self.joint is not None:
            return self.joint(outputs, labels)
        return jax.vmap(self.example_loss, in_axes=(0, None))(outputs, labels).mean(axis=0)

    def scores(self, outputs: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Returns the training scores of each label, of heads their means."""
        if not self.has_heads:
            return self.training_scores(outputs, labels)
        of_heads = jax.vmap(self.training_scores, in_axes=(0, None))(outputs, labels)
        return {name: score.mean(axis=0) for name, score in of_heads.items()}

    def shares_of_labels(self, labels: jax.Array) -> jax.Array:
        """Returns labels that can be averaged: shares of the classes, or the real targets.

        Labels of classes are int[batch, ...], or already shares, float[batch, ..., classes]. The
        shares of several labels that are 0 or 1 are those of the ones, float[batch, ..., targets].

        >>> from dist_ens.losses import categorical
        >>> categorical(2).shares_of_labels(jax.numpy.array([1]))
        Array([[0., 1.]], dtype=float32)
        """
        if self.num_classes is None or jax.numpy.issubdtype(labels.dtype, jax.numpy.floating):
            return labels
        if self.label_shape:
            return labels.astype(jax.numpy.float32)
        return jax.nn.one_hot(labels, self.num_classes)
