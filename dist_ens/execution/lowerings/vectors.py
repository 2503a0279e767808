"""What is known of a CPU's vectors, for which some forms are made."""

from typing import Any

import jax.numpy as jnp

# Numbers in the widest.
VECTOR = 16


def is_float32(lhs: Any, rhs: Any, *, preferred_element_type: Any, **_: Any) -> bool:
    """Whether factors and product are."""
    types = lhs.dtype, rhs.dtype, preferred_element_type or lhs.dtype
    return all(dtype == jnp.float32 for dtype in types)
