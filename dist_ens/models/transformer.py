"""A decoder-only transformer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.members import Member, from_linen


def _causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """`nn.dot_product_attention`, without half of the scores that the mask hides.

    The first half of the positions attends to itself, the second to all.
    """
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
            raise ValueError(f"a transformer takes token numbers, int[batch, length], not {given}")
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
    """A decoder-only transformer with pre-normalisation and learned positions.

    Args:
        input_shape: Of one example, `[length]`.
        num_outputs: Size of the vocabulary.
        num_blocks: Blocks of attention and MLP.
        width: Of the residual stream.
        num_heads: Of the attention; divides `width`.
        mlp_size: Hidden units of a block's MLP.

    Returns:
        The member: tokens int[batch, length] to logits of the next token at every position,
        float32[batch, length, classes].

    Source: Radford et al. (2019), "Language models are unsupervised multitask learners".
    """
    return from_linen(_Transformer(num_outputs, num_blocks, width, num_heads, mlp_size))
