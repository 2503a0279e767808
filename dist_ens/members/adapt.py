"""`as_member`, which makes a member from a network of any JAX library."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable

import jax

from dist_ens.ground.errors import UserError, call_error, first_line, name_of
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Network, PyTree
from dist_ens.members.equinox import from_equinox
from dist_ens.members.functions import from_init_and_apply, from_pytree
from dist_ens.members.haiku import from_haiku
from dist_ens.members.linen import from_linen
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.nnx import from_nnx, without_mesh

_NETWORKS = (
    "Give a flax.linen module, a function of `rngs` that makes a flax.nnx module, a function of "
    "`key` that makes an equinox module or an instance of a class that is registered as a PyTree, "
    "a Haiku transform, or two functions: as_member(init=..., apply=...)."
)


def as_member(
    network: Network = None,
    /,
    *,
    init: Callable[..., PyTree] | None = None,
    apply: Callable[..., PyTree] | None = None,
    heads: int | None = None,
) -> Member:
    """Returns a member made from a network of any JAX library.

    A function that makes a network is traced to find its library. Nothing is computed.

    Args:
        network: Network, one of

            - a `Member`, which is returned as it is;
            - a flax.linen module;
            - a function of `rngs` that makes a flax.nnx module, or the module's class;
            - a function of `key` that makes an equinox module, or the module's class;
            - a function of `key` that makes an instance of a class that is registered as a PyTree;
              the instance is called with one batch of inputs;
            - a Haiku `Transformed` or `TransformedWithState`;
            - a pair of functions, `(init, apply)`.
        init: Initialiser, in the full form `init(key, inputs) -> (params, model_state)`, with `()`
            for no model state, or in the short form `init(key) -> params`. `inputs` is what `apply`
            is given too: `batch["inputs"]`, or the whole batch if it is no dict with this key.
        apply: Forward pass. With the full form of `init` it is `apply(params, model_state, inputs,
            key, train) -> (outputs, model_state)`. With the short form it is `apply(params,
            inputs) -> outputs`. Default: the member can be trained with a loss function, but
            cannot predict.
        heads: Number of heads of a network whose outputs are [heads, batch, ...]. Each head is a
            predictor, and the loss is one of `losses.of_heads`. Default: outputs [batch, ...].

    Returns:
        The member. The adapter of each library, such as `from_linen`, describes it.

    Raises:
        UserError: If no member can be made from the arguments; the message says what to give.

    >>> import flax.linen as nn
    >>> as_member(nn.Dense(3)).name
    'Dense'
    >>> member = as_member(init=lambda key, inputs: ({"w": jax.random.normal(key, (3,))}, ()))
    >>> member.has_apply
    False
    """
    if heads is not None:
        of_heads = whole_number("heads", heads, least=1)
        return dataclasses.replace(as_member(network, init=init, apply=apply), heads=of_heads)
    if (network is None) == (init is None):
        raise UserError(f"as_member takes either a network or init, and maybe apply. {_NETWORKS}")
    if init is not None:
        return from_init_and_apply(init, apply)
    if isinstance(network, Member):
        return network
    if _is_a(network, "flax.linen", "Module"):
        return from_linen(network)
    if _is_a(network, "haiku", "Transformed") or _is_a(network, "haiku", "TransformedWithState"):
        return from_haiku(network)
    if isinstance(network, tuple) and len(network) == 2 and all(map(callable, network)):
        return from_init_and_apply(*network)
    _check_factory(network)
    return _from_factory(network)


def _check_factory(network: Network) -> None:
    """Raises a `UserError` unless an object may be a function or class that makes a network."""
    name = type(network).__name__
    if isinstance(network, type) and _is_a(network, "flax.linen", "Module", issubclass):
        raise UserError(f"The network is a class. Give an instance: {network.__name__}(...).")
    is_nnx = _is_a(network, "flax.nnx", "Module")
    is_function = isinstance(network, functools.partial) or jax.tree_util.all_leaves([network])
    if is_nnx or (callable(network) and not is_function):
        raise UserError(
            f"The parameters of this {name} exist already, and each member makes its own. Give a "
            f"function: as_member(lambda {'rngs' if is_nnx else 'key'}: {name}(...))."
        )
    if not callable(network):
        raise UserError(f"No network can be made from an object of type {name}. {_NETWORKS}")


def _from_factory(make: Callable[..., Network]) -> Member:
    """Returns a member made from a function or class that makes a network from one argument."""
    of_argument, network = _traced(make)
    of_argument.__qualname__ = name_of(make)
    if _is_a(network, "flax.nnx", "Module"):
        return from_nnx(of_argument)
    if _is_a(network, "equinox", "Module"):
        import equinox as eqx

        def is_index(part: object) -> bool:
            return isinstance(part, eqx.nn.StateIndex)

        stateful = any(map(is_index, jax.tree.leaves(network, is_leaf=is_index)))
        return from_equinox(of_argument, stateful=stateful)
    if _is_a(network, "flax.linen", "Module") or not callable(network):
        name = type(network).__name__
        raise UserError(f"{name_of(make)} makes {name}, which is no network yet. {_NETWORKS}")
    require_parameters(network)
    return from_pytree(of_argument)


def _traced(make: Callable[..., Network]) -> tuple[Callable[[object], Network], Network]:
    """Returns a function of a key or of `rngs` that makes a network, and the traced network.

    The value is given as the argument `rngs` or `key`, or else as the only argument.
    """
    named = [name for name in ("rngs", "key") if not call_error(make, 0, [name])]
    alone = [] if named or call_error(make, 1) else ["key", "rngs"]
    if not named and not alone:
        parameters = inspect.signature(make).parameters.values()
        required = ", ".join(each.name for each in parameters if each.default is each.empty)
        raise UserError(
            f"{name_of(make)}({required}) cannot be called with a key or rngs alone. {_NETWORKS}"
        )
    told, made, cause = "", [], None

    def trace(key: PyTree, kind: str) -> None:
        if kind == "rngs":
            from flax import nnx

            key = nnx.Rngs(key)
        made.append(of_argument(key))

    for kind in named or alone:

        def of_argument(value: object, kind: str = kind) -> Network:
            return make(**{kind: value}) if named else make(value)

        if kind == "rngs":
            of_argument = without_mesh(of_argument)
        try:
            key = jax.eval_shape(lambda: jax.random.key(0))
            jax.eval_shape(functools.partial(trace, kind=kind), key)
            return of_argument, made[0]
        except Exception as error:  # A user's function may raise anything.
            cause = cause or error
            told += f" Given {kind}, it raised {type(error).__name__}: {first_line(error)}"
    raise UserError(
        f"{name_of(make)} made no network from a key or rngs.{told} {_NETWORKS}"
    ) from cause


def _is_a(
    network: Network, library: str, name: str, check: Callable[..., bool] = isinstance
) -> bool:
    """Returns whether an object belongs to a class of a library, without importing the library."""
    module = sys.modules.get(library)
    return module is not None and check(network, getattr(module, name))
