"""Convolutional networks for small images."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from dist_ens.layout import DATA
from dist_ens.members import Member, from_linen


class _LeNet5(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _with_channels(x)
        if min(x.shape[1:3]) < 12:
            raise ValueError(f"LeNet-5 takes images of 12x12 pixels or more, not {x.shape[1:3]}")
        x = nn.relu(nn.Conv(6, (5, 5), padding="SAME")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_outputs)(x)


def lenet5(input_shape: tuple[int, ...], num_outputs: int) -> Member:
    """LeNet-5 with ReLU and max-pooling: 5x5 convolutions of 6 and 16, dense 120 and 84.

    Args:
        input_shape: Of one example, `[rows, columns]` or `[rows, columns, channels]`.
        num_outputs: Per example, such as a logit for each class.

    Returns:
        The member.

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
    """The smallest CIFAR ResNet: a 3x3 stem of 16, one basic block each of 16, 32 and 64.

    Args:
        input_shape: Of one example, `[rows, columns, channels]`.
        num_outputs: Per example, such as a logit for each class.

    Returns:
        The member; its model state holds BatchNorm's running statistics, of the global batch.

    Source: He et al. (2016), https://arxiv.org/abs/1512.03385, section 4.2 with n = 1 and a
    projection where the shape changes.
    """
    return from_linen(_ResNet8(num_outputs, (16, 32, 64)))


def _batch_norm(train: bool) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=DATA)


def _with_channels(x: jax.Array) -> jax.Array:
    """float[batch, rows, columns, channels]; images without channels get one."""
    if x.ndim not in (3, 4):
        raise ValueError(f"a convolution takes images, [rows, columns(, channels)], not {x.shape}")
    x = x if x.ndim == 4 else x[..., None]
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
