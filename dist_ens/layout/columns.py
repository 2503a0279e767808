"""Whether the columns of the mesh agree about what every one of them holds."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.layout.mesh import DATA, MEMBERS, Layout, to_host


def leaves_that_differ(layout: Layout, tree: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arrays whose values differ between columns of the mesh.

    The members' state lies in every column. An array differs if a network computes it from its own
    column's examples and does not combine it over the data axis.

    Args:
        layout: Mesh on which the arrays lie.
        tree: Global arrays [members, ...] of the layout by name: booleans, integers or keys. Every
            host must call this.

    Returns:
        Names; none if the mesh has one column.
    """
    if layout.data_axis == 1 or not tree:
        return []

    def differ(tree: Any) -> Any:
        def differs(leaf: jax.Array) -> jax.Array:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            words = jax.random.key_data(leaf) if is_key else leaf
            if words.dtype.itemsize < 4:
                words = words.astype(jnp.int32)
            return (jax.lax.pmax(words, DATA) != jax.lax.pmin(words, DATA)).any().reshape(1)

        # Each row's answer, by every column.
        return jax.tree.map(differs, tree)

    answers = jax.jit(layout.shard_map(differ, in_specs=MEMBERS, out_specs=MEMBERS))(tree)
    return [name for name, rows in to_host(answers).items() if np.any(rows)]
