"""Quantiles of real targets: the pinball loss, and the quantiles that it trains."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError
from dist_ens.losses.distribution import Distribution, Summary, Values, with_samples
from dist_ens.losses.gaussian import squared_error_score
from dist_ens.losses.objective import Objective
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import REGRESSION
from dist_ens.metrics.metric import Metric


def pinball(outputs: jax.Array, targets: jax.Array, *, levels: tuple[float, ...]) -> jax.Array:
    """Computes the mean pinball loss over quantile levels.

        loss = mean_q max(q (target - output_q), (q - 1) (target - output_q))

    Args:
        outputs: Predicted quantile of each level, float[..., levels].
        targets: Targets, float[...].
        levels: Quantile levels, in (0, 1).

    Returns:
        Losses in the targets' unit, float[...].

    >>> float(pinball(jnp.array([1.0]), jnp.array(3.0), levels=(0.75,)))
    1.5

    Source: Koenker and Bassett (1978), "Regression Quantiles".
    """
    error = targets[..., None] - outputs
    level = jnp.broadcast_to(jnp.asarray(levels, outputs.dtype), error.shape)
    return jnp.maximum(level * error, (level - 1) * error).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Quantiles(Distribution):
    """Quantiles of a real target.

    Attributes:
        levels: Quantile levels, ascending, in (0, 1), with 0.5 in the middle.
    """

    levels: tuple[float, ...]
    metrics: ClassVar[tuple[Metric, ...]] = REGRESSION
    uncertainty_statistic: ClassVar[str | None] = "width"
    conformal: ClassVar[tuple[str, ...]] = ("cqr", "cv+", "jackknife+")

    def from_outputs(self, outputs: jax.Array) -> Values:
        """See `Distribution`. Quantiles that cross are sorted."""
        return {"quantiles": jnp.sort(outputs.astype(jnp.float32), axis=-1).mean(axis=0)}

    def pool(self, predictions: Values) -> Values:
        """See `Distribution`. Each quantile is the mean of the members'."""
        return {"quantiles": predictions["quantiles"].mean(axis=0)}

    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Distribution`."""
        quantiles = prediction["quantiles"]
        low, median, high = (
            quantiles[..., at] for at in (0, len(self.levels) // 2, len(self.levels) - 1)
        )
        return {
            "prediction": median,
            "squared_error": jnp.square(labels - median),
            "absolute_error": jnp.abs(labels - median),
            "pinball": pinball(quantiles, labels, levels=self.levels),
            "inside": jnp.where(jnp.isnan(high - low), jnp.nan, (low <= labels) & (labels <= high)),
            "width": high - low,
        }

    def predict(self, outputs: jax.Array, *, has_samples: bool = False) -> Prediction:
        """Returns the pooled quantiles and their median; see `Distribution` and `Prediction`.

        `epistemic` is the variance of the members' medians. `total` and `aleatoric` are None.
        """
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        quantiles = self.pool(predictions)["quantiles"]
        middle = len(self.levels) // 2
        medians = predictions["quantiles"][..., middle]
        return Prediction(
            mean=quantiles[..., middle],
            total=None,
            aleatoric=None,
            epistemic=jnp.var(medians, axis=0),
            members=medians,
            quantiles=quantiles,
            unit="target",
        )

    def point(self, summary: Summary) -> np.ndarray:
        """Returns the median; see `Distribution`."""
        quantiles = summary["quantiles"]
        return quantiles[..., quantiles.shape[-1] // 2]

    def central_interval(self, summary: Summary, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outermost quantiles, whatever the level; see `Distribution`."""
        quantiles = summary["quantiles"].astype(np.float64)
        return quantiles[..., 0], quantiles[..., -1]


def quantiles(
    levels: tuple[float, ...] = (0.05, 0.5, 0.95), standardize: bool = False
) -> Objective:
    """Returns the objective of quantiles of real targets: the pinball loss.

    Args:
        levels: Quantile levels, ascending, in (0, 1); an odd number of them with 0.5 in the middle.
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, and predictions are in the targets' own unit again. `fit` sets the two
            numbers in a state at step 0; `Ensemble.update` alone does not.

    Raises:
        UserError: If the levels are others.

    >>> quantiles().num_outputs
    3
    """
    levels = tuple(levels)
    middle = levels[len(levels) // 2] if len(levels) % 2 else None
    if middle != 0.5 or list(levels) != sorted({level for level in levels if 0 < level < 1}):
        raise UserError(
            f"levels={levels} of quantiles do not ascend in (0, 1) with 0.5 in the middle. Try "
            "(0.05, 0.5, 0.95)."
        )
    return Objective(
        "quantiles",
        partial(pinball, levels=levels),
        Quantiles(levels),
        partial(_median_error, levels),
        num_outputs=len(levels),
        standardize=standardize,
    )


def _median_error(
    levels: tuple[float, ...], outputs: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    return squared_error_score(outputs[..., levels.index(0.5), None], targets)
