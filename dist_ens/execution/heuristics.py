"""Executions that are worth trying for a program, and the rule that ranks them."""

import math
from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr

from dist_ens.execution.lowerings import (
    CONVOLUTION,
    MAX_POOL_GRADIENT,
    PRODUCT,
    becomes_flat,
    becomes_sums,
)
from dist_ens.execution.rewrite import contains
from dist_ens.execution.spec import (
    AUTO,
    LOWERINGS,
    MEMBER_EXECUTIONS,
    Execution,
    Lowering,
    MemberExecution,
)
from dist_ens.ground.types import Leaf
from dist_ens.layout import Layout

# With more copies of a member's step in one program, compilation takes longer than trying every
# other candidate: minutes on an accelerator, a good part of a minute on a CPU.
_MOST_UNROLLED, _MOST_UNROLLED_ON_CPU = 64, 16
# Sizes of a chunk of members, of which the largest that fits is tried. Chunks help where the arrays
# of all members of a device do not fit in a core's cache. Of 4096 small MLPs, chunks of 64 took
# half the time of `vmap`, and chunks of 8 two thirds.
_CHUNKS = range(5, 65)
# With fewer members than this, one `vmap` is small enough.
_FEWEST_CHUNKED = 11
# From this number of multiplications on, the product of a single member keeps a core busy.
_LARGE_PRODUCT = 2**22
# The execution in which a program is traced to find its candidates, without lowerings.
ONE_BY_ONE = Execution(members="map", steps="scanned")


def by_rule(execution: Execution, layout: Layout, trace: Callable[[], ClosedJaxpr]) -> Execution:
    """Returns an execution; in place of `auto`, the first candidate for a traced program."""
    if execution.members != AUTO:
        return execution
    return Execution.parse(candidates(layout, trace(), num_steps=1)[0])


def candidates(layout: Layout, traced: ClosedJaxpr, num_steps: int) -> list[str]:
    """Returns the names of executions worth trying for a traced update, the rule's choice first.

    On an accelerator, the rule chooses `vmap`. On a CPU it depends on the network:

    - With convolutions: `unroll+canonical`, or `map+canonical` if a device holds more than 16
      members. `+masks` is added if the network has max-pooling.
    - Without convolutions: `vmap`, or `map` if a device holds several members and one member's
      matrix product keeps a core busy. `+aligned` is added if it turns a matrix product into
      sums of vectors. Otherwise `+flat` is added if a gradient of weights has many terms.

    Candidates of executions and lowerings that were registered come last. Members that share
    devices on the model axis are taken one after another.
    """
    if layout.model_axis > 1:
        return ["loop"]
    if contains(traced, CONVOLUTION):
        names = _with_convolutions(layout, traced, num_steps)
    else:
        names = _without_convolutions(layout, traced, num_steps)
    words: list[MemberExecution | Lowering] = [*MEMBER_EXECUTIONS.values(), *LOWERINGS.values()]
    for word in words:
        names += word.candidates(layout, traced, num_steps)
    return list(dict.fromkeys(names))


def _with_convolutions(layout: Layout, traced: ClosedJaxpr, num_steps: int) -> list[str]:
    members, few = layout.members_per_device, _are_few(layout)
    masks = "+masks" if contains(traced, MAX_POOL_GRADIENT) else ""
    if layout.platform == "cpu":
        one_by_one = [*(["unroll+canonical"] if few else []), "map+canonical"]
        # XLA's own convolution is slow inside a loop, so the steps are unrolled too.
        plain = ["unroll"] if members * num_steps <= _MOST_UNROLLED_ON_CPU else []
        names = [*one_by_one, "loop+canonical", "vmap+patches", *plain]
        return [name + masks for name in names] + (one_by_one[:1] if masks else [])
    apart = ["vmap+apart" + masks] if few else []
    if layout.data_axis > 1:  # A vmapped convolution would be taken apart; see `lowered`.
        return [*apart, "vmap+patches" + masks, "map" + masks]
    return ["vmap", "vmap" + masks, "vmap+patches" + masks, *apart]


def _without_convolutions(layout: Layout, traced: ClosedJaxpr, num_steps: int) -> list[str]:
    members, on_cpu = layout.members_per_device, layout.platform == "cpu"
    products = _products(traced) if on_cpu else ""
    batched = "vmap" + products
    if members == 1:
        return [batched, "vmap", *([] if num_steps == 1 else [f"{batched}+single"])]
    # There may be time for the first candidates only, so the least likely to win come last.
    one_by_one = ["map" + products, *(["unroll" + products] if _are_few(layout) else [])]
    if on_cpu and contains(traced, PRODUCT, _is_large):
        return [*one_by_one, batched, "vmap", "loop" + products]
    sizes = [size for size in _CHUNKS if members % size == 0 and members >= 2 * size]
    may_chunk = on_cpu and members >= _FEWEST_CHUNKED and sizes
    chunked = [f"chunk:{sizes[-1]}{products}"] if may_chunk else []
    return [batched, *chunked, *one_by_one, "vmap", "loop" + products]


def _are_few(layout: Layout) -> bool:
    """Returns whether a device holds few enough members to unroll them in a program."""
    most = _MOST_UNROLLED_ON_CPU if layout.platform == "cpu" else _MOST_UNROLLED
    return layout.members_per_device <= most


def _products(traced: ClosedJaxpr) -> str:
    """Returns the lowering of matrix products that changes a program on a CPU; "" for none."""
    if contains(traced, PRODUCT, becomes_sums):
        return "+aligned"
    return "+flat" if contains(traced, PRODUCT, becomes_flat) else ""


def _is_large(
    lhs: Leaf, rhs: Leaf, *, dimension_numbers: jax.lax.DotDimensionNumbers, **others: object
) -> bool:
    """Returns whether one matrix product keeps a core busy; of a batched one, each product."""
    (contracted, _), (batched, _) = dimension_numbers
    terms, matrices = (
        math.prod(lhs.shape[axis] for axis in axes) for axes in (contracted, batched)
    )
    return math.prod(lhs.shape) * math.prod(rhs.shape) >= _LARGE_PRODUCT * terms * matrices**2
