"""Whether the columns of the mesh agree about what every one of them holds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.layout.mesh import DATA, MEMBERS, Layout, to_host


def leaves_that_differ(layout: Layout, tree: Any) -> list[str]:
    """Returns the names of the leaves whose values differ between columns of the mesh.

    The members' state lies in every column. A leaf differs if a network computes it from its own
    column's examples and does not combine it over the data axis. Values are compared bit for bit;
    NaN equals NaN.

    Args:
        layout: Mesh on which the arrays lie.
        tree: Global arrays [members, ...] of the layout. Every host must call this.

    Returns:
        Names such as `.model_state['count']`; none if the mesh has one column.
    """
    if layout.data_axis == 1:
        return []

    def differ(tree: Any) -> Any:
        def differs(leaf: jax.Array) -> jax.Array:
            bits = _bits(leaf)
            return (jax.lax.pmax(bits, DATA) != jax.lax.pmin(bits, DATA)).any().reshape(1)

        # Each row's answer, by every column.
        return jax.tree.map(differs, tree)

    answers = jax.jit(layout.shard_map(differ, in_specs=MEMBERS, out_specs=MEMBERS))(tree)
    return [
        jax.tree_util.keystr(path)
        for path, rows in jax.tree_util.tree_leaves_with_path(to_host(answers))
        if np.any(rows)
    ]


def _bits(leaf: jax.Array) -> jax.Array:
    """Returns the bits of an array as unsigned integers of at least 32 bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jnp.where(jnp.isnan(leaf), jnp.full_like(leaf, jnp.nan), leaf)
        leaf = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.int32)
