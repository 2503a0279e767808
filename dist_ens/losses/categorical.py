"""Classes: cross-entropies, and the categorical distributions that they train."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.errors import UserError
from dist_ens.losses.distribution import Calibration, Distribution, Summary, Values, with_samples
from dist_ens.losses.objective import Objective
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import CLASSIFICATION
from dist_ens.metrics.classification import (
    classification_values,
    classwise_sums,
    diversity_values,
    entropy,
    mixture_log_probs,
    votes_of,
)
from dist_ens.metrics.metric import Metric


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of the labels.

        loss = -log_softmax(logits)[label]

    Args:
        logits: Unnormalised log-probabilities, in nats; float[..., classes].
        labels: Classes, int[...], in [0, classes); or shares of each class, float[..., classes],
            over which the loss is averaged.

    Returns:
        Losses in nats, float[...].
    """
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return optax.losses.softmax_cross_entropy(logits, labels)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def class_mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes `softmax_cross_entropy` divided by the number of classes.

    It is `-mean(log_softmax(logits) * one_hot)`, as tutorials write it. It needs a learning rate
    that is larger by the number of classes.

    Args:
        logits: Unnormalised log-probabilities, in nats; float[..., classes].
        labels: Classes or shares of each class, see `softmax_cross_entropy`.

    Returns:
        Losses in nats per class, float[...].

    Source: https://docs.jax.dev/en/latest/notebooks/Neural_Network_and_Data_Loading.html
    """
    return softmax_cross_entropy(logits, labels) / logits.shape[-1]


def sigmoid_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of a yes or no for each class, one against the rest.

        loss = -sum_c ([c = label] log sigmoid(logits_c) + [c != label] log sigmoid(-logits_c))

    Args:
        logits: Log-odds of each class, in nats; float[..., classes].
        labels: Classes or shares of each class, see `softmax_cross_entropy`.

    Returns:
        Losses in nats, float[...].
    """
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1)


def accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns whether the largest logit is the label's, as `{"accuracy": float32[...]}`.

    The value is 0 or 1: of tied logits the first counts, which costs a step of training less than
    the `credit` by which predictions are scored.

    Args:
        logits: Logits, float[..., classes].
        labels: Classes, int[...], in [0, classes); or shares of each class, float[..., classes],
            of which the largest counts.
    """
    if jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.argmax(axis=-1)
    return {"accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32)}


def log_softmax(logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities that `softmax_cross_entropy` trains.

    Args:
        logits: Unnormalised log-probabilities, in nats; float[..., classes].

    Returns:
        Log-probabilities in nats, float[..., classes].
    """
    return jax.nn.log_softmax(logits)


