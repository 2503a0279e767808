"""Comparison of values that every column of the mesh should hold."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dist_ens.layout.mesh import Layout
from dist_ens.layout.placing import to_host
from dist_ens.layout.specs import DATA, MEMBERS, axis_of, broadcast
from dist_ens.types import PyTree, Specs


def differing_leaves(layout: Layout, tree: PyTree, specs: Specs = MEMBERS) -> list[str]:
    """Returns the names of the arrays whose values differ between columns of the mesh.

    The members' state is in every column. It differs if a column computed it from its own examples
    and did not combine it over the data axis. Arrays are compared bit for bit, and NaN equals NaN.

    Args:
        layout: Layout of the arrays.
        tree: Pytree of global arrays. Every host must call this.
        specs: Specs of the arrays, a tree prefix of `tree`. Arrays whose spec has the data axis
            are not compared.

    Returns:
        Names such as `.params['w']`; an empty list if the mesh has one column.
    """
    if layout.data_axis == 1:
        return []
    named = {
        jax.tree_util.keystr(path) or "(the whole)": (leaf, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(tree), broadcast(specs, tree), strict=True
        )
        if axis_of(spec, DATA) is None
    }
    if not named:
        return []
    leaves = {name: leaf for name, (leaf, _) in named.items()}
    specs_of_leaves = tuple((name, spec) for name, (_, spec) in named.items())
    answers = _comparison(layout, specs_of_leaves)(leaves)
    return [name for name, rows in to_host(answers).items() if np.any(rows)]


@functools.lru_cache(maxsize=16)  # A run compares after its first update, a second run does too.
def _comparison(
    layout: Layout, specs: tuple[tuple[str, PartitionSpec], ...]
) -> Callable[[PyTree], PyTree]:
    """Returns the program that compares the columns of arrays with these names and specs."""

    def differ(tree: PyTree) -> PyTree:
        def differs(leaf: jax.Array) -> jax.Array:
            words = _words(leaf)
            return (jax.lax.pmax(words, DATA) != jax.lax.pmin(words, DATA)).any().reshape(1)

        # Every column has the answer of its row.
        return jax.tree.map(differs, tree)

    return jax.jit(layout.shard_map(differ, in_specs=(dict(specs),), out_specs=MEMBERS))


def _words(leaf: jax.Array) -> jax.Array:
    """Returns the bits of an array as integers that collectives can compare."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_words(leaf.real), _words(leaf.imag)])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jnp.where(jnp.isnan(leaf), jnp.full_like(leaf, jnp.nan), leaf)
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    return leaf.astype(jnp.int32) if leaf.dtype.itemsize < 4 else leaf
