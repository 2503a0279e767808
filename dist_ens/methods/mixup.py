"""Mixup: trains on points between two examples, and between their labels."""

import jax
import jax.numpy as jnp

from dist_ens.methods.loss import Batch, ExampleLoss, Forward, Learnt, Method

# What `fold_in` is given to part the key of the mixing from the network's.
_MIXUP = 0x6D69


def mixup(alpha: float, num_classes: int | None) -> Method:
    """Mixes each example with that at the batch's other end, by one weight per member and step.

        inputs = w inputs_i + (1 - w) inputs_j,  labels likewise,  w ~ Beta(alpha, alpha)

    A batch is in random order, so that its two ends are a random pair. Pairs are of one device's
    part of the batch: they depend on the length of the data axis, as dropout does.

    Args:
        alpha: Positive; 0.2 is usual, 1 mixes by any weight alike.
        num_classes: Of the labels; None for real targets, which are mixed themselves.

    Returns:
        The method.

    Source: Zhang et al. (2018), https://arxiv.org/abs/1710.09412.
    """

    def method(learn: ExampleLoss) -> ExampleLoss:
        def mixed(forward: Forward, batch: Batch, key: jax.Array, member_id: jax.Array) -> Learnt:
            weight = jax.random.beta(jax.random.fold_in(key, _MIXUP), alpha, alpha)
            labels = batch["labels"]
            if num_classes is not None and not jnp.issubdtype(labels.dtype, jnp.floating):
                labels = jax.nn.one_hot(labels, num_classes)
            inputs = batch["inputs"].astype(jnp.result_type(batch["inputs"], jnp.float32))
            between = {
                name: weight * values + (1 - weight) * values[::-1]
                for name, values in (("inputs", inputs), ("labels", labels))
            }
            return learn(forward, {**batch, **between}, key, member_id)

        return mixed

    return method