def log_normalized_sigmoid(logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities that `sigmoid_cross_entropy` trains.

        p(c) = sigmoid(logits_c) / sum_k sigmoid(logits_k)

    Args:
        logits: Log-odds of each class, in nats; float[..., classes].

    Returns:
        Log-probabilities in nats, float[..., classes].
    """
    return jax.nn.log_softmax(jax.nn.log_sigmoid(logits))


@dataclasses.dataclass(frozen=True)
class Categorical(Distribution):
    """The distribution over classes.

    Attributes:
        log_probs: Function that returns log-probabilities of logits.
        pooling: "probs" averages the members' probabilities, "logits" their log-probabilities, and
            "vote" counts their most probable classes. A member that finds several classes most
            probable gives each an equal part of its vote.
    """

    log_probs: Callable[[jax.Array], jax.Array] = log_softmax
    pooling: str = "probs"
    metrics: ClassVar[tuple[Metric, ...]] = CLASSIFICATION
    error_statistic: ClassVar[str] = "nll"
    uncertainty_statistic: ClassVar[str | None] = "entropy"
    poolings: ClassVar[tuple[str, ...]] = ("probs", "logits", "vote")
    calibrations: ClassVar[tuple[str, ...]] = (
        "temperature",
        "vector",
        "isotonic",
    )
    conformal: ClassVar[tuple[str, ...]] = ("lac", "aps", "raps")

    def from_outputs(self, outputs: jax.Array) -> Values:
        """See `Distribution`. Samples of one member are always averaged as probabilities."""
        outputs = outputs.astype(jnp.float32)
        log_probs = self.log_probs(outputs)
        prediction = {"log_probs": mixture_log_probs(log_probs)}
        if len(outputs) > 1:  # The mean does not tell how far the samples differ.
            prediction["aleatoric"] = entropy(log_probs).mean(axis=0)
        if self.log_probs is log_softmax:  # The energy is defined by the logits of a softmax.
            prediction["energy"] = -jax.nn.logsumexp(outputs, axis=-1).mean(axis=0)
        return prediction

    def pool(self, predictions: Values) -> Values:
        """See `Distribution`."""
        log_probs = predictions["log_probs"]
        if self.pooling == "logits":
            pooled = jax.nn.log_softmax(log_probs.mean(axis=0))
        elif self.pooling == "vote":
            pooled = jnp.log(votes_of(log_probs).mean(axis=0))
        else:
            pooled = mixture_log_probs(log_probs)
        energy = {n: v.mean(axis=0) for n, v in predictions.items() if n == "energy"}
        return {"log_probs": pooled, **energy}

    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Distribution`."""
        values = classification_values(prediction["log_probs"], labels)
        values |= {n: v for n, v in prediction.items() if n in ("energy", "aleatoric")}
        if "aleatoric" in values:
            values["mutual_information"] = values["entropy"] - values["aleatoric"]
        return values

    def predict(self, outputs: jax.Array, *, has_samples: bool = False) -> Prediction:
        """Returns probabilities, and their entropy in nats; see `Distribution` and `Prediction`.

        `epistemic` is at least 0. With another pooling than "probs", `mean` is not the mixture of
        the members, and its entropy can be lower than theirs: `epistemic` is 0 there.
        """
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        pooled = self.pool(predictions)["log_probs"]
        member_aleatoric = predictions.get("aleatoric", entropy(predictions["log_probs"]))
        total, aleatoric = entropy(pooled), member_aleatoric.mean(axis=0)
        return Prediction(
            mean=jnp.exp(pooled),
            total=total,
            aleatoric=aleatoric,
            epistemic=jnp.maximum(total - aleatoric, 0),
            members=jnp.exp(predictions["log_probs"]),
            unit="nats",
        )

    def diversity(self, predictions: Values) -> Values:
        """See `Distribution`."""
        return diversity_values(predictions["log_probs"], predictions.get("aleatoric"))

    def classwise(self, prediction: Values, labels: jax.Array, weights: jax.Array) -> jax.Array:
        """See `Distribution` and `classwise_sums`."""
        return classwise_sums(prediction["log_probs"], labels, weights)

    def summary(self, prediction: Values) -> Values:
        """See `Distribution`. Logarithms are kept: float32 cannot hold every probability."""
        return {"log_probs": prediction["log_probs"]}

    def pool_summaries(self, summaries: Summary, masks: np.ndarray) -> Summary:
        """See `Distribution`. Probabilities are averaged, in logarithms."""
        log_probs = summaries["log_probs"].astype(np.float64)
        counted = masks.reshape(*masks.shape, *(1,) * (log_probs.ndim - 2))
        added = np.logaddexp.reduce(np.where(counted, log_probs, -np.inf), axis=0)
        return {"log_probs": added - np.log(counted.sum(axis=0))}

    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the probabilities, `probs`; see `Distribution`."""
        return {"probs": np.exp(summary["log_probs"])}

    def probabilities(self, summary: Summary) -> np.ndarray:
        """See `Distribution`."""
        return np.exp(summary["log_probs"].astype(np.float64))

    def calibrate(self, method: str, summary: Summary, labels: np.ndarray) -> Calibration:
        """See `Distribution`."""
        # Its scipy.optimize takes half a second to import.
        from dist_ens.metrics.recalibration import RECALIBRATIONS

        log_probs = summary["log_probs"]
        num_classes = log_probs.shape[-1]
        fitted = RECALIBRATIONS[method](log_probs.reshape(-1, num_classes), labels.reshape(-1))

        def apply(summary: Summary) -> Summary:
            log_probs = summary["log_probs"]
            return {
                "log_probs": fitted(log_probs.reshape(-1, num_classes)).reshape(log_probs.shape)
            }

        return Calibration(apply, fitted.parameters, fitted.warnings)


def categorical(num_classes: int) -> Objective:
    """Returns the objective of classes: softmax cross-entropy.

    Args:
        num_classes: Number of classes, at least 1. Labels are int[batch, ...] in [0, num_classes).

    >>> categorical(10).num_outputs
    10
    """
    return _objective("categorical", softmax_cross_entropy, Categorical(), num_classes)


def class_mean_categorical(num_classes: int) -> Objective:
    """Returns `categorical` with its loss divided by the number of classes.

    Args:
        num_classes: Number of classes, at least 1.
    """
    return _objective(
        "class_mean_categorical", class_mean_cross_entropy, Categorical(), num_classes
    )


def one_vs_rest(num_classes: int) -> Objective:
    """Returns the objective of a yes or no for each class: sigmoid cross-entropy.

    Args:
        num_classes: Number of classes, at least 1. Labels are int[batch, ...] in [0, num_classes).
    """
    distribution = Categorical(log_normalized_sigmoid)
    return _objective("one_vs_rest", sigmoid_cross_entropy, distribution, num_classes)


def _objective(
    name: str,
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    distribution: Categorical,
    num_classes: int,
) -> Objective:
    if not isinstance(num_classes, int | np.integer) or num_classes < 1:
        raise UserError(
            f"num_classes of {name} is {num_classes!r}, which is no number of classes. Give a "
            "positive whole number, such as 10."
        )
    num_classes = int(num_classes)
    return Objective(
        name, loss, distribution, accuracy, num_outputs=num_classes, num_classes=num_classes
    )
