"""Statistics of predictions of real targets by normal distributions and by mixtures of them."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from dist_ens.metrics.catalogue import INTERVAL_LEVEL
from dist_ens.metrics.metric import one_a_row
from dist_ens.metrics.pooling import log_mean_exp, mean_of_members

# Up to this many members, the sum over all pairs is cheaper than any grid.
_FEW_MEMBERS = 32
# A grid extends this many standard deviations beyond the outermost members, where less than a part
# in 1e8 of one is left. The error of the rule on these nodes is below the rounding of float32.
_TAIL = 5.5
_NODES_PER_DEVIATION = 1.5


def mixture_moments(
    member_means: jax.Array, member_variances: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes mean and variance of the mixture of the members, [members, ...].

    Weights are float[members, ...]. Without them the mixture is uniform:

        mean     = mean_m(mean_m)
        variance = mean_m(variance_m) + mean_m((mean_m - mean)^2)

    >>> mean, variance = mixture_moments(jnp.array([1.0, 3.0]), jnp.array([0.5, 0.5]))
    >>> float(mean), float(variance)
    (2.0, 1.5)

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    mean = mean_of_members(member_means, weights)
    # mean(x^2) - mean^2 would lose most digits if the members agree.
    spread = mean_of_members(jnp.square(member_means - mean[None]), weights)
    return mean, mean_of_members(member_variances, weights) + spread


def regression_values(
    member_means: jax.Array,
    member_variances: jax.Array,
    targets: jax.Array,
    *,
    as_one: bool,
    weights: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Computes the statistics of each prediction of a mixture of normal distributions.

    Args:
        member_means: Means of the members, float[members, ...]. With one member the statistics are
            those of its normal distribution.
        member_variances: Variances of the members, positive; float[members, ...].
        targets: Targets in the unit of the means, float[...]. JAX computes in float32 unless x64 is
            enabled, so first subtract an offset that is much larger than the deviations.
        as_one: Whether the mixture is replaced by one normal distribution with its mean and
            variance, for all statistics except `mixture_nll` and `crps`.
        weights: Weights of the members, float[members, ...]. Default: the mixture is uniform.

    Returns:
        Statistics by name, float32[...] each: `prediction`, the mean; `squared_error`,
        `absolute_error`, `variance`, `nll`, `mixture_nll` and `crps`; `pit`, the distribution
        function at the target, in [0, 1]; and `width`, of the central interval of probability
        `INTERVAL_LEVEL`.

    >>> means, variances = jnp.array([1.0, 3.0]), jnp.array([0.5, 0.5])
    >>> values = regression_values(means, variances, jnp.array(5.0), as_one=True)
    >>> float(values["prediction"]), float(values["squared_error"]), float(values["variance"])
    (2.0, 9.0, 1.5)
    """
    member_means, member_variances, targets = (
        values.astype(jnp.promote_types(values.dtype, jnp.float32))
        for values in (member_means, member_variances, targets)
    )
    mean, variance = mixture_moments(member_means, member_variances, weights)
    if weights is not None:  # The values of members that do not count may be NaN.
        member_means = jnp.where(weights > 0, member_means, mean[None])
        member_variances = jnp.where(weights > 0, member_variances, variance[None])
    targets = one_a_row(targets, mean.shape)
    deviations = jnp.sqrt(member_variances)
    densities = norm.logpdf(targets[None], member_means, deviations)
    if weights is None:
        mixture_nll = math.log(len(member_means)) - jax.nn.logsumexp(densities, axis=0)
    else:
        mixture_nll = -log_mean_exp(densities, weights)
    if as_one:
        nll = -norm.logpdf(targets, mean, jnp.sqrt(variance))
        pit = norm.cdf(targets, mean, jnp.sqrt(variance))
        width = 2 * norm.ppf((1 + INTERVAL_LEVEL) / 2) * jnp.sqrt(variance)
    else:
        nll = mixture_nll
        pit = mean_of_members(norm.cdf(targets[None], member_means, deviations), weights)
        low, high = (
            mixture_quantile(
                member_means, member_variances, (1 + sign * INTERVAL_LEVEL) / 2, weights
            )
            for sign in (-1, 1)
        )
        width = high - low
    return {
        "prediction": mean,
        "squared_error": jnp.square(targets - mean),
        "absolute_error": jnp.abs(targets - mean),
        "variance": variance,
        "nll": nll,
        "mixture_nll": mixture_nll,
        "crps": _crps(member_means, member_variances, targets, weights),
        "pit": pit,
        "width": width,
    }


