"""Where a member's random numbers come from: its key, and the keys derived from it.

    key of a member     = fold_in(key(seed), member_id)
    key of its init     = fold_in(member key, INIT)
    key of a step       = fold_in(fold_in(fold_in(member key, UPDATE), step), column of the mesh)
    key of its examples = fold_in(member key, EXAMPLES), for a bootstrap sample
    key of a prediction = fold_in(fold_in(member key, PREDICT), column of the mesh)
    key of an optimizer = fold_in(fold_in(fold_in(member key, OPTIMIZER), word 0), word 1)

The two words are those of the key that the optimizer itself would keep in its state.

The generator is Threefry in its partitionable form, whatever JAX is configured to use: numbers of
the generator `rbg` (usual on TPUs) depend on what they are batched with, so that a member would
depend on its company.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# What `fold_in` is given to part a member's key by use.
INIT, UPDATE, EXAMPLES, PREDICT, OPTIMIZER = 0, 1, 2, 3, 4

_GENERATOR = "threefry2x32"


@contextlib.contextmanager
def pinned_generator() -> Iterator[None]:
    """Makes keys and random numbers those of Threefry inside a `with` block, or of a decorator.

    It holds while a function is traced, so it stands inside a jitted function, not around its call.

    >>> with jax.default_prng_impl("rbg"), pinned_generator():
    ...     jax.random.key(0).dtype
    key<fry>
    """
    with jax.default_prng_impl(_GENERATOR), jax.threefry_partitionable(True):
        yield


def member_key(seed: jax.typing.ArrayLike, member_id: jax.typing.ArrayLike) -> jax.Array:
    """Returns the key from which everything random in a member comes.

        fold_in(key(seed), member_id)

    It depends on nothing else: not on JAX's default generator, nor on its offset of seeds.

    Args:
        seed: Seed of the experiment, int[] in [0, 2**32).
        member_id: Id of the member, int[] in [0, 2**31).

    Returns:
        A typed key, [].

    >>> bool(member_key(5, 3) == jax.random.fold_in(jax.random.key(5), 3))
    True
    """
    words = jnp.stack([jnp.uint32(0), jnp.asarray(seed, jnp.uint32)])
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl=_GENERATOR), member_id)


def key_of_optimizer(member_key: jax.Array, words: jax.Array) -> jax.Array:
    """Returns a member's own key in place of one that an optimizer keeps in its state.

    Args:
        member_key: Key of the member, [].
        words: Two words of the optimizer's key, uint32[2].

    Returns:
        A typed key, [].
    """
    key = jax.random.fold_in(member_key, OPTIMIZER)
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])
