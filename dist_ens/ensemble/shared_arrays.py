"""The arrays that all members share, on the devices."""

import os
from collections.abc import Callable

import jax

from dist_ens.checkpoint.network_files import FromFile
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import refuse_lists, require_arrays
from dist_ens.ground.types import PyTree
from dist_ens.layout import REPLICATED, Layout


def placed_shared(layout: Layout, base_of: Callable[[PyTree], PyTree], given: PyTree) -> Shared:
    """Returns what an `Ensemble` is given as `shared` on the devices of its layout.

    Arrays that are there are not copied, and shapes (`jax.ShapeDtypeStruct`) stay shapes.
    """
    if isinstance(given, Shared):
        shared = given
    else:
        if isinstance(given, str | os.PathLike) or hasattr(given, "files"):
            raise UserError(
                f"shared is {kind_of(given)}. Give a pytree of arrays, or dist_ens.from_file(path)."
            )
        arrays, path = (given.arrays, given.path) if isinstance(given, FromFile) else (given, "")
        if not jax.tree.leaves(arrays):
            return Shared()
        arrays = base_of(arrays)
        require_arrays(arrays)
        refuse_lists(arrays, "shared")
        shared = Shared(arrays, path)
    leaves = jax.tree.leaves(shared)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        specs = iter(layout.leaf_specs(REPLICATED, shared))
        return jax.tree.map(lambda leaf: leaf.update(sharding=layout.sharding(next(specs))), shared)
    return layout.placed(shared, REPLICATED, "shared")
