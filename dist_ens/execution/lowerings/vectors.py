"""Properties of a CPU's vectors, on which some lowerings depend."""

from typing import Any

import jax.numpy as jnp

# The widest vectors hold this number of float32 values.
VECTOR = 16


def is_float32(lhs: Any, rhs: Any, *, preferred_element_type: Any, **_: Any) -> bool:
    """Returns whether both factors and their product are float32."""
    types = lhs.dtype, rhs.dtype, preferred_element_type or lhs.dtype
    return all(dtype == jnp.float32 for dtype in types)
