"""The state of one member's optimizer, in which random keys are the member's own."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal

from dist_ens.errors import UserError
from dist_ens.execution.rewrite import equations, nested
from dist_ens.randomness import key_of_optimizer

# Operations that draw random numbers, and those that make other keys of a key.
_DRAWS = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_TAKE_KEYS = _DRAWS | {"random_wrap", "random_split", "random_fold_in", "random_clone"}


def optimizer_state(
    optimizer: optax.GradientTransformation, params: Any, member_key: jax.Array
) -> Any:
    """Returns the state in which a member's optimizer begins.

    An optimizer that draws random numbers, such as `optax.noisy_sgd`, is made with one seed for all
    members. Each key in its state is replaced by one that depends on the member too. A key is a
    typed key, or a plain `uint32[..., 2]` from which the update draws.

    Args:
        optimizer: Optimizer of one member.
        params: Parameters of the member.
        member_key: Key of the member, [].

    Returns:
        The optimizer's state.

    Raises:
        UserError: If the update draws random numbers and the state holds no key, since all members
            would draw the same.
    """
    state = optimizer.init(params)
    leaves, structure = jax.tree.flatten(state)
    is_key = [_is_typed_key(leaf) for leaf in leaves]
    try:
        traced = jax.make_jaxpr(optimizer.update)(params, state, params).jaxpr
    except Exception:  # one that takes more arguments: the update says so where it is traced
        traced = None
    if traced is not None:
        num_params = len(jax.tree.leaves(params))
        for number, leaf in enumerate(leaves):
            if _may_be_plain_key(leaf):
                is_key[number] = _reaches_draws(traced, {traced.invars[num_params + number]})
        draws = any(eqn.primitive.name in _DRAWS for eqn in equations(traced))
        if draws and not any(is_key):
            raise UserError(
                "The optimizer draws random numbers from a key that is not in its state, so that "
                "all members would draw the same numbers. Keep the key in the optimizer's state, "
                "as optax.add_noise(eta, gamma, key) does."
            )
    own = [
        _own(leaf, member_key) if replaced else leaf
        for leaf, replaced in zip(leaves, is_key, strict=True)
    ]
    return jax.tree.unflatten(structure, own)


def _own(leaf: jax.Array, member_key: jax.Array) -> jax.Array:
    """Returns the member's keys in place of one or several of the optimizer's."""
    is_typed = _is_typed_key(leaf)
    if is_typed:  # of any generator, whose keys may consist of more words
        words = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(leaf.ravel())
    else:
        words = leaf.reshape(-1, 2)
    keys = jax.vmap(key_of_optimizer, in_axes=(None, 0))(member_key, words)
    return keys.reshape(leaf.shape) if is_typed else jax.random.key_data(keys).reshape(leaf.shape)


def _is_typed_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _may_be_plain_key(leaf: Any) -> bool:
    return jnp.result_type(leaf) == jnp.uint32 and jnp.shape(leaf)[-1:] == (2,)


def _reaches_draws(jaxpr: Jaxpr, values: set[Any]) -> bool:
    """Returns whether random numbers depend on some of the values of a traced function."""
    values = set(values)
    for eqn in jaxpr.eqns:
        given = [not isinstance(v, Literal) and v in values for v in eqn.invars]
        if not any(given):
            continue
        if eqn.primitive.name in _TAKE_KEYS:
            return True
        for inner in nested(eqn.params):
            # What comes before a function's own arguments, such as the index of a branch, is none.
            own = zip(inner.invars[::-1], given[::-1], strict=False)
            if _reaches_draws(inner, {v for v, is_given in own if is_given}):
                return True
        values.update(eqn.outvars)
    return False
