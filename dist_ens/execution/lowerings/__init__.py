"""Other forms of slow operations, with the same values. Which of them wins is measured, not known.

Each is a rule for `rewrite.rewritten`. Under `vmap` a convolution of many members becomes a
grouped one, for which XLA has no fast program on a CPU (nor often elsewhere); and inside a `while`
XLA's CPU backend is fast only where the layout of a convolution is canonical. A small network's
matrix products have sides that are no whole number of vectors, or too short for any kernel; and the
gradients of weights are slow where they are sums of many terms.
"""

from dist_ens.execution.lowerings.convolutions import (
    CONVOLUTION,
    convolution_as_patches,
    convolution_in_canonical_layout,
    convolutions_apart,
)
from dist_ens.execution.lowerings.pooling import MAX_POOL_GRADIENT, max_pool_gradient_as_masks
from dist_ens.execution.lowerings.products import (
    PRODUCT,
    becomes_flat,
    becomes_sums,
    flat_gradient_of_weights,
    product_in_whole_vectors,
)

__all__ = [
    "CONVOLUTION",
    "MAX_POOL_GRADIENT",
    "PRODUCT",
    "becomes_flat",
    "becomes_sums",
    "convolution_as_patches",
    "convolution_in_canonical_layout",
    "convolutions_apart",
    "flat_gradient_of_weights",
    "max_pool_gradient_as_masks",
    "product_in_whole_vectors",
]
