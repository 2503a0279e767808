"""The arrays that all members share, on the devices."""

import os
from collections.abc import Callable

import jax
import numpy as np

from dist_ens.checkpoint.network_files import FromFile
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import refuse_lists, require_arrays
from dist_ens.ground.types import Network, PyTree
from dist_ens.layout import REPLICATED, Layout
from dist_ens.members import as_member


def placed_shared(layout: Layout, base_of: Callable[[PyTree], PyTree], given: PyTree) -> Shared:
    """Returns what an `Ensemble` is given as `shared` on the devices of its layout.

    Arrays that are there are not copied, and shapes (`jax.ShapeDtypeStruct`) stay shapes.
    """
    shared = given_shared(base_of, given)
    leaves = jax.tree.leaves(shared)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        specs = iter(layout.leaf_specs(REPLICATED, shared))
        return jax.tree.map(lambda leaf: leaf.update(sharding=layout.sharding(next(specs))), shared)
    return layout.placed(shared, REPLICATED, "shared")


def shapes_of_shared(network: Network | None, given: PyTree) -> Shared:
    """Returns the shapes and types of what an `Ensemble` of a network is given as `shared`."""
    base_of = (lambda shared: shared) if network is None else as_member(network).base_of
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), given_shared(base_of, given)
    )


def given_shared(base_of: Callable[[PyTree], PyTree], given: PyTree) -> Shared:
    """Returns what an `Ensemble` is given as `shared`, where it is, after a check of its form."""
    if isinstance(given, Shared):
        return given
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
    return Shared(arrays, path)
