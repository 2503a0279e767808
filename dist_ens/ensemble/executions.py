"""How a device runs the members it holds. The one place where another way plugs in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.errors import UserError


def over_members(fn: Callable[[Any, Any], Any], execution: str) -> Callable[[Any, Any], Any]:
    """`fn` of one member, for all members of a device.

    Args:
        fn: `fn(member, shared)`, where `shared` (a batch) is the same for every member.
        execution: `vmap`, one batched program; or `unroll`, the members' own operations one after
            another in one program (the faster where batching makes an operation slow, as it does
            convolutions on a CPU).

    Returns:
        The same function of leaves [members, ...], returning leaves [members, ...].
    """
    if execution == "vmap":
        return jax.vmap(fn, in_axes=(0, None))
    if execution == "unroll":
        return _unroll(fn)
    raise UserError(f"execution is vmap or unroll. Received: {execution!r}. Choose one of them.")


def _unroll(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def each_in_turn(members: Any, shared: Any) -> Any:
        count = len(jax.tree.leaves(members)[0])
        results = [
            fn(jax.tree.map(lambda leaf: leaf[i], members), shared)  # noqa: B023
            for i in range(count)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    return each_in_turn
