"""What is saved of a state: its leaves by name, a random key as the numbers that it consists of."""

from typing import Any

import jax

from dist_ens.errors import RunError


def named_leaves(state: Any) -> dict[str, Any]:
    """What is saved of each leaf, by name, in the order of `jax.tree.leaves`.

    Args:
        state: A pytree of arrays, or of abstract ones.

    Raises:
        RunError: If two leaves have one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise RunError(
            "Every leaf of a state has a name of its own. Received: two leaves of one name among "
            f"{', '.join(named)}. Rename entries of the parameters that contain a dot."
        )
    return {name: _numbers(leaf) for name, leaf in named.items()}


def state_of(named: dict[str, jax.Array], abstract: Any) -> Any:
    """The inverse of `named_leaves`.

    Args:
        named: Arrays, of every leaf of `abstract`.
        abstract: The state's structure, and the types of its leaves.
    """
    leaves, structure = jax.tree.flatten(abstract)
    restored = [
        jax.random.wrap_key_data(named[name], dtype=leaf.dtype) if _is_key(leaf) else named[name]
        for name, leaf in zip(named_leaves(abstract), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding)
    return jax.random.key_data(leaf)  # what the key holds: no program, which would wait its turn
