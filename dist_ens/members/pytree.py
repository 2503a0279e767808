"""A member from a class of the user's own, registered as a PyTree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dist_ens.members.functions import from_functions
from dist_ens.members.member import Member, name_of
from dist_ens.members.modes import switch_arguments


def from_pytree(
    make: Callable[[jax.Array], Any],
    apply: Callable[..., jax.Array] | None = None,
) -> Member:
    """A member from a class whose instances are the parameters.

    The class is registered with `jax.tree_util.register_dataclass` or `register_pytree_node`; the
    gradient is then an instance of it too.

    Args:
        make: `make(key)` returns an instance.
        apply: `apply(instance, inputs)` returns the logits of a batch; default: the instance is
            called.

    Returns:
        The member.

    Raises:
        UserError: When the member is initialised, if the class is not registered; the message says
            how to.
    """

    def called(instance: Any, inputs: jax.Array, train: bool) -> jax.Array:
        return instance(inputs, **switch_arguments(type(instance).__call__, train))

    member = from_functions(make, apply or called)
    return dataclasses.replace(member, name=name_of(make))
