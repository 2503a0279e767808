"""Arrays that all members of an ensemble share, and that no update changes."""

import dataclasses
from functools import partial

import jax

from dist_ens.ground.types import PyTree


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["path"])
@dataclasses.dataclass(frozen=True)
class Shared:
    """The arrays that all members share, such as a network that was trained before.

    Attributes:
        arrays: Pytree of arrays, leaves [...] without a members axis. It is `()` if there are none.
        path: File or folder that they were read from; "" if there is none.

    >>> Shared().is_empty
    True
    """

    arrays: PyTree = ()
    path: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there are no arrays."""
        return not jax.tree.leaves(self.arrays)


NOTHING_SHARED = Shared()
