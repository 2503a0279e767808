"""Real targets with a predicted variance: the Gaussian NLL, and the distribution it trains."""

import dataclasses
from functools import partial
from statistics import NormalDist
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError
from dist_ens.losses.distribution import (
    Calibration,
    Distribution,
    Summary,
    Values,
    along,
    masked_mean,
    with_samples,
)
from dist_ens.losses.objective import Objective
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import REGRESSION
from dist_ens.metrics.metric import Metric
from dist_ens.metrics.regression import mixture_moments, regression_values

# Smallest predicted variance. It keeps the logarithm finite.
SMALLEST_VARIANCE = 1e-6


def normal_distribution(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of the normal distribution that two outputs parametrise.

        mean, raw = outputs;  variance = softplus(raw) + 1e-6

    Args:
        outputs: Mean and raw variance, float[..., 2].

    Returns:
        Mean and variance, float[...] each.

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + SMALLEST_VARIANCE


def gaussian_nll(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of targets under a predicted normal distribution.

        mean, variance = normal_distribution(outputs)
        loss = (log(2 pi variance) + (target - mean)^2 / variance) / 2

    Args:
        outputs: Mean and raw variance, float[..., 2].
        targets: Targets, float[...].

    Returns:
        Losses in nats, float[...].

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    mean, variance = normal_distribution(outputs)
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + jnp.square(targets - mean) / variance)


def beta_nll(outputs: jax.Array, targets: jax.Array, *, beta: float) -> jax.Array:
    """Computes the beta-NLL: the Gaussian NLL weighted by a power of its variance.

        loss = stop_gradient(variance^beta) * gaussian_nll(outputs, target)

    With `beta` 0 it is the negative log-likelihood. With 1 the mean learns as from squared errors,
    so that examples that are badly predicted at first are not given up.

    Args:
        outputs: Mean and raw variance, float[..., 2].
        targets: Targets, float[...].
        beta: Exponent of the variance weighting, in [0, 1]; 0.5 in the paper.

    Returns:
        Losses, float[...].

    Source: Seitzer et al. (2022), https://arxiv.org/abs/2203.09168.
    """
    _, variance = normal_distribution(outputs)
    return jax.lax.stop_gradient(variance**beta) * gaussian_nll(outputs, targets)


def squared_error_score(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Returns the squared error of the first output, as `{"squared_error": float[...]}`.

    Args:
        outputs: Outputs whose first is the mean, float[..., outputs].
        targets: Targets, float[...].
    """
    return {"squared_error": jnp.square(targets - outputs[..., 0])}


@dataclasses.dataclass(frozen=True)
class Gaussian(Distribution):
    """The normal distribution of a real target, and the mixture of the members'.

    A prediction is `mean` and `variance`, float32[batch, ..., components], of each component of the
    mixture; a member has a component for each sample.

    Attributes:
        pooling: "probs" takes the mixture as one normal distribution of its mean and variance,
            "mixture" takes it as it is.
    """

    pooling: str = "probs"
    metrics: ClassVar[tuple[Metric, ...]] = REGRESSION
    uncertainty_statistic: ClassVar[str | None] = "variance"
    poolings: ClassVar[tuple[str, ...]] = ("probs", "mixture")
    calibrations: ClassVar[tuple[str, ...]] = ("variance",)
    conformal: ClassVar[tuple[str, ...]] = ("cqr", "cv+", "jackknife+")
    # The moments of a mixture do not determine its density.
    lost_in_summary: ClassVar[tuple[str, ...]] = ("mixture_nll", "crps")

    def from_outputs(self, outputs: jax.Array) -> Values:
        """See `Distribution`."""
        mean, variance = normal_distribution(outputs.astype(jnp.float32))
        return {"mean": jnp.moveaxis(mean, 0, -1), "variance": jnp.moveaxis(variance, 0, -1)}

    def pool(self, predictions: Values) -> Values:
        """See `Distribution`. The components of all members are those of the ensemble."""
        return {
            name: jnp.moveaxis(values, 0, -2).reshape(*values.shape[1:-1], -1)
            for name, values in predictions.items()
        }

    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Distribution`."""
        return regression_values(*_components(prediction), labels, as_one=self.pooling == "probs")

    def predict(self, outputs: jax.Array, *, has_samples: bool = False) -> Prediction:
        """Returns the moments of the mixture; see `Distribution` and `Prediction`."""
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        members = jax.vmap(self.summary)(predictions)
        means, variances = _components(self.pool(predictions))
        mean = means.mean(axis=0)
        aleatoric = variances.mean(axis=0)
        epistemic = jnp.square(means - mean[None]).mean(axis=0)
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

    def summary(self, prediction: Values) -> Values:
        """See `Distribution`. The moments of the mixture are kept."""
        mean, variance = mixture_moments(*_components(prediction))
        return {"mean": mean, "variance": variance}

    def from_summary(self, summary: Summary) -> Values:
        """See `Distribution`. The moments are those of one component."""
        return {
            name: jnp.asarray(values, jnp.float32)[..., None] for name, values in summary.items()
        }

    def pool_summaries(self, summaries: Summary, masks: np.ndarray) -> Summary:
        """See `Distribution`."""
        means, variances = (summaries[name].astype(np.float64) for name in ("mean", "variance"))
        mean = masked_mean(means, masks)
        variance = masked_mean(variances + np.square(means - mean[None]), masks)
        return {"mean": mean, "variance": variance}

    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns `mean` and `variance` in the targets' own unit; see `Distribution`."""
        shown = super().shown(summary, mean, std)
        if std is not None:
            shown["variance"] = summary["variance"] * along(std, summary["variance"]) ** 2
        return shown

    def central_interval(self, summary: Summary, level: float) -> tuple[np.ndarray, np.ndarray]:
        """See `Distribution`. The interval is that of one normal distribution."""
        mean, variance = (summary[name].astype(np.float64) for name in ("mean", "variance"))
        half = NormalDist().inv_cdf((1 + level) / 2) * np.sqrt(variance)
        return mean - half, mean + half

    def calibrate(self, method: str, summary: Summary, labels: np.ndarray) -> Calibration:
        """See `Distribution`. All variances are multiplied by one factor."""
        # Its scipy.optimize takes half a second to import.
        from dist_ens.metrics.recalibration import fit_variance_scale

        scale = fit_variance_scale(summary["mean"], summary["variance"], labels)
        return Calibration(
            lambda summary: {**summary, "variance": summary["variance"] * scale}, {"scale": scale}
        )


def gaussian(standardize: bool = False) -> Objective:
    """Returns the objective of real targets with a predicted variance: the Gaussian NLL.

    Args:
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, and predictions are in the targets' own unit again. `fit` sets the two
            numbers in a state at step 0; `Ensemble.update` alone does not.

    >>> gaussian().num_outputs
    2
    """
    return Objective(
        "gaussian",
        gaussian_nll,
        Gaussian(),
        squared_error_score,
        num_outputs=2,
        standardize=standardize,
    )


def beta_gaussian(beta: float = 0.5, standardize: bool = False) -> Objective:
    """Returns the objective of real targets with a predicted variance: the beta-NLL.

    Args:
        beta: Exponent of the variance weighting, in [0, 1].
        standardize: Whether the targets are standardised, see `gaussian`.

    Raises:
        UserError: If `beta` is not in [0, 1].
    """
    if not 0 <= beta <= 1:
        raise UserError(f"beta={beta} of beta_gaussian is not in [0, 1]. Try 0.5.")
    return Objective(
        "beta_gaussian",
        partial(beta_nll, beta=beta),
        Gaussian(),
        squared_error_score,
        num_outputs=2,
        standardize=standardize,
    )


def _components(prediction: Values) -> tuple[jax.Array, jax.Array]:
    """Returns the means and the variances of a mixture, [components, batch, ...]."""
    mean, variance = (jnp.moveaxis(prediction[name], -1, 0) for name in ("mean", "variance"))
    return mean, variance
