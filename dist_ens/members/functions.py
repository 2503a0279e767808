"""A member from two plain functions."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.members.member import Member, name_of, require_parameters
from dist_ens.members.modes import switch_arguments


def from_functions(init: Callable[[jax.Array], Any], apply: Callable[..., jax.Array]) -> Member:
    """A member from `init(key) -> params` and `apply(params, inputs) -> outputs` for a batch.

    Args:
        init: Makes the parameters, a pytree of floating-point arrays.
        apply: Inputs [batch, ...] to logits [batch, classes]. An argument that switches between
            training and evaluation under a usual name (see `dist_ens.members.modes`) is set.

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
        return apply(params, inputs, **switch_arguments(apply, train)), model_state

    return Member(member_init, member_apply, name=name_of(apply))


def from_example_functions(
    init: Callable[[jax.Array], Any], apply: Callable[..., jax.Array]
) -> Member:
    """A member from an `apply(params, x)` written for a single example, vectorised over the batch.

    Args:
        init: `init(key) -> params`, a pytree of floating-point arrays.
        apply: One input [...] to one row of logits [classes].

    Returns:
        The member, for whole batches.
    """

    def of_batch(params: Any, inputs: jax.Array, **mode: bool) -> jax.Array:
        return jax.vmap(lambda x: apply(params, x, **mode))(inputs)

    of_batch.__qualname__ = name_of(apply)
    of_batch.__signature__ = inspect.signature(apply)  # type: ignore[attr-defined]
    return from_functions(init, of_batch)
