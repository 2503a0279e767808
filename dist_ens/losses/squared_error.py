"""Real targets without a predicted variance: the squared error, and the point it trains."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.losses.distribution import Distribution, Summary, Values
from dist_ens.losses.gaussian import Gaussian, squared_error_score
from dist_ens.losses.objective import Objective
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import REGRESSION
from dist_ens.metrics.metric import Metric
from dist_ens.metrics.regression import regression_values

# Points are normal distributions without a variance: they are pooled and kept alike.
_NORMAL = Gaussian()


def mse(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the squared error of a prediction without a variance.

    Args:
        outputs: Predictions, float[..., 1].
        targets: Targets, float[...].

    Returns:
        Losses in the targets' unit squared, float[...].
    """
    return jnp.square(targets - outputs[..., 0])


@dataclasses.dataclass(frozen=True)
class Point(Distribution):
    """A point prediction of a real target; several members spread around their mean.

    Attributes:
        pooling: "probs" or "mixture"; the mean of the points is the same.
    """

    pooling: str = "probs"
    metrics: ClassVar[tuple[Metric, ...]] = REGRESSION
    uncertainty_statistic: ClassVar[str | None] = "variance"
    poolings: ClassVar[tuple[str, ...]] = ("probs", "mixture")
    conformal: ClassVar[tuple[str, ...]] = ("cv+", "jackknife+")
    lost_in_summary: ClassVar[tuple[str, ...]] = ("mixture_nll", "crps")

    def from_outputs(self, outputs: jax.Array) -> Values:
        """See `Distribution`."""
        mean = jnp.moveaxis(outputs.astype(jnp.float32)[..., 0], 0, -1)
        return {"mean": mean, "variance": jnp.zeros_like(mean)}

    def pool(self, predictions: Values) -> Values:
        """See `Distribution`. The points of all members are those of the ensemble."""
        return _NORMAL.pool(predictions)

    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Distribution`."""
        mean, variance = (jnp.moveaxis(prediction[name], -1, 0) for name in ("mean", "variance"))
        values = regression_values(mean, variance, labels, as_one=True)
        several = ("variance",) if len(mean) > 1 else ()
        of_points = ("prediction", "squared_error", "absolute_error", "crps", *several)
        return {name: values[name] for name in of_points}

    def predict(self, outputs: jax.Array, *, has_samples: bool = False) -> Prediction:
        """Returns the mean of the points; see `Distribution` and `Prediction`.

        `aleatoric` is None. `epistemic`, the variance of the points, is all of `total`.
        """
        outputs = outputs.astype(jnp.float32)[..., 0]
        points = outputs.reshape(-1, *outputs.shape[2:]) if has_samples else outputs
        epistemic = jnp.var(points, axis=0)
        return Prediction(
            mean=points.mean(axis=0),
            total=epistemic,
            aleatoric=None,
            epistemic=epistemic,
            members=outputs.mean(axis=1) if has_samples else outputs,
            std=jnp.sqrt(epistemic),
            unit="target",
        )

    def summary(self, prediction: Values) -> Values:
        """See `Distribution`. The mean and the variance of the points are kept."""
        return _NORMAL.summary(prediction)

    def from_summary(self, summary: Summary) -> Values:
        """See `Distribution`."""
        return _NORMAL.from_summary(summary)

    def pool_summaries(self, summaries: Summary, masks: np.ndarray) -> Summary:
        """See `Distribution`."""
        return _NORMAL.pool_summaries(summaries, masks)

    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns `mean` and `variance` of the points; see `Distribution`."""
        return _NORMAL.shown(summary, mean, std)


def squared_error(standardize: bool = False) -> Objective:
    """Returns the objective of real targets without a predicted variance: the squared error.

    Args:
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, and predictions are in the targets' own unit again. `fit` sets the two
            numbers in a state at step 0; `Ensemble.update` alone does not.
    """
    return Objective(
        "squared_error", mse, Point(), squared_error_score, num_outputs=1, standardize=standardize
    )
