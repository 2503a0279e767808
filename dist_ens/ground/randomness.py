"""Keys of members. The order of the examples has its own numbers, from the seed; see `sampling`.

    key of a member     = fold_in(key(seed), member_id)
    key of its init     = fold_in(member key, INIT)
    key of a step       = fold_in(fold_in(member key, UPDATE), step)
    key of its examples = fold_in(member key, EXAMPLES), for a bootstrap sample
    key of a prediction = fold_in(member key, PREDICT)
    key of an optimizer = fold_in(fold_in(member key, OPTIMIZER), step), which its update is given
    key in its state    = fold_in(fold_in(fold_in(member key, OPTIMIZER), word 0), word 1)
    key of a setting    = fold_in(fold_in(member key, HYPER), CRC-32 of its name)

The two words are those of the key that the optimizer itself would keep in its state. The generator
is always Threefry in its partitionable form, whatever generator JAX is configured to use. With the
generator `rbg`, usual on TPUs, a member's random numbers would depend on the members that are
batched with it.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# Numbers that `fold_in` takes to derive one key for each use from a member's key.
INIT, UPDATE, EXAMPLES, PREDICT, OPTIMIZER, HYPER = range(6)

# Version of these rules, which the record of a run names. Raise it when one of them changes.
KEY_RULE = 2

_GENERATOR = "threefry2x32"


@contextlib.contextmanager
def pinned_generator() -> Iterator[None]:
    """Selects the Threefry generator while a function is traced: use it inside a jitted function.

    >>> with jax.default_prng_impl("rbg"), pinned_generator():
    ...     jax.random.key(0).dtype
    key<fry>
    """
    with jax.default_prng_impl(_GENERATOR), jax.threefry_partitionable(True):
        yield


def member_key(seed: jax.typing.ArrayLike, member_id: jax.typing.ArrayLike) -> jax.Array:
    """Returns `fold_in(key(seed), member_id)`, whatever JAX's default generator is.

    >>> bool(member_key(5, 3) == jax.random.fold_in(jax.random.key(5), 3))
    True
    """
    words = jnp.stack([jnp.uint32(0), jnp.asarray(seed, jnp.uint32)])
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl=_GENERATOR), member_id)


def key_of_step(member_key: jax.Array, step: jax.Array, use: int = UPDATE) -> jax.Array:
    """Returns the key of a member's step: `fold_in(fold_in(member_key, use), step)`."""
    return jax.random.fold_in(jax.random.fold_in(member_key, use), step)


def key_of_optimizer(member_key: jax.Array, words: jax.Array) -> jax.Array:
    """Returns the key of a member that replaces a key, uint32[2], in its optimizer's state."""
    key = jax.random.fold_in(member_key, OPTIMIZER)
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])
