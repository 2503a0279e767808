"""A member from two plain functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.member.member import Member, require_parameters


def from_functions(
    init: Callable[[jax.Array], Any], apply: Callable[[Any, jax.Array], jax.Array]
) -> Member:
    """A member from `init(key) -> params` and `apply(params, inputs) -> outputs` for a batch.

    Args:
        init: Makes the parameters, a pytree of floating-point arrays.
        apply: Inputs [batch, ...] to logits [batch, classes].

    Returns:
        The member. It has no model state; one that needs it, or a key, is made as `Member` itself.

    >>> member = from_functions(
    ...     init=lambda key: {"w": jax.random.normal(key, (3, 2))},
    ...     apply=lambda params, inputs: inputs @ params["w"],
    ... )
    >>> params, _ = member.init(jax.random.key(0), jnp.zeros((5, 3)))
    >>> outputs, _ = member.apply(params, (), jnp.ones((5, 3)), None, False)
    >>> outputs.shape
    (5, 2)
    """

    def member_init(key: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
        params = init(key)
        require_parameters(params)
        return jax.tree.map(jnp.asarray, params), ()

    def member_apply(
        params: Any, model_state: Any, inputs: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Any]:
        return apply(params, inputs), model_state

    return Member(member_init, member_apply)


def from_example_functions(
    init: Callable[[jax.Array], Any], apply: Callable[[Any, jax.Array], jax.Array]
) -> Member:
    """A member from an `apply(params, x)` written for a single example, vectorised over the batch.

    Args:
        init: `init(key) -> params`, a pytree of floating-point arrays.
        apply: One input [...] to one row of logits [classes].

    Returns:
        The member, for whole batches.
    """
    return from_functions(init, jax.vmap(apply, in_axes=(None, 0)))
