"""How a device runs the members it holds. The one place where another way plugs in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.config.execution_spec import Execution
from dist_ens.execution import lowerings
from dist_ens.execution.rewrite import Rule, rewritten

_CONVOLUTIONS: dict[str, Rule] = {
    "patches": lowerings.convolution_as_patches,
    "canonical": lowerings.convolution_in_canonical_layout,
    "apart": lowerings.convolutions_apart,
}
_PRODUCTS: dict[str, Rule] = {
    "aligned": lowerings.product_in_whole_vectors,
    "flat": lowerings.flat_gradient_of_weights,
}
_MAX_POOLING: dict[str, Rule] = {"masks": lowerings.max_pool_gradient_as_masks}


def lowered(fn: Callable[..., Any], execution: Execution) -> Callable[..., Any]:
    """`fn` of one member with its slow operations in the forms that the execution names.

    Args:
        fn: What one member does, derivatives taken.
        execution: Its `convolutions`, `products` and `max_pooling`.

    Returns:
        A function of the same arguments and results, to floating-point tolerance.
    """
    rules = {}
    if execution.convolutions is not None:
        rules[lowerings.CONVOLUTION] = _CONVOLUTIONS[execution.convolutions]
    if execution.products is not None:
        rules[lowerings.PRODUCT] = _PRODUCTS[execution.products]
    if execution.max_pooling is not None:
        rules[lowerings.MAX_POOL_GRADIENT] = _MAX_POOLING[execution.max_pooling]
    return rewritten(fn, rules) if rules else fn


def over_members(fn: Callable[[Any, Any], Any], execution: Execution) -> Callable[[Any, Any], Any]:
    """`fn` of one member, for all members of a device.

    Args:
        fn: `fn(member, shared)`, where `shared` (a batch) is the same for every member.
        execution: Its `members` says how. `loop` dispatches programs of one member (see `loop`);
            inside a program it is `map`.

    Returns:
        The same function of leaves [members, ...], returning leaves [members, ...].
    """
    if execution.members == "vmap":
        return jax.vmap(fn, in_axes=(0, None))
    if execution.members == "unroll":
        return _unroll(fn)
    chunk_size = execution.chunk_size

    def one_after_another(members: Any, shared: Any) -> Any:
        return jax.lax.map(lambda member: fn(member, shared), members, batch_size=chunk_size)

    return one_after_another


def _unroll(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def each_in_turn(members: Any, shared: Any) -> Any:
        count = len(jax.tree.leaves(members)[0])
        results = [
            fn(jax.tree.map(lambda leaf: leaf[i], members), shared)  # noqa: B023
            for i in range(count)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    return each_in_turn
