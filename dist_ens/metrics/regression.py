"""Scores of predictions of real targets: each member a normal distribution, all a mixture."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm


def mixture_moments(
    member_means: jax.Array, member_variances: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the uniform mixture of the members.

        mean     = mean_m(mean_m)
        variance = mean_m(variance_m) + mean_m((mean_m - mean)^2)

    Args:
        member_means: float[members, ...].
        member_variances: Likewise, positive.

    Returns:
        Two arrays, float[...]. Those of one member alone are its own.

    >>> mean, variance = mixture_moments(jnp.array([1.0, 3.0]), jnp.array([0.5, 0.5]))
    >>> float(mean), float(variance)
    (2.0, 1.5)

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    mean = member_means.mean(axis=0)
    # Not mean(x^2) - mean^2, of which little is left where the members agree.
    return mean, member_variances.mean(axis=0) + jnp.square(member_means - mean[None]).mean(axis=0)


def regression_sums(
    member_means: jax.Array, member_variances: jax.Array, targets: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """What a batch adds to the scores of a mixture of normal distributions.

    Args:
        member_means: float[members, batch]; of one member alone its own scores come out.
        member_variances: Likewise, positive.
        targets: float[batch], in the same unit.
        mask: bool[batch]; examples where it is False do not count.

    Returns:
        Sums over the batch, float32[]: `count`, `squared_error`, `absolute_error`, `nll`,
        `mixture_nll`, `crps`.
    """
    mean, variance = mixture_moments(member_means, member_variances)
    error = targets - mean
    nll = 0.5 * (jnp.log(2 * jnp.pi * variance) + jnp.square(error) / variance)
    member_log_density = norm.logpdf(targets[None], member_means, jnp.sqrt(member_variances))
    mixture_nll = math.log(len(member_means)) - jax.nn.logsumexp(member_log_density, axis=0)

    def total(values: jax.Array) -> jax.Array:
        return jnp.where(mask, values, 0).sum()  # a masked row may hold anything, NaN too

    return {
        "count": mask.sum().astype(jnp.float32),
        "squared_error": total(jnp.square(error)),
        "absolute_error": total(jnp.abs(error)),
        "nll": total(nll),
        "mixture_nll": total(mixture_nll),
        "crps": total(_crps(member_means, member_variances, targets)),
    }


def regression_scores(sums: dict[str, Any], unit: float = 1.0) -> dict[str, float]:
    """The scores of a split from the sums over its batches.

        rmse        = sqrt(mean (y - mean)^2),  mae = mean |y - mean|,  mean: of the mixture
        nll         = -mean log N(y; mean, variance),  both of the mixture
        mixture_nll = -mean log mean_m N(y; mean_m, variance_m)
        crps        = mean of the integral over t of (F(t) - [t >= y])^2,  F: of the mixture

    Args:
        sums: Of `regression_sums`, added over the batches.
        unit: Of the targets there, such as the standard deviation that they were divided by.

    Returns:
        `rmse`, `mae` and `crps` in the targets' own unit, `nll` and `mixture_nll` in nats, of a
        density per that unit.

    Raises:
        ValueError: If nothing was counted.

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474, for the mixture taken
    as one normal distribution; Gneiting and Raftery (2007) for the CRPS.
    """
    count = float(sums["count"])
    if count == 0:
        raise ValueError("Scores need at least one example. Received: none. Add some.")
    mean = {name: float(total) / count for name, total in sums.items()}
    return {
        "rmse": float(np.sqrt(mean["squared_error"])) * unit,
        "mae": mean["absolute_error"] * unit,
        "nll": mean["nll"] + math.log(unit),
        "mixture_nll": mean["mixture_nll"] + math.log(unit),
        "crps": mean["crps"] * unit,
    }


def _crps(means: jax.Array, variances: jax.Array, targets: jax.Array) -> jax.Array:
    """Continuous ranked probability score of a uniform mixture of normals, float[batch].

        E|X - y| - E|X - X'| / 2,  X and X' drawn from the mixture,

    each a mean over members, or pairs of them, of E|Z| for a normal Z.

    Source: Grimit et al. (2006), "The continuous ranked probability score for circular variables
    and its application to mesoscale forecast ensemble verification", eq. 5.
    """

    def to_all(member: tuple[jax.Array, jax.Array]) -> jax.Array:
        mean, variance = member
        return _mean_distance(mean[None] - means, variance[None] + variances).mean(axis=0)

    # One member against all at a time: all pairs at once could be more than there is memory.
    between = jax.lax.map(to_all, (means, variances)).mean(axis=0)
    return _mean_distance(targets[None] - means, variances).mean(axis=0) - between / 2


def _mean_distance(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """E|Z| of a normal Z."""
    deviation = jnp.sqrt(variance)
    z = mean / deviation
    return mean * (2 * norm.cdf(z) - 1) + 2 * deviation * norm.pdf(z)
