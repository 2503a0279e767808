"""Label smoothing: a part of every label is given to all classes alike."""

import jax
import jax.numpy as jnp
import optax

from dist_ens.methods.loss import Batch, ExampleLoss, Forward, Learnt, Method


def label_smoothing(alpha: float, num_classes: int) -> Method:
    """Trains on shares of the classes in place of labels.

        share_c = (1 - alpha) [c = label] + alpha / classes

    Args:
        alpha: In [0, 1).
        num_classes: Of the labels.

    Returns:
        The method.

    Source: Szegedy et al. (2016), https://arxiv.org/abs/1512.00567.
    """

    def method(learn: ExampleLoss) -> ExampleLoss:
        def smoothed(
            forward: Forward, batch: Batch, key: jax.Array, member_id: jax.Array
        ) -> Learnt:
            labels = batch["labels"]
            if not jnp.issubdtype(labels.dtype, jnp.floating):
                labels = jax.nn.one_hot(labels, num_classes)
            labels = optax.smooth_labels(labels, alpha)
            return learn(forward, {**batch, "labels": labels}, key, member_id)

        return smoothed

    return method
