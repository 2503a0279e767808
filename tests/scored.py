"""Shared parts of the tests of scores: random linear members."""

import jax
import numpy as np
import optax

import networks
from dist_ens.members import from_functions


def linear_members(layout, num_outputs, num_inputs=4, **options):
    """Random linear members, their state, and their weights in float64."""
    member = from_functions(
        lambda key: {"w": 2 * jax.random.normal(key, (num_inputs, num_outputs))},
        lambda params, inputs: inputs @ params["w"],
    )
    ensemble = networks.ensemble_of(member, optax.identity(), layout, **options)
    state = networks.begin(ensemble, jax.ShapeDtypeStruct((1, num_inputs), np.float32))
    return ensemble, state, np.asarray(state.params["w"], np.float64)
