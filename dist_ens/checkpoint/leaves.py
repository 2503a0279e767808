"""Conversion between a state and its leaves by name, as a checkpoint holds them."""

import collections
from collections.abc import Mapping

import jax
import numpy as np

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError
from dist_ens.ground.types import Leaf, PyTree, Tree


def named_leaves(state: PyTree) -> dict[str, Leaf]:
    """Returns the leaves by name, in the order of `jax.tree.leaves`. Keys are integers."""
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
    """Returns the state with given leaves, by the names of `named_leaves`."""
    leaves, structure = jax.tree.flatten(abstract)
    restored = [
        jax.random.wrap_key_data(named[name], dtype=leaf.dtype) if _is_key(leaf) else named[name]
        for name, leaf in zip(named_leaves(abstract), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def check_leaves(path: str, saved: Mapping[str, Leaf], named: Mapping[str, Leaf]) -> None:
    """Raises a `RunError` unless saved leaves have the names, shapes and types asked for."""
    there, asked = _types_of(saved), _types_of(named)
    for name in sorted(there.keys() | asked.keys()):
        old, new = there.get(name, "absent"), asked.get(name, "absent")
        if old != new:
            raise RunError(
                f"Leaf {name} of the state is {old} in {quoted(path)} and {new} here. The network "
                "or the optimizer has changed since, or JAX_ENABLE_X64 is set in only one of the "
                "runs. Use those that the run was trained with, or choose another folder."
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


def _types_of(named: Mapping[str, Leaf]) -> dict[str, str]:
    """Returns the type and the shape of each leaf as a text, such as `float32[4, 3]`."""
    return {name: f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for name, leaf in named.items()}
