"""Convolutional networks for small images."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.members import Member, from_linen


class _LeNet5(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _with_channels(x)
        if min(x.shape[1:3]) < 12:
            rows, columns = x.shape[1:3]
            raise ValueError(f"LeNet-5 needs images of 12x12 pixels or more: got {rows}x{columns}")
        x = nn.relu(nn.Conv(6, (5, 5), padding="SAME")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_outputs)(x)


def lenet5(input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """Returns a LeNet-5 with ReLU and max-pooling, in flax.linen.

    Its layers are a 5x5 convolution with 6 channels, one with 16 channels, dense layers of 120 and
    84 units, and the output layer. A 2x2 max-pooling follows each convolution.

    Args:
        input_shape: Shape of one example, `[rows, columns]` or `[rows, columns, channels]`. It must
            have 12 rows and 12 columns or more.
        num_outputs: Number of outputs for each example, such as one logit per class.

    >>> member = lenet5((28, 28), 10)
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jnp.zeros((1, 28, 28)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # 156 + 2416 + 48120 + 10164 + 850
    61706

    Source: LeCun et al. (1998), "Gradient-based learning applied to document recognition".
    """
    return from_linen(_LeNet5(num_outputs))


class _BasicBlock(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(self.features, (3, 3), strides=self.stride, use_bias=False)(x)
        y = nn.relu(_batch_norm(train)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = _batch_norm(train)(y)
        if y.shape != x.shape:
            x = nn.Conv(self.features, (1, 1), strides=self.stride, use_bias=False)(x)
            x = _batch_norm(train)(x)
        return nn.relu(x + y)


class _ResNet8(nn.Module):
    num_outputs: int
    block_features: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.block_features[0], (3, 3), use_bias=False)(_with_channels(x))
        x = nn.relu(_batch_norm(train)(x))
        for i, features in enumerate(self.block_features):
            x = _BasicBlock(features, stride=2 if i else 1)(x, train)
        return nn.Dense(self.num_outputs)(x.mean(axis=(1, 2)))


def resnet8(input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """Returns a ResNet-8, the smallest ResNet for CIFAR, in flax.linen.

    A 3x3 convolution with 16 channels comes first. Three basic blocks with 16, 32 and 64 channels
    follow, each computing

        relu(x + bn(conv(relu(bn(conv(x))))))

    Where the shape changes, `x` in the sum is projected by a 1x1 convolution and BatchNorm.

    Args:
        input_shape: Shape of one example, `[rows, columns]` or `[rows, columns, channels]`.
        num_outputs: Number of outputs for each example, such as one logit per class.

    Returns:
        The member. Its model state holds the running statistics of BatchNorm.

    >>> member = resnet8((32, 32, 3), 10)
    >>> params, _ = jax.eval_shape(member.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # 464 + 4672 + 14528 + 57728 + 650
    78042

    Source: He et al. (2016), https://arxiv.org/abs/1512.03385, section 4.2 with n = 1, and with
    projections as shortcuts.
    """
    return from_linen(_ResNet8(num_outputs, (16, 32, 64)))


def _batch_norm(train: bool) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)


def _with_channels(x: jax.Array) -> jax.Array:
    """Returns float[batch, rows, columns, channels]. Images without channels are given one."""
    x = x if x.ndim == 4 else x[..., None]
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
