"""Lowerings: other forms of slow operations, with the same values.

Each lowering is a rule for `rewrite.rewritten`. Timing finds the fastest. The reasons for them:

- `vmap` turns the convolutions of many members into one grouped convolution. XLA has no fast
  program for it on a CPU, and often none elsewhere.
- Inside a `while`, XLA's CPU backend is fast only for convolutions in canonical layout.
- The matrix products of a small network have sides that are not a multiple of a vector's length,
  or too short for any kernel.
- The gradients of weights are slow if they are sums of many terms.
- The compiler divides a batch over the columns of the mesh. Some sums over the examples it does not
  divide, or it sends more than their results.
"""

from dist_ens.execution.lowerings import canonical
from dist_ens.execution.lowerings.columns import (
    SCATTER_ADD,
    call_on_every_column,
    product_of_swapped_factors,
    pure_callback,
    scatter_add_by_columns,
)
from dist_ens.execution.lowerings.convolutions import CONVOLUTION
from dist_ens.execution.lowerings.pooling import MAX_POOL_GRADIENT
from dist_ens.execution.lowerings.products import PRODUCT, becomes_flat, becomes_sums

__all__ = [
    "CONVOLUTION",
    "MAX_POOL_GRADIENT",
    "PRODUCT",
    "SCATTER_ADD",
    "becomes_flat",
    "becomes_sums",
    "call_on_every_column",
    "canonical",
    "product_of_swapped_factors",
    "pure_callback",
    "scatter_add_by_columns",
]
