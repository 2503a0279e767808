"""What one member minimises, and what is reported beside it, per example."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from dist_ens.config import LossConfig
from dist_ens.errors import UserError

Loss = Callable[[jax.Array, jax.Array], jax.Array]
TrainingScores = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]

# Below it a predicted variance does not fall, so that its logarithm stays finite.
SMALLEST_VARIANCE = 1e-6


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood of the labels.

        loss = -log_softmax(logits)[label]

    Args:
        logits: float[..., classes].
        labels: int[...], in [0, classes); or a share of each class, float[..., classes], over which
            the loss is averaged.

    Returns:
        Nats, float[...].
    """
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return optax.losses.softmax_cross_entropy(logits, labels)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def class_mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same, averaged over the classes as well: 1/classes of the negative log-likelihood.

    `-mean(log_softmax(logits) * one_hot)`, as tutorials write it; it wants a learning rate larger
    by the number of classes.

    Args:
        logits: float[..., classes].
        labels: As of `softmax_cross_entropy`.

    Returns:
        Nats per class, float[...].

    Source: https://docs.jax.dev/en/latest/notebooks/Neural_Network_and_Data_Loading.html
    """
    return softmax_cross_entropy(logits, labels) / logits.shape[-1]


def sigmoid_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood of a yes or no for each class, one against the rest.

        loss = -sum_c ([c = label] log sigmoid(logits_c) + [c != label] log sigmoid(-logits_c))

    Args:
        logits: float[..., classes].
        labels: As of `softmax_cross_entropy`.

    Returns:
        Nats, float[...].
    """
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1)


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


def beta_nll(outputs: jax.Array, targets: jax.Array, *, beta: float) -> jax.Array:
    """The same, each example weighted by a power of its variance, through which nothing is learnt.

        loss = stop_gradient(variance^beta) * gaussian_nll(outputs, target)

    With `beta` 0 it is the negative log-likelihood; with 1 the mean learns as from squared errors,
    so that examples that are badly predicted at first are not given up.

    Args:
        outputs: Mean and raw variance, float[..., 2].
        targets: float[...].
        beta: In [0, 1]; 0.5 in the paper.

    Returns:
        float[...].

    Source: Seitzer et al. (2022), https://arxiv.org/abs/2203.09168.
    """
    _, variance = normal_distribution(outputs)
    return jax.lax.stop_gradient(variance**beta) * gaussian_nll(outputs, targets)


def mse(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Squared error of a prediction that says nothing of its variance.

    Args:
        outputs: float[..., 1].
        targets: float[...].

    Returns:
        In the targets' unit squared, float[...].
    """
    return jnp.square(targets - outputs[..., 0])


def pinball(outputs: jax.Array, targets: jax.Array, *, levels: tuple[float, ...]) -> jax.Array:
    """Mean over levels of the loss that a quantile minimises.

        loss = mean_q max(q (target - output_q), (q - 1) (target - output_q))

    Args:
        outputs: A quantile for each level, float[..., levels].
        targets: float[...].
        levels: In (0, 1).

    Returns:
        In the targets' unit, float[...].

    >>> float(pinball(jnp.array([1.0]), jnp.array(3.0), levels=(0.75,)))
    1.5

    Source: Koenker and Bassett (1978), "Regression Quantiles".
    """
    error = targets[..., None] - outputs
    level = jnp.broadcast_to(jnp.asarray(levels, outputs.dtype), error.shape)
    return jnp.maximum(level * error, (level - 1) * error).mean(axis=-1)


def accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns whether the largest logit is the label's, as `{"accuracy": float32[...]}`.

    It is 0 or 1: of tied logits the first counts, which costs a step of training less than the
    `credit` by which predictions are scored.

    Args:
        logits: float[..., classes].
        labels: int[...], in [0, classes).
    """
    return {"accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32)}


def squared_error(outputs: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Of the predicted mean: `{"squared_error": float[...]}`, in the targets' unit squared."""
    return {"squared_error": jnp.square(targets - outputs[..., 0])}


def log_softmax(logits: jax.Array) -> jax.Array:
    """Log-probabilities, in nats, of what `softmax_cross_entropy` trains; float[..., classes]."""
    return jax.nn.log_softmax(logits)


def log_normalized_sigmoid(logits: jax.Array) -> jax.Array:
    """Log-probabilities, in nats, of what `sigmoid_cross_entropy` trains.

        p(c) = sigmoid(logits_c) / sum_k sigmoid(logits_k)

    Args:
        logits: float[..., classes].

    Returns:
        float[..., classes].
    """
    return jax.nn.log_softmax(jax.nn.log_sigmoid(logits))


@dataclasses.dataclass(frozen=True)
class Objective:
    """What members minimise, and what their network returns for it.

    Attributes:
        loss: Per example.
        training_scores: What is reported beside it, per example.
        num_outputs: Of the network, per label.
        log_probs: Of classes: their log-probabilities from the outputs; None for real targets.
        levels: Of the quantiles that are returned; empty where something else is.
        has_variance: Whether the outputs say a normal distribution's mean and variance.
    """

    loss: Loss
    training_scores: TrainingScores
    num_outputs: int
    log_probs: Callable[[jax.Array], jax.Array] | None = None
    levels: tuple[float, ...] = ()
    has_variance: bool = False


def make_objective(config: LossConfig, num_classes: int | None) -> Objective:
    """The objective of a loss in `config.LOSSES`.

    Args:
        config: Of the loss.
        num_classes: Of the labels; None for real targets.

    Returns:
        The objective: of classes a logit each is returned, of a real target what its distribution
        is made of.

    Raises:
        UserError: If the loss is not one for such labels.

    >>> make_objective(LossConfig(name="gaussian_nll"), num_classes=None).num_outputs
    2
    """
    if num_classes is not None:
        of_classes = {
            softmax_cross_entropy: log_softmax,
            class_mean_cross_entropy: log_softmax,
            sigmoid_cross_entropy: log_normalized_sigmoid,
        }
        objectives = {
            loss.__name__: Objective(loss, accuracy, num_classes, log_probs)
            for loss, log_probs in of_classes.items()
        }
    else:
        levels = config.levels
        quantiles = partial(pinball, levels=levels)
        of_normal: dict[str, Loss] = {
            "gaussian_nll": gaussian_nll,
            "beta_nll": partial(beta_nll, beta=config.beta),
        }
        objectives = {
            name: Objective(loss, squared_error, num_outputs=2, has_variance=True)
            for name, loss in of_normal.items()
        }
        objectives["mse"] = Objective(mse, squared_error, num_outputs=1)
        objectives["pinball"] = Objective(
            quantiles, partial(_median_error, levels), len(levels), levels=levels
        )
    if config.name not in objectives:
        labels = "real targets" if num_classes is None else "classes"
        raise UserError(
            f"The loss of {labels} is one of {', '.join(objectives)}. Received: {config.name!r}. "
            f"Try --config.loss.name={next(iter(objectives))}."
        )
    return objectives[config.name]


def _median_error(
    levels: tuple[float, ...], outputs: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    return squared_error(outputs[..., levels.index(0.5), None], targets)
