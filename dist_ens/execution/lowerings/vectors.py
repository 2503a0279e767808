"""Properties of a CPU's vectors, on which some lowerings depend."""

import jax.numpy as jnp
from numpy.typing import DTypeLike

from dist_ens.types import Leaf

# The widest vectors hold this number of float32 values.
VECTOR = 16


def is_float32(
    lhs: Leaf, rhs: Leaf, *, preferred_element_type: DTypeLike | None, **_: object
) -> bool:
    """Returns whether both factors and their product are float32."""
    types = lhs.dtype, rhs.dtype, preferred_element_type or lhs.dtype
    return all(dtype == jnp.float32 for dtype in types)
