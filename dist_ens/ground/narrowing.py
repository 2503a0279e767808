"""Arrays of NumPy in the types in which JAX holds them, and checks of their values.

NumPy cannot hold a typed key of JAX. On a host, an array of keys is an array of records with one
field, which has the name of the generator and holds the words of the key.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import Inputs

_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")


def held_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the type in which JAX holds an array of a NumPy type.

    JAX holds numbers of at most 32 bits, in the byte order of the machine.

    >>> [held_dtype(name).name for name in ("int64", "uint64", "float64", ">f4", "uint8", "bool")]
    ['int32', 'uint32', 'float32', 'float32', 'uint8', 'bool']
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iuf" and dtype.itemsize > 4:
        return np.dtype(f"{dtype.kind}4")
    return dtype.newbyteorder("=")


def narrowed(
    array: np.ndarray, dtype: DTypeLike, where: object, *, exact: bool = False
) -> np.ndarray:
    """Returns an array in another type, without changing a value beyond ordinary rounding.

    A whole number fits in an integer type if it lies in its range. A number fits in a float type if
    it does not become infinite; with `exact`, whole numbers must not be rounded either. NaN and
    infinity fit in float types only. The error names the array by `where`.

    >>> narrowed(np.array([1, 2]), "uint8", "x.npy")
    array([1, 2], dtype=uint8)
    """
    to = np.dtype(dtype)
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"{where} has the type {array.dtype}, which holds no real numbers. Convert it to "
            "floats or integers, in rows of equal length."
        )
    if to.kind == "f":
        unfit = _too_large_for_float(array, to, exact)
    elif to.kind == "b":
        unfit = _outside(array, 0, 1)
    else:
        unfit = _outside(array, int(np.iinfo(to).min), int(np.iinfo(to).max))
    if unfit is not None:
        index, count = first_index(unfit), int(np.count_nonzero(unfit))
        others = f" ({count:,} values do not fit)" if count > 1 else ""
        raise UserError(
            f"{where}: the value {array[index]} at index {index} does not fit in {to.name}{others}"
            ". Shift, rescale or round the values, and save them again."
        )
    with np.errstate(over="ignore"):  # The only infinite values left were infinite before.
        return array.astype(to, copy=False)


def first_index(mask: np.ndarray) -> int | tuple[int, ...]:
    """Returns the first index at which a mask is True, an int if the mask has one axis.

    >>> first_index(np.array([[False, False], [False, True]]))
    (1, 1)
    """
    index = tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))
    return index[0] if len(index) == 1 else index


def _outside(array: np.ndarray, low: int, high: int) -> np.ndarray | None:
    """Returns a mask of the values that are not whole numbers in [low, high]; None if all are."""
    if array.dtype.kind == "f":
        # A float type holds `high + 1` exactly, since it is a power of two. It may round `high`.
        bottom, top = np.float64(low), np.float64(high + 1)
        unfit = ~((array >= bottom) & (array < top) & (array == np.trunc(array)))
    elif array.size and (int(array.min()) < low or int(array.max()) > high):
        unfit = (array < low) | (array > high)
    else:
        return None
    return unfit if unfit.any() else None


def _too_large_for_float(array: np.ndarray, to: np.dtype, exact: bool) -> np.ndarray | None:
    """Returns a mask of the values that do not fit in a float type; None if all fit."""
    if exact and array.dtype.kind in "iu":
        largest = 2 ** (int(np.finfo(to).nmant) + 1)  # All whole numbers up to it are exact.
        return _outside(array, -largest, largest)
    if array.dtype.kind == "b" or np.can_cast(array.dtype, to, "safe"):
        return None
    with np.errstate(over="ignore"):
        unfit = np.isinf(array.astype(to)) & np.isfinite(array)
    return unfit if unfit.any() else None


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
