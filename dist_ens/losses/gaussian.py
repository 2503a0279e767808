"""Objectives for real targets with a predicted variance: the Gaussian NLL and the beta-NLL.

Outputs are a mean and a raw variance, float[..., 2]; targets are float[...]. The
outputs of several targets are all means, then all raw variances; see `of_each_target`.
"""

import dataclasses
from functools import partial
from statistics import NormalDist
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.losses.distribution import (
    Distribution,
    Objective,
    Summary,
    TrainingScores,
    Values,
    with_samples,
)
from dist_ens.losses.prediction import Prediction
from dist_ens.losses.targets import checked_targets, of_each_target, summed
from dist_ens.metrics.catalogue import REGRESSION
from dist_ens.metrics.metric import Metric, along, one_a_row
from dist_ens.metrics.pooling import mean_of_members
from dist_ens.metrics.regression import mixture_moments, regression_values

# This smallest predicted variance keeps the logarithm finite.
SMALLEST_VARIANCE = 1e-6


def normal_distribution(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of the normal distribution that two outputs parametrise.

        mean, raw = outputs;  variance = softplus(raw) + 1e-6

    >>> mean, variance = normal_distribution(jnp.array([2.0, 0.0]))
    >>> float(mean), round(float(variance), 4)  # softplus(0) = log 2
    (2.0, 0.6931)

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + SMALLEST_VARIANCE


def gaussian_nll(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of targets under a predicted normal distribution.

        mean, variance = normal_distribution(outputs)
        loss = (log(2 pi variance) + (target - mean)^2 / variance) / 2

    >>> outputs = jnp.array([0.0, 0.541325])  # mean 0 and variance softplus(0.541325) = 1
    >>> round(float(gaussian_nll(outputs, jnp.array(1.0))), 4)  # (log(2 pi) + 1) / 2
    1.4189
    """
    mean, variance = normal_distribution(outputs)
    targets = one_a_row(targets, mean.shape)
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + jnp.square(targets - mean) / variance)


def beta_nll(outputs: jax.Array, targets: jax.Array, *, beta: float) -> jax.Array:
    """Computes the beta-NLL: the Gaussian NLL weighted by a power of its variance.

        loss = stop_gradient(variance^beta) * gaussian_nll(outputs, target)

    With `beta` 0 it is the Gaussian NLL. With `beta` 1 the gradient of the mean is that of the
    squared error, so that examples with large initial errors keep their influence.

    >>> outputs = jnp.array([0.0, 3.981515])  # mean 0 and variance softplus(3.981515) = 4
    >>> round(float(beta_nll(outputs, jnp.array(2.0), beta=0.5)), 3)  # 2 (log(8 pi) + 1) / 2
    4.224

    Source: Seitzer et al. (2022), https://arxiv.org/abs/2203.09168.
    """
    _, variance = normal_distribution(outputs)
    return jax.lax.stop_gradient(variance**beta) * gaussian_nll(outputs, targets)


def squared_error_score(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Returns the squared error of the first output, as `{"squared_error": float[...]}`.

    >>> float(squared_error_score(jnp.array([1.0, 0.0]), jnp.array(3.0))["squared_error"])
    4.0
    """
    mean = outputs[..., 0]
    return {"squared_error": jnp.square(one_a_row(targets, mean.shape) - mean)}


def mean_squared_error_score(num_targets: int | None) -> TrainingScores:
    """Returns `squared_error_score`, the mean over the targets of several."""
    if num_targets is None:
        return squared_error_score

    def score(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        found = squared_error_score(of_each_target(outputs, num_targets), targets)
        return {name: values.mean(axis=-1) for name, values in found.items()}

    return score


@dataclasses.dataclass(frozen=True)
class Gaussian(Distribution):
    """The normal distribution of a real target. Several members form a mixture.

    A prediction holds the `mean` and the `variance` of each component of the mixture,
    float32[batch, ..., components]. A member has one component for each sample. It also holds the
    `weight` of each component if these are not equal. Several targets are independent, and the last
    axis before the components.

    Attributes:
        pooling: Way in which members are pooled. "probs" replaces the mixture by one normal
            distribution with the same mean and variance. "mixture" scores the mixture itself.
        num_targets: Number of targets of an example. None for labels [batch, ...].

    >>> prediction = Gaussian().predict(jnp.array([[[1.0, 0.0]], [[3.0, 0.0]]]))
    >>> prediction.mean.tolist(), prediction.epistemic.tolist()  # means 1 and 3
    ([2.0], [1.0])
    """

    pooling: str = "probs"
    num_targets: int | None = None
    metrics: ClassVar[tuple[Metric, ...]] = REGRESSION
    uncertainty_statistic: ClassVar[str | None] = "variance"
    poolings: ClassVar[tuple[str, ...]] = ("probs", "mixture")
    calibrations: ClassVar[tuple[str, ...]] = ("variance",)
    conformal: ClassVar[tuple[str, ...]] = ("cqr", "cv+", "jackknife+")
    # The moments of a mixture do not determine its density.
    lost_in_summary: ClassVar[tuple[str, ...]] = ("mixture_nll", "crps")

    @override
    def from_outputs(self, outputs: jax.Array) -> Values:
        outputs = of_each_target(outputs.astype(jnp.float32), self.num_targets)
        mean, variance = normal_distribution(outputs)
        return {"mean": jnp.moveaxis(mean, 0, -1), "variance": jnp.moveaxis(variance, 0, -1)}

    @override
    def pool(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        pooled = {
            name: jnp.moveaxis(values, 0, -2).reshape(*values.shape[1:-1], -1)
            for name, values in predictions.items()
        }
        if weights is not None:
            samples = jnp.repeat(weights, predictions["mean"].shape[-1])
            pooled["weight"] = jnp.broadcast_to(samples, pooled["mean"].shape)
        return pooled

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        means, variances, weights = components(prediction)
        as_one = self.pooling == "probs"
        return regression_values(means, variances, labels, as_one=as_one, weights=weights)

    @override
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the mean and the variance of the mixture, and the parts of the variance."""
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        members = jax.vmap(self.summary)(predictions)
        means, variances, weights = components(self.pool(predictions, weights))
        mean = mean_of_members(means, weights)
        aleatoric = mean_of_members(variances, weights)
        epistemic = mean_of_members(jnp.square(means - mean[None]), weights)
        return Prediction(
            mean=mean,
            total=aleatoric + epistemic,
            aleatoric=aleatoric,
            epistemic=epistemic,
            members=members["mean"],
            member_variance=members["variance"],
            std=jnp.sqrt(aleatoric + epistemic),
            unit="target",
        )

    @override
    def summary(self, prediction: Values) -> Values:
        mean, variance = mixture_moments(*components(prediction))
        return {"mean": mean, "variance": variance}

    @override
    def from_summary(self, summary: Summary) -> Values:
        return {
            name: jnp.asarray(values, jnp.float32)[..., None] for name, values in summary.items()
        }

    @override
    def pool_summaries(self, summaries: Summary, weights: np.ndarray) -> Summary:
        means, variances = (summaries[name].astype(np.float64) for name in ("mean", "variance"))
        mean = mean_of_members(means, weights)
        variance = mean_of_members(variances + np.square(means - mean[None]), weights)
        return {"mean": mean, "variance": variance}

    @override
    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        shown = super().shown(summary, mean, std)
        if std is not None:
            shown["variance"] = summary["variance"] * along(std, summary["variance"]) ** 2
        return shown

    @override
    def shown_of(self, prediction: Prediction) -> dict[str, np.ndarray]:
        return {"mean": prediction.mean, "variance": prediction.total}

    @override
    def central_interval(self, summary: Summary, level: float) -> tuple[np.ndarray, np.ndarray]:
        mean, variance = (summary[name].astype(float) for name in ("mean", "variance"))
        half = NormalDist().inv_cdf((1 + level) / 2) * variance**0.5
        return mean - half, mean + half

    @override
    def calibrate(
        self, method: str, summary: Summary, labels: np.ndarray
    ) -> tuple[JsonDict, tuple[str, ...]]:
        # The module imports scipy.optimize, which takes half a second.
        from dist_ens.metrics.recalibration import fit_variance_scale

        scale = fit_variance_scale(
            summary["mean"], summary["variance"], labels, by_target=self.num_targets is not None
        )
        return {"scale": scale.tolist()}, ()

    @override
    def calibrated(self, method: str, parameters: JsonDict, summary: Summary) -> Summary:
        return {**summary, "variance": summary["variance"] * np.asarray(parameters["scale"])}

    @override
    def with_shown(self, prediction: Prediction, shown: Summary) -> Prediction:
        """Returns the calibrated variance, whose two parts have the same factor."""
        variance = shown["variance"]
        factor = variance / prediction.total
        return dataclasses.replace(
            prediction,
            total=variance,
            aleatoric=prediction.aleatoric * factor,
            epistemic=prediction.epistemic * factor,
            std=variance**0.5,
        )


def gaussian(standardize: bool = False, targets: int | None = None) -> Objective:
    """Returns the objective for real targets with a predicted variance and the Gaussian NLL.

    Several targets are independent given the inputs: the loss of an example is the sum of their
    NLLs.

    Args:
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, each target by its own. Predictions are in the targets' own unit in either
            case. `fit` sets these numbers in a state at step 0. `Ensemble.update` alone does not.
        targets: Number of targets of an example. Labels are then float[batch, targets], and the
            outputs of the network are the means of all targets, then their raw variances,
            float[batch, 2 * targets]. None for labels [batch].

    Raises:
        UserError: If `targets` is not a whole number of at least 1.

    >>> gaussian().num_outputs, gaussian(targets=3).num_outputs
    (2, 6)
    """
    targets = checked_targets(targets)
    return Objective(
        "gaussian",
        summed(gaussian_nll, targets),
        Gaussian(num_targets=targets),
        mean_squared_error_score(targets),
        num_outputs=2 * (targets or 1),
        standardize=standardize,
    )


def beta_gaussian(
    beta: float = 0.5, standardize: bool = False, targets: int | None = None
) -> Objective:
    """Returns the objective for real targets with a predicted variance and the beta-NLL.

    Args:
        beta: Exponent of the variance weighting, in [0, 1].
        standardize: Whether the targets are standardised; see `gaussian`.
        targets: Number of targets of an example; see `gaussian`.

    Raises:
        UserError: If `beta` is not in [0, 1].

    >>> beta_gaussian(0.5).num_outputs
    2
    """
    if not 0 <= beta <= 1:
        raise UserError(f"beta={beta} of beta_gaussian is not in [0, 1]. Try 0.5.")
    objective = gaussian(standardize, targets)
    loss = summed(partial(beta_nll, beta=beta), objective.distribution.num_targets)
    return dataclasses.replace(objective, name="beta_gaussian", example_loss=loss)


def components(prediction: Values) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the means, the variances and the weights of a mixture, [components, batch, ...].

    The weights are None if they are equal.
    """
    first = {name: jnp.moveaxis(values, -1, 0) for name, values in prediction.items()}
    return first["mean"], first["variance"], first.get("weight")
