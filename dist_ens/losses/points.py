"""The objective for points: real targets without a predicted variance, and the squared error."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from dist_ens.losses.distribution import Objective, Values
from dist_ens.losses.gaussian import Gaussian, components, mean_squared_error_score
from dist_ens.losses.prediction import Prediction
from dist_ens.losses.targets import checked_targets, of_each_target, summed
from dist_ens.metrics.metric import one_a_row
from dist_ens.metrics.pooling import mean_of_members, variance_of_members
from dist_ens.metrics.regression import regression_values


def mse(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the squared error of a prediction without a variance, float[..., 1].

        loss = (target - output)^2

    >>> float(mse(jnp.array([1.0]), jnp.array(3.0)))
    4.0
    """
    points = outputs[..., 0]
    return jnp.square(one_a_row(targets, points.shape) - points)


@dataclasses.dataclass(frozen=True)
class Point(Gaussian):
    """The point prediction of a real target. Several members spread around their mean.

    Points are normal distributions of variance 0, so they are pooled and summarised like them.

    Attributes:
        pooling: Way in which members are pooled, "probs" or "mixture". Both give the same mean.
        num_targets: Number of targets of an example. None for labels [batch, ...].

    >>> prediction = Point().predict(jnp.array([[[1.0]], [[3.0]]]))  # [members, batch, 1]
    >>> prediction.mean.tolist(), prediction.epistemic.tolist()
    ([2.0], [1.0])
    """

    calibrations: ClassVar[tuple[str, ...]] = ()
    conformal: ClassVar[tuple[str, ...]] = ("cv+", "jackknife+")

    @override
    def from_outputs(self, outputs: jax.Array) -> Values:
        outputs = of_each_target(outputs.astype(jnp.float32), self.num_targets)
        mean = jnp.moveaxis(outputs[..., 0], 0, -1)
        return {"mean": mean, "variance": jnp.zeros_like(mean)}

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        mean, variance, weights = components(prediction)
        values = regression_values(mean, variance, labels, as_one=True, weights=weights)
        several = ("variance",) if len(mean) > 1 else ()
        of_points = ("prediction", "squared_error", "absolute_error", "crps", *several)
        return {name: values[name] for name in of_points}

    @override
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the mean of the points and their variance.

        `aleatoric` is None. `epistemic` and `total` are both the variance of the points.
        """
        outputs = of_each_target(outputs.astype(jnp.float32), self.num_targets)[..., 0]
        points = outputs.reshape(-1, *outputs.shape[2:]) if has_samples else outputs
        if weights is not None:
            weights = jnp.repeat(weights, len(points) // len(outputs))
        epistemic = variance_of_members(points, weights)
        return Prediction(
            mean=mean_of_members(points, weights),
            total=epistemic,
            aleatoric=None,
            epistemic=epistemic,
            members=outputs.mean(axis=1) if has_samples else outputs,
            std=jnp.sqrt(epistemic),
            unit="target",
        )


def squared_error(standardize: bool = False, targets: int | None = None) -> Objective:
    """Returns the objective for real targets without a predicted variance: the squared error.

    Args:
        standardize: Whether the targets are standardised; see `gaussian`.
        targets: Number of targets of an example, for labels and outputs float[batch, targets]. The
            loss of an example is the sum of their squared errors. None for labels [batch].

    Raises:
        UserError: If `targets` is not a whole number of at least 1.

    >>> squared_error().num_outputs, squared_error(targets=3).num_outputs
    (1, 3)
    """
    targets = checked_targets(targets)
    return Objective(
        "squared_error",
        summed(mse, targets),
        Point(num_targets=targets),
        mean_squared_error_score(targets),
        num_outputs=targets or 1,
        standardize=standardize,
    )
