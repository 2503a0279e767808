"""The kinds of data that users give: a pytree of arrays, or an iterable of batches."""

import collections.abc
from collections.abc import Iterator

import jax

from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.types import Batch, Data


def is_tree_of_arrays(data: Data) -> bool:
    """Returns whether data is a pytree of arrays, and not an iterable of batches as a list is."""
    if isinstance(data, list | collections.abc.Iterator):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "__next__")
        for leaf in leaves
    )


def batches_in(data: Data) -> Iterator[Batch]:
    """Returns an iterator over batches: of an iterable, or of a function that returns one."""
    is_function = callable(data) and not (isinstance(data, type) or hasattr(data, "__iter__"))
    found = data() if is_function else data
    if isinstance(found, type) or not hasattr(found, "__iter__"):
        raise UserError(
            f"The data is {kind_of(found)}. Give a dict of arrays, an instance of a source of "
            "dist_ens.data, an iterable of batches, or a function that returns an iterator."
        )
    return iter(found)
