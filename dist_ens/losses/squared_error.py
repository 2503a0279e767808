"""The objective for real targets without a predicted variance: the squared error."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from dist_ens.losses.distribution import Values
from dist_ens.losses.gaussian import Gaussian, components, squared_error_score
from dist_ens.losses.objective import Objective
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.metric import one_a_row
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

    >>> prediction = Point().predict(jnp.array([[[1.0]], [[3.0]]]))  # [members, batch, 1]
    >>> prediction.mean.tolist(), prediction.epistemic.tolist()
    ([2.0], [1.0])
    """

    calibrations: ClassVar[tuple[str, ...]] = ()
    conformal: ClassVar[tuple[str, ...]] = ("cv+", "jackknife+")

    @override
    def from_outputs(self, outputs: jax.Array) -> Values:
        mean = jnp.moveaxis(outputs.astype(jnp.float32)[..., 0], 0, -1)
        return {"mean": mean, "variance": jnp.zeros_like(mean)}

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        mean, variance = components(prediction)
        values = regression_values(mean, variance, labels, as_one=True)
        several = ("variance",) if len(mean) > 1 else ()
        of_points = ("prediction", "squared_error", "absolute_error", "crps", *several)
        return {name: values[name] for name in of_points}

    @override
    def predict(self, outputs: jax.Array, *, has_samples: bool = False) -> Prediction:
        """Returns the mean of the points and their variance.

        `aleatoric` is None. `epistemic` and `total` are both the variance of the points.
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


def squared_error(standardize: bool = False) -> Objective:
    """Returns the objective for real targets without a predicted variance: the squared error.

    Args:
        standardize: Whether the targets are standardised; see `gaussian`.

    >>> squared_error().num_outputs
    1
    """
    return Objective(
        "squared_error", mse, Point(), squared_error_score, num_outputs=1, standardize=standardize
    )
