"""A decoder-only transformer, in flax.linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.members import Member, from_linen


def _causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """Computes `nn.dot_product_attention` without half of the scores that a causal mask hides."""
    half = (query.shape[-3] + 1) // 2
    first, second = (
        nn.dot_product_attention(
            query[..., seeing, :, :],
            key[..., seen, :, :],
            value[..., seen, :, :],
            mask=mask[..., seeing, seen],
        )
        for seeing, seen in ((slice(half), slice(half)), (slice(half, None), slice(None)))
    )
    return jnp.concatenate([first, second], axis=-3)


class _Block(nn.Module):
    num_heads: int
    mlp_size: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        attend = nn.MultiHeadDotProductAttention(self.num_heads, attention_fn=_causal_attention)
        x = x + attend(y, mask=mask)
        y = nn.gelu(nn.Dense(self.mlp_size)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class _Transformer(nn.Module):
    num_outputs: int
    num_blocks: int
    width: int
    num_heads: int
    mlp_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            given = f"{tokens.dtype}{[*tokens.shape]}"
            raise ValueError(f"a transformer needs token numbers, int[batch, length]: got {given}")
        length = tokens.shape[1]
        embed = nn.initializers.normal(0.02)
        x = nn.Embed(self.num_outputs, self.width, embedding_init=embed)(tokens)
        x = x + self.param("position", embed, (length, self.width))[None]
        mask = nn.make_causal_mask(jnp.ones(length))
        for _ in range(self.num_blocks):
            x = _Block(self.num_heads, self.mlp_size)(x, mask)
        return nn.Dense(self.num_outputs)(nn.LayerNorm()(x))


def transformer(
    input_shape: tuple[int, ...],
    num_outputs: int,
    num_blocks: int = 2,
    width: int = 128,
    num_heads: int = 4,
    mlp_size: int = 512,
) -> Member:
    """Returns a decoder-only transformer with pre-normalisation and learned positions.

    Each block computes

        y = x + attention(norm(x)),   block(x) = y + mlp(norm(y))

    Args:
        input_shape: Shape of one example, `[length]`.
        num_outputs: Size of the vocabulary.
        num_blocks: Number of blocks.
        width: Width of the residual stream, a multiple of `num_heads`.
        num_heads: Number of attention heads in a block.
        mlp_size: Number of hidden units of the MLP in a block.

    Returns:
        The member. It maps tokens, int[batch, length], to the logits of the next token at every
        position, float32[batch, length, num_outputs].

    >>> member = transformer((8,), 5, num_blocks=1, width=4, num_heads=2, mlp_size=6)
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jnp.zeros((1, 8), int))
    >>> # Embeddings, block (norms, attention, MLP), last norm and output layer:
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # 52 + (16 + 80 + 58) + 8 + 25
    239

    Source: Radford et al. (2019), "Language models are unsupervised multitask learners".
    """
    return from_linen(_Transformer(num_outputs, num_blocks, width, num_heads, mlp_size))
