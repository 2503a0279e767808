"""The decoder-only transformer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.models.transformer import _causal_attention, transformer
from marked import long


@pytest.mark.parametrize("length", [1, 7, *long(2, 8)])
def test_attention_without_what_is_hidden_is_attention_under_the_mask(length):
    shape = (3, length, 2, 4)  # examples, positions, heads, features
    query, key, value = (jax.random.normal(jax.random.key(i), shape) for i in range(3))
    mask = nn.make_causal_mask(jnp.ones(length))

    def with_gradients(attention):
        def weighted(*args):
            attended = attention(*args, mask=mask)
            return (attended * jnp.arange(attended.size).reshape(shape)).sum(), attended

        return jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        with_gradients(_causal_attention),
        with_gradients(nn.dot_product_attention),
    )


def test_half_of_what_is_hidden_is_never_computed():
    member = transformer((7,), 5, num_blocks=1, width=10, num_heads=2, mlp_size=8)
    tokens = jnp.zeros((3, 7), jnp.int32)
    params, state = jax.eval_shape(member.init, jax.random.key(0), tokens)
    traced = jax.make_jaxpr(lambda *p: member.apply(*p, tokens, None, False)[0])(params, state)
    shapes = [e.outvars[0].aval.shape for e in traced.eqns if e.primitive is jax.lax.dot_general_p]
    scores = [shape for shape in shapes if shape[:2] == (3, 2) and shape[2] != 5]
    assert scores == [(3, 2, 4, 4), (3, 2, 3, 7)]  # examples, heads, positions, what they see


def test_no_position_sees_a_later_one():
    member = transformer((5,), 7, num_blocks=2, width=8, num_heads=2, mlp_size=8)
    tokens = jnp.arange(10).reshape(2, 5) % 7
    params, state = jax.jit(member.init)(jax.random.key(0), tokens)
    outputs = jax.jit(lambda tokens: member.apply(params, state, tokens, None, False)[0])
    for changed in range(5):
        after = outputs(tokens.at[:, changed].set((tokens[:, changed] + 1) % 7))
        differs = (jnp.abs(outputs(tokens) - after) > 1e-6).any((0, 2))
        np.testing.assert_array_equal(differs, np.arange(5) >= changed)
