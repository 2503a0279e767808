"""Conversion between a state and its leaves by name, as a checkpoint holds them."""

import collections
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import tensorstore as ts
from numpy.typing import DTypeLike

from dist_ens.commands import quoted
from dist_ens.errors import RunError
from dist_ens.types import Leaf, PyTree, Tree


def named_leaves(state: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a state by name, in the order of `jax.tree.leaves`.

    A PRNG key is replaced by its key data, which are integers.

    Args:
        state: Pytree of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
        RunError: If two leaves have the same name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise RunError(
            f"Two leaves of the state have the same name: {repeated[0]}. Rename entries of the "
            "parameters that contain a dot."
        )
    return {name: _integers(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def state_of(named: dict[str, jax.Array], abstract: Tree) -> Tree:
    """Returns the state with given leaves, by the names of `named_leaves`.

    Args:
        named: Array of every leaf, by name.
        abstract: Pytree with the state's structure and the types of its leaves.
    """
    leaves, structure = jax.tree.flatten(abstract)
    restored = [
        jax.random.wrap_key_data(named[name], dtype=leaf.dtype) if _is_key(leaf) else named[name]
        for name, leaf in zip(named_leaves(abstract), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def check_leaves(
    path: pathlib.Path, saved: Mapping[str, ts.TensorStore], named: Mapping[str, Leaf]
) -> None:
    """Checks that the saved leaves have the names, shapes and types of those asked for.

    Args:
        path: Folder of the checkpoint, for the message.
        saved: Arrays of the checkpoint, by name.
        named: Leaves that are asked for, by name.

    Raises:
        RunError: If a leaf differs.
    """
    there = {name: _shape_of(array.dtype.numpy_dtype, array.shape) for name, array in saved.items()}
    asked = {name: _shape_of(leaf.dtype, leaf.shape) for name, leaf in named.items()}
    for name in sorted(there.keys() | asked.keys()):
        old, new = there.get(name, "absent"), asked.get(name, "absent")
        if old != new:
            precision = {old.replace("64", "32"), new.replace("64", "32")}
            remedy = (
                "JAX_ENABLE_X64 was set in only one of the two runs. Set it as it was set when "
                "the run was trained."
                if len(precision) == 1
                else "The network or the optimizer has changed since. Use those that the run was "
                "trained with, or choose another folder."
            )
            raise RunError(
                f"Leaf {name} of the state is {old} in {quoted(path)} and {new} here. {remedy}"
            )


def _is_key(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array of PRNG keys."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _integers(leaf: Leaf) -> Leaf:
    """Returns the key data of PRNG keys, and other leaves unchanged."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding)
    return jax.random.key_data(leaf)  # It runs no program, so it does not wait for the devices.


def _shape_of(dtype: DTypeLike, shape: Sequence[int]) -> str:
    """Returns a type and a shape as a text for messages, such as `float32[4, 3]`."""
    return f"{np.dtype(dtype)}{list(shape)}"
