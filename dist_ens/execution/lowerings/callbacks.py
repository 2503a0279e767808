"""Calls of Python functions by a step, such as `jax.pure_callback` and `equinox.error_if`.

JAX refuses such a call where the compiler divides the work over columns. Here every column makes
the call, with whole arrays.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from dist_ens.layout import Layout


@functools.cache
def pure_callback() -> Primitive:
    """Returns the primitive of `jax.pure_callback`, which JAX does not export."""
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.make_jaxpr(lambda: jax.pure_callback(float, result))().eqns[0].primitive


def call_on_every_column(layout: Layout, *arrays: jax.Array, **params: object) -> list[jax.Array]:
    """Calls a Python function without side effects on every column of a row.

    Args:
        layout: Layout with several columns.
        *arrays: Arguments of the function.
        **params: Parameters of `pure_callback()`.

    Returns:
        The results of the function.
    """

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return pure_callback().bind(*arrays, **params)

    return layout.on_every_column(call)(*arrays)
