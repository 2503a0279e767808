"""Executions that are worth trying for a program, and the rule that says which comes first."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr

from dist_ens.execution.lowerings import (
    CONVOLUTION,
    MAX_POOL_GRADIENT,
    PRODUCT,
    becomes_flat,
    becomes_sums,
)
from dist_ens.execution.rewrite import contains
from dist_ens.layout import Layout

# Beyond so many copies of a member's step in one program, to compile it takes longer than to try
# everything else: minutes, on a CPU a good part of one.
_MOST_UNROLLED, _MOST_UNROLLED_ON_CPU = 64, 16
# So many members are batched at a time where all of a device's would not stay in a core's cache.
_CHUNKS = range(5, 11)
# Multiplications of a product from which on a core is as busy with one member's as with many.
_LARGE_PRODUCT = 2**22


def candidates(layout: Layout, traced: ClosedJaxpr, num_steps: int) -> list[str]:
    """Executions worth trying for a program, the one that the rule chooses first.

    The rule: on a CPU networks with convolutions are unrolled (mapped where a device holds more
    than 16), in canonical layout, with max-pooling's gradient by masks. Of others, on a CPU, matrix
    products are aligned if that makes sums of one of them, else gradients of weights are made flat
    if one of them has many terms; and several members are mapped if they have a product so large
    that one member's keeps a core busy. Every other network, and every one on an accelerator, is
    vmapped.

    Args:
        layout: Of the ensemble.
        traced: Its `traced_update`.
        num_steps: Of one call.

    Returns:
        Executions, each once.
    """
    members, on_cpu = layout.members_per_device, layout.platform == "cpu"
    convolves = contains(traced, CONVOLUTION)
    masks = "+masks" if contains(traced, MAX_POOL_GRADIENT) else ""
    few = members <= (_MOST_UNROLLED_ON_CPU if on_cpu else _MOST_UNROLLED)
    if convolves and on_cpu:
        one_by_one = [*(["unroll+canonical"] if few else []), "map+canonical"]
        # Left to XLA a convolution is slow inside a loop: the steps are unrolled too.
        copies = members * num_steps
        plain = ["unroll"] if copies <= _MOST_UNROLLED_ON_CPU else []
        names = [*one_by_one, "loop+canonical", "vmap+patches", *plain]
        return [name + masks for name in names] + (one_by_one[:1] if masks else [])
    if convolves:
        apart = ["vmap+apart" + masks] if few else []
        return list(dict.fromkeys(["vmap", "vmap" + masks, "vmap+patches" + masks, *apart]))
    products = _products(traced) if on_cpu else ""
    batched, plain = "vmap" + products, ["vmap"] if products else []
    if members == 1:
        return [batched, *plain, *([] if num_steps == 1 else [f"{batched}+single"])]
    # Where there is time for some only, the last are the least likely to win.
    one_by_one = ["map" + products, *(["unroll" + products] if few else [])]
    if on_cpu and contains(traced, PRODUCT, _is_large):
        return [*one_by_one, batched, *plain, "loop" + products]
    sizes = [size for size in _CHUNKS if members % size == 0 and members > _CHUNKS[-1]]
    chunked = [f"chunk:{sizes[-1]}{products}"] if on_cpu and sizes else []
    return [batched, *chunked, *one_by_one, *plain, "loop" + products]


def _products(traced: ClosedJaxpr) -> str:
    """The lowering of a CPU's matrix products that a program has work for."""
    if contains(traced, PRODUCT, becomes_sums):
        return "+aligned"
    return "+flat" if contains(traced, PRODUCT, becomes_flat) else ""


def _is_large(lhs: Any, rhs: Any, *, dimension_numbers: Any, **_: Any) -> bool:
    """Whether a product, each one of those that are batched, keeps a core busy; shapes will do."""
    (contracted, _), (batched, _) = dimension_numbers
    terms, matrices = (
        math.prod(lhs.shape[axis] for axis in axes) for axes in (contracted, batched)
    )
    return math.prod(lhs.shape) * math.prod(rhs.shape) >= _LARGE_PRODUCT * terms * matrices**2
