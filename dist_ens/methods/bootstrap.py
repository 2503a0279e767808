"""The bootstrap, example by example: how much a member learns from one, without a table."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from dist_ens.randomness import pinned_generator

# Beyond it a Poisson variable of mean 1 goes less than once in 10**9 draws.
_MOST = 12


@pinned_generator()
def poisson_weight(key: jax.Array, index: jax.Array) -> jax.Array:
    """How often an example is in a member's bootstrap sample: Poisson, of mean 1.

    For many examples it is what drawing as many of them with replacement gives; a third of them,
    1 / e, are left out.

    Args:
        key: The member's own.
        index: Positions in the split, int32[...].

    Returns:
        float32[...], whole numbers. A pure function of key and index: the same at every step.

    Source: Oza and Russell (2001), "Online Bagging and Boosting".
    """
    draw = jnp.vectorize(
        lambda at: jax.random.uniform(jax.random.fold_in(key, at), dtype=jnp.float32)
    )
    # As often as the draw lies beyond the probability of so few.
    bounds = itertools.accumulate(math.exp(-1) / math.factorial(k) for k in range(_MOST))
    draws = draw(index)
    return functools.reduce(jnp.add, [(draws >= bound).astype(jnp.float32) for bound in bounds])