def mixture_quantile(
    means: jax.Array, variances: jax.Array, level: float, weights: jax.Array | None = None
) -> jax.Array:
    """Computes a quantile of a mixture of normal distributions by bisection.

        F(quantile) = level,  F: distribution function of the mixture

    It is exact to a millionth of the range of the members' quantiles.

    >>> round(float(mixture_quantile(jnp.array([0.0]), jnp.array([1.0]), 0.975)), 2)
    1.96
    """
    deviations = jnp.sqrt(variances)
    of_members = means + deviations * norm.ppf(level)
    # The quantile lies between the smallest and the largest of the members' quantiles.
    bounds = of_members.min(axis=0), of_members.max(axis=0)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_below = mean_of_members(norm.cdf(middle[None], means, deviations), weights) < level
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    low, high = jax.lax.fori_loop(0, 24, halve, bounds)
    return (low + high) / 2


def _crps(
    means: jax.Array, variances: jax.Array, targets: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns the continuous ranked probability score of a mixture of normals.

        E|X - y| - E|X - X'| / 2,  X and X' drawn from the mixture

    The second term is a mean over all pairs of members. For many members there are two faster ways,
    whose time does not grow with the number of pairs. If all members are points, the term follows
    from their sorted order. If a grid needs fewer nodes than there are members, the term is an
    integral of the mixture's distribution function. A variance may be 0. With weights the mean over
    the pairs is always taken.

    Source: Grimit et al. (2006), "The continuous ranked probability score for circular variables
    and its application to mesoscale forecast ensemble verification", eq. 5.
    """
    to_target = mean_of_members(_mean_distance(targets[None] - means, variances), weights)
    if weights is not None:
        return to_target - _spread_of_pairs(means, variances, weights)
    spread = _spread_of_pairs if len(means) <= _FEW_MEMBERS else _spread_of_many
    return to_target - spread(means, variances)


@jax.custom_batching.sequential_vmap  # A batched switch would compute every branch.
def _spread_of_many(means: jax.Array, variances: jax.Array) -> jax.Array:
    """Returns E|X - X'| / 2 of two draws of a mixture, in the fastest exact way."""
    low, width, num_nodes = _grid(means, variances)
    is_cheaper = num_nodes < len(means)  # False if the number is NaN or infinite.
    num_nodes = jnp.where(is_cheaper, num_nodes, 1).astype(jnp.int32)
    return jax.lax.switch(
        jnp.where(jnp.all(variances == 0), 0, jnp.where(is_cheaper, 1, 2)),
        (
            lambda: _spread_of_points(means),
            lambda: _spread_on_grid(means, variances, low, width, num_nodes),
            lambda: _spread_of_pairs(means, variances),
        ),
    )


def _spread_of_pairs(
    means: jax.Array, variances: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Returns E|X - X'| / 2 as the mean over all pairs of members."""

    def to_all(member: tuple[jax.Array, jax.Array]) -> jax.Array:
        mean, variance = member
        distances = _mean_distance(mean[None] - means, variance[None] + variances)
        return mean_of_members(distances, weights)

    # One member at a time is compared with all, because all pairs may not fit in memory.
    return mean_of_members(jax.lax.map(to_all, (means, variances)), weights) / 2


def _spread_of_points(points: jax.Array) -> jax.Array:
    """Returns E|X - X'| / 2 of points, the integral of the step function F (1 - F)."""
    ordered = jnp.sort(points, axis=0)
    below = jnp.arange(1, len(points)) / len(points)
    weights = (below * (1 - below)).astype(points.dtype)
    return jnp.tensordot(weights, jnp.diff(ordered, axis=0), axes=1)


def _grid(means: jax.Array, variances: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the lower end and the width of a mixture, float[...], and its number of grid nodes.

    F (1 - F) varies no faster than the narrowest member, whose tails are those of a normal
    distribution. So the error of the midpoint rule decreases like exp(-(pi deviation / step)^2).
    """
    deviations = jnp.sqrt(variances)
    low = (means - _TAIL * deviations).min(axis=0)
    width = (means + _TAIL * deviations).max(axis=0) - low
    nodes = _NODES_PER_DEVIATION * width / deviations.min(axis=0)
    return low, width, jnp.ceil(nodes.max())


def _spread_on_grid(
    means: jax.Array, variances: jax.Array, low: jax.Array, width: jax.Array, num_nodes: jax.Array
) -> jax.Array:
    """Returns E|X - X'| / 2 as the integral of F (1 - F) by the midpoint rule."""
    deviations, step = jnp.sqrt(variances), width / num_nodes

    def add(node: jax.Array, total: jax.Array) -> jax.Array:
        below = norm.cdf((low + (node + 0.5) * step)[None], means, deviations).mean(axis=0)
        return total + below * (1 - below)

    return step * jax.lax.fori_loop(0, num_nodes, add, jnp.zeros_like(low))


def _mean_distance(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """Returns E|Z| of a normal variable Z, which is |mean| if its variance is 0."""
    varies = variance > 0
    deviation = jnp.sqrt(jnp.where(varies, variance, 1))
    z = mean / deviation
    return jnp.where(
        varies, mean * (2 * norm.cdf(z) - 1) + 2 * deviation * norm.pdf(z), jnp.abs(mean)
    )
