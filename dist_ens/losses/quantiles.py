"""The objective for quantiles of real targets: the pinball loss, and the quantiles it trains."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from dist_ens.ground.errors import UserError
from dist_ens.losses.distribution import Distribution, Objective, Summary, Values, with_samples
from dist_ens.losses.gaussian import mean_squared_error_score
from dist_ens.losses.prediction import Prediction
from dist_ens.losses.targets import checked_targets, of_each_target, summed
from dist_ens.metrics.catalogue import REGRESSION
from dist_ens.metrics.metric import Metric, one_a_row
from dist_ens.metrics.pooling import mean_of_members, variance_of_members


def pinball(outputs: jax.Array, targets: jax.Array, *, levels: tuple[float, ...]) -> jax.Array:
    """Computes the mean pinball loss of predicted quantiles, float[..., levels].

        loss = mean_q max(q (target - output_q), (q - 1) (target - output_q))

    >>> float(pinball(jnp.array([1.0]), jnp.array(3.0), levels=(0.75,)))
    1.5

    Source: Koenker and Bassett (1978), "Regression Quantiles".
    """
    error = one_a_row(targets, outputs.shape[:-1])[..., None] - outputs
    level = jnp.broadcast_to(jnp.asarray(levels, outputs.dtype), error.shape)
    return jnp.maximum(level * error, (level - 1) * error).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Quantiles(Distribution):
    """The predicted quantiles of a real target.

    Attributes:
        levels: Quantile levels, ascending, in (0, 1), with 0.5 in the middle.
        num_targets: Number of targets of an example. None for labels [batch, ...].

    >>> outputs = jnp.array([[[1.0, 2.0, 3.0]], [[3.0, 4.0, 5.0]]])  # [members, batch, levels]
    >>> Quantiles((0.05, 0.5, 0.95)).predict(outputs).quantiles.tolist()
    [[2.0, 3.0, 4.0]]
    """

    levels: tuple[float, ...]
    num_targets: int | None = None
    metrics: ClassVar[tuple[Metric, ...]] = REGRESSION
    uncertainty_statistic: ClassVar[str | None] = "width"
    conformal: ClassVar[tuple[str, ...]] = ("cqr", "cv+", "jackknife+")

    @override
    def from_outputs(self, outputs: jax.Array) -> Values:
        """Returns a member's quantiles. Quantiles that cross are sorted."""
        outputs = of_each_target(outputs.astype(jnp.float32), self.num_targets)
        return {"quantiles": jnp.sort(outputs, axis=-1).mean(axis=0)}

    @override
    def pool(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        return {"quantiles": mean_of_members(predictions["quantiles"], weights)}

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
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

    @override
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the pooled quantiles and their median.

        `epistemic` is the variance of the members' medians. `total` and `aleatoric` are None.
        """
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        quantiles = self.pool(predictions, weights)["quantiles"]
        middle = len(self.levels) // 2
        medians = predictions["quantiles"][..., middle]
        return Prediction(
            mean=quantiles[..., middle],
            total=None,
            aleatoric=None,
            epistemic=variance_of_members(medians, weights),
            members=medians,
            quantiles=quantiles,
            unit="target",
        )

    @override
    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        of_levels = {n: np.moveaxis(values, -1, 1) for n, values in summary.items()}
        shown = super().shown(of_levels, mean, std)
        return {n: np.moveaxis(values, 1, -1) for n, values in shown.items()}

    @override
    def shown_of(self, prediction: Prediction) -> dict[str, np.ndarray]:
        return {"quantiles": prediction.quantiles}

    @override
    def point(self, summary: Summary) -> np.ndarray:
        quantiles = summary["quantiles"]
        return quantiles[..., quantiles.shape[-1] // 2]

    @override
    def central_interval(self, summary: Summary, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outermost quantiles, for every level."""
        quantiles = summary["quantiles"].astype(float)
        return quantiles[..., 0], quantiles[..., -1]


def quantiles(
    levels: tuple[float, ...] = (0.05, 0.5, 0.95),
    standardize: bool = False,
    targets: int | None = None,
) -> Objective:
    """Returns the objective for quantiles of real targets with the pinball loss.

    Args:
        levels: Quantile levels, ascending, in (0, 1). Their number is odd, and the middle one is
            0.5.
        standardize: Whether the targets are standardised; see `gaussian`.
        targets: Number of targets of an example; see `gaussian`. The outputs of the network are the
            first level of all targets, then the second level of all, and so on.

    Raises:
        UserError: If the levels do not ascend in (0, 1) with 0.5 in the middle.

    >>> quantiles().num_outputs
    3
    """
    levels = tuple(levels)
    at = len(levels) // 2
    middle = levels[at] if len(levels) % 2 else None
    if middle != 0.5 or list(levels) != sorted({level for level in levels if 0 < level < 1}):
        raise UserError(
            f"levels={levels} of quantiles do not ascend in (0, 1) with 0.5 in the middle. Try "
            "(0.05, 0.5, 0.95)."
        )
    targets = checked_targets(targets)
    score = mean_squared_error_score(targets)
    medians = slice(at * (targets or 1), (at + 1) * (targets or 1))
    return Objective(
        "quantiles",
        summed(partial(pinball, levels=levels), targets),
        Quantiles(levels, targets),
        lambda outputs, labels: score(outputs[..., medians], labels),
        num_outputs=len(levels) * (targets or 1),
        standardize=standardize,
    )
