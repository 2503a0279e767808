"""Means over the members of an ensemble, with equal weights or with weights of their own.

Weights are not negative: float[members], or more axes of the values, such as [members, batch]. A
member of weight 0 does not count, even if its value is NaN. Arrays of NumPy stay on the host.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Array = TypeVar("_Array", jax.Array, np.ndarray)


def mean_of_members(values: _Array, weights: _Array | None = None) -> _Array:
    """Computes the weighted mean over the members.

        sum_m(weights[m] * values[m]) / sum_m(weights[m])

    Args:
        values: Values of the members, in any unit; float[members, ...].
        weights: Weights. Default: all ones.

    Returns:
        The mean, in the unit of the values; float[...].

    >>> values, weights = np.array([1.0, 3.0, np.nan]), np.array([3.0, 1.0, 0.0])
    >>> float(mean_of_members(values, weights))
    1.5
    """
    if weights is None:
        return values.mean(axis=0)
    xp = np if isinstance(values, np.ndarray) else jnp
    weights = weights.reshape(*weights.shape, *(1,) * (values.ndim - weights.ndim))
    total = (xp.where(weights > 0, values, 0) * weights).sum(axis=0)
    return total / weights.sum(axis=0)


def variance_of_members(values: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Computes the weighted mean of the members' squared distances from their mean.

    >>> float(variance_of_members(jnp.array([1.0, 3.0]), jnp.array([1.0, 3.0])))
    0.75
    """
    if weights is None:
        return jnp.var(values, axis=0)
    return mean_of_members(jnp.square(values - mean_of_members(values, weights)[None]), weights)


def log_mean_exp(log_values: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Computes the logarithm of the weighted mean of exponentials.

        log(sum_m(weights[m] * exp(log_values[m])) / sum_m(weights[m]))

    >>> logs, weights = jnp.log(jnp.array([0.25, 0.75])), jnp.array([1.0, 3.0])
    >>> round(float(jnp.exp(log_mean_exp(logs, weights))), 4)
    0.625
    """
    if weights is None:
        return jax.nn.logsumexp(log_values, axis=0) - jnp.log(len(log_values))
    shaped = weights.reshape(*weights.shape, *(1,) * (log_values.ndim - weights.ndim))
    # It replaces the values of weight 0.
    return jax.nn.logsumexp(log_values, axis=0, b=shaped) - jnp.log(weights.sum(axis=0))
