"""Members made from two plain functions, or from a class that is registered as a PyTree."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError, call_error, kind_of, name_of
from dist_ens.ground.types import Inputs, Key, ModelState, Outputs, Params, PyTree
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import given_arguments, input_arguments, switch_arguments

_GIVEN = {"hyper": None, "shared": None}
_FULL_INIT = "init(key, inputs) -> (params, model_state)"
_FULL_APPLY = "apply(params, model_state, inputs, key, train) -> (outputs, model_state)"
_SHORT_INIT = "init(key) -> params"
_SHORT_APPLY = "apply(params, inputs) -> outputs"


def from_functions(init: Callable[[Key], Params], apply: Callable[..., Outputs]) -> Member:
    """Returns a member made from `init(key) -> params` and `apply(params, inputs) -> outputs`.

    Args:
        init: Function of a key that makes the parameters, a pytree of floating-point arrays.
        apply: Forward pass for a batch, from inputs [batch, ...] to outputs such as logits
            [batch, classes]. An argument that switches between training and evaluation is set if
            it has a usual name (see `dist_ens.members.modes`).

    Returns:
        The member, without model state. Use `as_member` for a network that has model state or draws
        random numbers.

    >>> member = from_functions(
    ...     init=lambda key: {"w": jnp.ones((3, 2))},
    ...     apply=lambda params, inputs: inputs @ params["w"],
    ... )
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 3)))
    >>> member.apply(params, model_state, jnp.array([[1.0, 2.0, 3.0]]), None, False)[0]
    Array([[6., 6.]], dtype=float32)
    """

    def member_init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        params = init(key, **given_arguments(init, given))
        require_parameters(params)
        return jax.tree.map(jnp.asarray, params), ()

    def member_apply(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        named = {**switch_arguments(apply, train), **given_arguments(apply, given)}
        return apply(params, inputs, **named), model_state

    return Member(member_init, member_apply, name=name_of(apply), takes_given=True)


def from_example_functions(init: Callable[[Key], Params], apply: Callable[..., Outputs]) -> Member:
    """Returns a member made from an `apply(params, x)` that is written for a single example.

    Args:
        init: Function of a key that makes the parameters, a pytree of floating-point arrays.
        apply: Forward pass for one example, from an input [...] to outputs such as logits
            [classes]. It is vectorised over the first axis of every leaf of the inputs.

    Returns:
        The member, which takes whole batches and has no model state.

    >>> member = from_example_functions(
    ...     init=lambda key: {"w": jnp.ones(3)},
    ...     apply=lambda params, x: jnp.dot(params["w"], x),
    ... )
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((2, 3)))
    >>> inputs = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> member.apply(params, model_state, inputs, None, False)[0]
    Array([ 6., 15.], dtype=float32)
    """

    def of_batch(params: Params, inputs: Inputs, **named: PyTree) -> Outputs:
        return jax.vmap(lambda x: apply(params, x, **named))(inputs)

    of_batch.__qualname__ = name_of(apply)
    of_batch.__signature__ = inspect.signature(apply)  # type: ignore[attr-defined]
    return from_functions(init, of_batch)


def from_init_and_apply(
    init: Callable[..., object], apply: Callable[..., Outputs] | None = None
) -> Member:
    """Returns a member made from two functions in the full or the short form; see `as_member`.

    The form is the full one if `init` can be called with two arguments besides those by name.
    """
    is_full = not call_error(init, 2, [*given_arguments(init, _GIVEN)])
    make = _from_full_functions if is_full else from_functions
    switches = [] if is_full or apply is None else [*switch_arguments(apply, True)]
    for name, fn, count, named in (
        ("init", init, 2 if is_full else 1, []),
        ("apply", apply, 5 if is_full else 2, switches),
    ):
        if fn is not None and call_error(fn, count, [*named, *given_arguments(fn, _GIVEN)]):
            taken = ", ".join(inspect.signature(fn).parameters)
            raise UserError(
                f"The function {name} has the parameters ({taken}). The two functions must be "
                f"{_FULL_INIT} and {_FULL_APPLY}, or {_SHORT_INIT} and {_SHORT_APPLY}. Each may "
                "also have arguments named hyper and shared."
            )
    if apply is None:
        return dataclasses.replace(make(init, _missing_apply), name=name_of(init), has_apply=False)
    return make(init, apply)


def _from_full_functions(init: Callable[..., object], apply: Callable[..., object]) -> Member:
    def member_init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        made = init(key, inputs, **given_arguments(init, given))
        params, model_state = _two_of(made, _FULL_INIT)
        require_parameters(params)
        return params, model_state

    def member_apply(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        named = given_arguments(apply, given)
        returned = apply(params, model_state, inputs, key, train, **named)
        outputs, new_state = _two_of(returned, _FULL_APPLY)
        return outputs, new_state if train else model_state

    return Member(member_init, member_apply, name=name_of(apply), takes_given=True)


def _missing_apply(*_: object) -> NoReturn:
    raise UserError("The network was given without apply. Give as_member(init=..., apply=...).")


def _two_of(returned: object, signature: str) -> tuple[PyTree, PyTree]:
    """Returns what a function of a signature returned, if it is a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(
            f"A function of the network returned {kind_of(returned)}, not a tuple of two. It must "
            f"be {signature}, with () for no model state."
        )
    return returned


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

    def called(
        instance: Params,
        inputs: Inputs,
        train: bool,
        hyper: PyTree = None,
        shared: PyTree = None,
    ) -> Outputs:
        call = type(instance).__call__
        args, named = input_arguments(call, inputs)
        settings = given_arguments(call, {"hyper": hyper, "shared": shared})
        return instance(*args, **named, **switch_arguments(call, train), **settings)

    member = from_functions(make, apply or called)
    return dataclasses.replace(member, name=name_of(make))
