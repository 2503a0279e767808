"""Members made from a user's class that is registered as a PyTree."""

import dataclasses
from collections.abc import Callable

from dist_ens.ground.errors import name_of
from dist_ens.ground.types import Inputs, Key, Outputs, Params
from dist_ens.members.functions import from_functions
from dist_ens.members.member import Member
from dist_ens.members.modes import input_arguments, switch_arguments


def from_pytree(
    make: Callable[[Key], Params],
    apply: Callable[..., Outputs] | None = None,
) -> Member:
    """Returns a member made from a class whose instances are the parameters.

    The class is registered with `jax.tree_util.register_dataclass` or `register_pytree_node`. The
    gradient is then an instance of it too.

    Args:
        make: Function of a key that returns an instance.
        apply: Forward pass, `apply(instance, inputs) -> outputs`, for a batch. Default: the
            instance is called.

    Returns:
        The member. Its `init` raises a `UserError` if the class is not registered; the message
        says how to register it.

    >>> import jax
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass
    ... class Line:
    ...     slope: jax.Array
    ...
    ...     def __call__(self, x):
    ...         return self.slope * x
    >>> member = from_pytree(lambda key: Line(jax.numpy.float32(2)))
    >>> params, model_state = member.init(jax.random.key(0), jax.numpy.zeros(2))
    >>> member.apply(params, model_state, jax.numpy.array([1.0, 3.0]), None, False)[0]
    Array([2., 6.], dtype=float32)
    """

    def called(instance: Params, inputs: Inputs, train: bool) -> Outputs:
        call = type(instance).__call__
        args, named = input_arguments(call, inputs)
        return instance(*args, **named, **switch_arguments(call, train))

    member = from_functions(make, apply or called)
    return dataclasses.replace(member, name=name_of(make))
