"""The losses of one member: logits and labels to nats per example."""

from collections.abc import Callable

import jax
import optax

from dist_ens.errors import UserError

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood of integer labels.

        loss = -log_softmax(logits)[label]

    Args:
        logits: float[..., classes].
        labels: int[...], in [0, classes).

    Returns:
        Nats, float[...].
    """
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def class_mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same, averaged over the classes as well: 1/classes of the negative log-likelihood.

    `-mean(log_softmax(logits) * one_hot)`, as tutorials write it; it wants a learning rate larger
    by the number of classes.

    Args:
        logits: float[..., classes].
        labels: int[...], in [0, classes).

    Returns:
        Nats per class, float[...].

    Source: https://docs.jax.dev/en/latest/notebooks/Neural_Network_and_Data_Loading.html
    """
    return softmax_cross_entropy(logits, labels) / logits.shape[-1]


def make_loss(name: str) -> Loss:
    """The loss of a name in `config.LOSSES`.

    >>> make_loss("softmax_cross_entropy") is softmax_cross_entropy
    True
    """
    losses = {f.__name__: f for f in (softmax_cross_entropy, class_mean_cross_entropy)}
    if name not in losses:
        raise UserError(f"A loss is one of {', '.join(losses)}. Received: {name!r}. Choose one.")
    return losses[name]
