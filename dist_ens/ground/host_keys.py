"""Typed PRNG keys in the memory of a host.

NumPy cannot hold a typed key of JAX. Here, an array of keys is an array of records with one field,
which has the name of the generator and holds the words of the key. NumPy indexes, stacks and copies
it like any other array, so that keys may be a part of a batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from dist_ens.ground.narrowing import held_dtype

_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")


def host_array(leaf: object) -> np.ndarray:
    """Returns an array of any library, or a number, as an array of NumPy. Keys become records.

    >>> host_array(jax.random.split(jax.random.key(0), 3)).shape
    (3,)
    """
    if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
        return np.asarray(leaf)
    words = np.asarray(jax.random.key_data(leaf))
    record = np.dtype([(str(jax.random.key_impl(leaf)), words.dtype, words.shape[-1:])])
    return words.view(record)[..., 0]


def dtype_in_jax(dtype: DTypeLike) -> np.dtype:
    """Returns the type in which JAX holds an array of NumPy; see `held_dtype`.

    >>> dtype_in_jax(host_array(jax.random.key(0)).dtype)
    key<fry>
    """
    generator = generator_of(dtype)
    return held_dtype(dtype) if generator is None else _dtype_of_keys(generator)


def generator_of(dtype: DTypeLike) -> str | None:
    """Returns the name of the generator of keys in a host's memory; None for other arrays."""
    names = np.dtype(dtype).names
    return names[0] if names and names[0] in _GENERATORS else None


@functools.cache
def _dtype_of_keys(generator: str) -> np.dtype:
    return jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype
