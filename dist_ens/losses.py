"""What one member minimises, and what is reported beside it, per example."""

import dataclasses
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


def normal_distribution(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the normal distribution that two outputs say.

        mean, raw = outputs;  variance = softplus(raw) + 1e-6

    Args:
        outputs: Mean and raw variance, float[..., 2].

    Returns:
        Two arrays, float[...].

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    return outputs[..., 0], jax.nn.softplus(outputs[..., 1]) + SMALLEST_VARIANCE


def gaussian_nll(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of real targets under a normal distribution with its own variance.

        mean, variance = normal_distribution(outputs)
        loss = (log(2 pi variance) + (target - mean)^2 / variance) / 2

    Args:
        outputs: Mean and raw variance, float[..., 2].
        targets: float[...].

    Returns:
        Nats, float[...].

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    mean, variance = normal_distribution(outputs)
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + jnp.square(targets - mean) / variance)


def accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Whether the largest logit is the label's: `{"accuracy": float[...]}`, 0 or 1."""
    return {"accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32)}


def squared_error(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Of the predicted mean: `{"squared_error": float[...]}`, in the targets' unit squared."""
    return {"squared_error": jnp.square(targets - outputs[..., 0])}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What members minimise, and what their network returns for it.

    Attributes:
        loss: Per example.
        training_scores: What is reported beside it, per example.
        num_outputs: Of the network, per label.
    """

    loss: Loss
    training_scores: TrainingScores
    num_outputs: int


def make_objective(name: str, num_classes: int | None) -> Objective:
    """The objective of a loss in `config.LOSSES`.

    Args:
        name: Of the loss.
        num_classes: Of the labels; None for real targets.

    Returns:
        The objective: of classes a logit each is returned, of a real target what its distribution
        is made of.

    Raises:
        UserError: If the loss is not known, or not one for such labels.

    >>> make_objective("gaussian_nll", num_classes=None).num_outputs
    2
    """
    of_classes = {f.__name__: f for f in (softmax_cross_entropy, class_mean_cross_entropy)}
    of_targets = {gaussian_nll.__name__: gaussian_nll}
    known = of_targets if num_classes is None else of_classes
    if name not in known:
        labels = "real targets" if num_classes is None else "classes"
        raise UserError(
            f"The loss of {labels} is one of {', '.join(known)}. Received: {name!r}. "
            f"Try --config.loss={next(iter(known))}."
        )
    if num_classes is None:
        return Objective(of_targets[name], squared_error, num_outputs=2)
    return Objective(of_classes[name], accuracy, num_outputs=num_classes)
