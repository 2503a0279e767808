"""The check that inputs are finite."""

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import first_index
from dist_ens.ground.types import Inputs


def check_finite(where: str, inputs: np.ndarray) -> None:
    """Raises a `UserError` if an input, [examples, ...], is NaN or infinite."""
    if not jnp.issubdtype(inputs.dtype, jnp.inexact) or np.isfinite(inputs).all():
        return
    bad = ~np.isfinite(inputs)
    count = np.count_nonzero(bad.reshape(len(inputs), -1).any(axis=1))
    raise UserError(
        f"{where} has {'NaN' if np.isnan(inputs).any() else 'infinity'}, in {count:,} of "
        f"{len(inputs):,} examples, the first at index {first_index(bad)}. Remove these examples, "
        "or replace the values."
    )


def check_finite_inputs(name: str, inputs: Inputs) -> None:
    """Raises a `UserError` if inputs on the host are NaN or infinite, and reads no JAX array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(inputs):
        if isinstance(leaf, np.ndarray):
            check_finite(f"{name}{jax.tree_util.keystr(path)}", leaf)
