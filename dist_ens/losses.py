"""What one member minimises, and what is reported beside it, per example."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dist_ens.errors import UserError

Loss = Callable[[jax.Array, jax.Array], jax.Array]
TrainingScores = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]

# Below it a predicted variance does not fall, so that its logarithm stays finite.
SMALLEST_VARIANCE = 1e-6


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


def gaussian_nll(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of real targets under a normal distribution with its own variance.

        mean, raw = outputs;  variance = softplus(raw) + 1e-6
        loss = (log(2 pi variance) + (target - mean)^2 / variance) / 2

    Args:
        outputs: Mean and raw variance, float[..., 2].
        targets: float[...].

    Returns:
        Nats, float[...].

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    variance = jax.nn.softplus(outputs[..., 1]) + SMALLEST_VARIANCE
    error = jnp.square(targets - outputs[..., 0])
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + error / variance)


def accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Whether the largest logit is the label's: `{"accuracy": float[...]}`, 0 or 1."""
    return {"accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32)}


def squared_error(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Of the predicted mean: `{"squared_error": float[...]}`, in the targets' unit squared."""
    return {"squared_error": jnp.square(targets - outputs[..., 0])}


def make_loss(name: str) -> Loss:
    """The loss of a name in `config.LOSSES`.

    >>> make_loss("softmax_cross_entropy") is softmax_cross_entropy
    True
    """
    losses = {f.__name__: f for f in (softmax_cross_entropy, class_mean_cross_entropy)}
    if name not in losses:
        raise UserError(f"A loss is one of {', '.join(losses)}. Received: {name!r}. Choose one.")
    return losses[name]
