"""Objectives for classes: cross-entropies, and the categorical distributions that they train.

Logits are unnormalised log-probabilities, in nats, or log-odds; float[..., classes]. Labels are
classes, int[...], in [0, classes); or shares of each class, float[..., classes], over which a loss
is averaged. Losses are in nats, float[...].
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import whole_number
from dist_ens.losses.distribution import Distribution, Objective, Summary, Values, with_samples
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import CLASSIFICATION, UNBALANCED
from dist_ens.metrics.classification import (
    classification_values,
    classwise_sums,
    diversity_values,
    entropy,
    mixture_log_probs,
    votes_of,
)
from dist_ens.metrics.metric import Metric
from dist_ens.metrics.pooling import mean_of_members


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of the labels.

        loss = -log_softmax(logits)[label]

    >>> round(float(softmax_cross_entropy(jnp.zeros(2), jnp.array(0))), 4)  # log 2
    0.6931
    """
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return optax.losses.softmax_cross_entropy(logits, labels)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def class_mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes `softmax_cross_entropy` divided by the number of classes.

        loss = -log_softmax(logits)[label] / classes

    Tutorials write it as `-mean(log_softmax(logits) * one_hot)`. Its learning rate must be larger
    by the number of classes.

    >>> round(float(class_mean_cross_entropy(jnp.zeros(2), jnp.array(0))), 4)  # log 2 / 2
    0.3466

    Source: https://docs.jax.dev/en/latest/notebooks/Neural_Network_and_Data_Loading.html
    """
    return softmax_cross_entropy(logits, labels) / logits.shape[-1]


def sigmoid_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the sum over the classes of the binary cross-entropies, one against the rest.

        loss = -sum_c ([c = label] log sigmoid(logits_c) + [c != label] log sigmoid(-logits_c))

    >>> round(float(sigmoid_cross_entropy(jnp.zeros(2), jnp.array(0))), 4)  # 2 log 2
    1.3863
    """
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return optax.losses.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1)


def accuracy(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns whether the label has the largest logit, as `{"accuracy": float32[...]}`.

    Among tied logits the first one counts. This is cheaper in a training step than `credit`, by
    which predictions are scored.

    >>> accuracy(jnp.array([[0.0, 2.0], [0.0, 2.0]]), jnp.array([1, 0]))["accuracy"].tolist()
    [1.0, 0.0]
    """
    if jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.argmax(axis=-1)
    return {"accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32)}


def log_softmax(logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities that `softmax_cross_entropy` trains.

        log p(c) = logits_c - logsumexp_k(logits_k)

    >>> jnp.exp(log_softmax(jnp.log(jnp.array([1.0, 3.0])))).round(4).tolist()
    [0.25, 0.75]
    """
    return jax.nn.log_softmax(logits)


def log_normalized_sigmoid(logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities that `sigmoid_cross_entropy` trains.

        p(c) = sigmoid(logits_c) / sum_k sigmoid(logits_k)

    >>> logits = jnp.log(jnp.array([1.0, 1 / 3, 1 / 3]))  # sigmoids 1/2, 1/4 and 1/4
    >>> jnp.exp(log_normalized_sigmoid(logits)).round(4).tolist()
    [0.5, 0.25, 0.25]
    """
    return jax.nn.log_softmax(jax.nn.log_sigmoid(logits))


@dataclasses.dataclass(frozen=True)
class Categorical(Distribution):
    """The categorical distribution over classes.

    Attributes:
        log_probs: Function from logits to log-probabilities, in nats.
        pooling: Way in which members are pooled. "probs" averages their probabilities, "logits"
            averages their log-probabilities, and "vote" counts their most probable classes. A
            member with several most probable classes splits its vote equally among them.

    >>> outputs = jnp.log(jnp.array([[[1.0, 3.0]], [[3.0, 1.0]]]))  # [members, batch, classes]
    >>> Categorical().predict(outputs).mean.round(4).tolist()
    [[0.5, 0.5]]
    """

    log_probs: Callable[[jax.Array], jax.Array] = log_softmax
    pooling: str = "probs"
    metrics: ClassVar[tuple[Metric, ...]] = CLASSIFICATION
    optional_metrics: ClassVar[tuple[Metric, ...]] = UNBALANCED
    error_statistic: ClassVar[str] = "nll"
    uncertainty_statistic: ClassVar[str | None] = "entropy"
    poolings: ClassVar[tuple[str, ...]] = ("probs", "logits", "vote")
    calibrations: ClassVar[tuple[str, ...]] = ("temperature", "vector", "isotonic")
    conformal: ClassVar[tuple[str, ...]] = ("lac", "aps", "raps")

    @override
    def from_outputs(self, outputs: jax.Array) -> Values:
        """Returns a member's log-probabilities. Its samples are averaged as probabilities."""
        outputs = outputs.astype(jnp.float32)
        log_probs = self.log_probs(outputs)
        prediction = {"log_probs": mixture_log_probs(log_probs)}
        if len(outputs) > 1:  # The mean does not show how far the samples differ.
            prediction["aleatoric"] = entropy(log_probs).mean(axis=0)
        if self.log_probs is log_softmax:  # The energy is defined by the logits of a softmax.
            prediction["energy"] = -jax.nn.logsumexp(outputs, axis=-1).mean(axis=0)
        return prediction

    @override
    def pool(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        log_probs = predictions["log_probs"]
        if self.pooling == "logits":
            pooled = jax.nn.log_softmax(mean_of_members(log_probs, weights))
        elif self.pooling == "vote":
            pooled = jnp.log(mean_of_members(votes_of(log_probs), weights))
        else:
            pooled = mixture_log_probs(log_probs, weights)
        energy = {n: mean_of_members(v, weights) for n, v in predictions.items() if n == "energy"}
        return {"log_probs": pooled, **energy}

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        values = classification_values(prediction["log_probs"], labels)
        values |= {n: v for n, v in prediction.items() if n in ("energy", "aleatoric")}
        if "aleatoric" in values:
            values["mutual_information"] = values["entropy"] - values["aleatoric"]
        return values

    @override
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the ensemble's probabilities and their entropy in nats.

        With a pooling other than "probs", `mean` is not the mixture of the members. Its entropy can
        then be lower than theirs, and `epistemic` is 0.
        """
        predictions = jax.vmap(self.from_outputs)(with_samples(outputs, has_samples))
        pooled = self.pool(predictions, weights)["log_probs"]
        member_aleatoric = predictions.get("aleatoric", entropy(predictions["log_probs"]))
        total, aleatoric = entropy(pooled), mean_of_members(member_aleatoric, weights)
        return Prediction(
            mean=jnp.exp(pooled),
            total=total,
            aleatoric=aleatoric,
            epistemic=jnp.maximum(total - aleatoric, 0),
            members=jnp.exp(predictions["log_probs"]),
            unit="nats",
        )

    @override
    def diversity(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        return diversity_values(predictions["log_probs"], predictions.get("aleatoric"), weights)

    @override
    def classwise(self, prediction: Values, labels: jax.Array, weights: jax.Array) -> jax.Array:
        return classwise_sums(prediction["log_probs"], labels, weights)

    @override
    def summary(self, prediction: Values) -> Values:
        """Returns the log-probabilities. Small probabilities would underflow in float32."""
        return {"log_probs": prediction["log_probs"]}

    @override
    def pool_summaries(self, summaries: Summary, weights: np.ndarray) -> Summary:
        log_probs = summaries["log_probs"].astype(np.float64)
        shaped = weights.reshape(*weights.shape, *(1,) * (log_probs.ndim - 2))
        logs = np.where(shaped > 0, log_probs + np.log(np.where(shaped > 0, shaped, 1)), -np.inf)
        return {"log_probs": np.logaddexp.reduce(logs, axis=0) - np.log(shaped.sum(axis=0))}

    @override
    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        log_probs = summary["log_probs"]
        return {"probs": log_probs.__array_namespace__().exp(log_probs)}

    @override
    def from_shown(self, shown: Summary) -> Summary:
        probs = shown["probs"].astype(float)
        with np.errstate(divide="ignore"):  # A probability may be 0.
            return {"log_probs": probs.__array_namespace__().log(probs)}

    @override
    def shown_of(self, prediction: Prediction) -> dict[str, np.ndarray]:
        return {"probs": prediction.mean}

    @override
    def probabilities(self, summary: Summary) -> np.ndarray:
        log_probs = summary["log_probs"].astype(float)
        return log_probs.__array_namespace__().exp(log_probs)

    @override
    def calibrate(
        self, method: str, summary: Summary, labels: np.ndarray
    ) -> tuple[JsonDict, tuple[str, ...]]:
        # The module imports scipy.optimize, which takes half a second.
        from dist_ens.metrics.recalibration import RECALIBRATIONS

        log_probs = summary["log_probs"]
        rows = log_probs.reshape(-1, log_probs.shape[-1])
        fitted = RECALIBRATIONS[method](rows, labels.reshape(-1))
        return fitted.parameters, fitted.warnings

    @override
    def calibrated(self, method: str, parameters: JsonDict, summary: Summary) -> Summary:
        from dist_ens.metrics.recalibration import Recalibration

        log_probs = summary["log_probs"]
        rows = log_probs.reshape(-1, log_probs.shape[-1])
        return {"log_probs": Recalibration(method, parameters)(rows).reshape(log_probs.shape)}

    @override
    def with_shown(self, prediction: Prediction, shown: Summary) -> Prediction:
        probs = shown["probs"]
        xp = probs.__array_namespace__()
        # In float32 a calibrated probability may underflow to 0.
        total = -(probs * xp.log(xp.maximum(probs, np.finfo(np.float32).tiny))).sum(axis=-1)
        return dataclasses.replace(
            prediction, mean=probs, total=total, aleatoric=None, epistemic=None
        )


def categorical(num_classes: int) -> Objective:
    """Returns the objective for classes with the softmax cross-entropy.

    Args:
        num_classes: Number of classes, at least 2. Labels are int[batch, ...] in [0, num_classes).

    Raises:
        UserError: If `num_classes` is not a whole number of at least 2.

    >>> categorical(10).num_outputs
    10
    """
    num_classes = whole_number("num_classes", num_classes, least=2)
    return Objective(
        "categorical",
        softmax_cross_entropy,
        Categorical(),
        accuracy,
        num_outputs=num_classes,
        num_classes=num_classes,
    )


def class_mean_categorical(num_classes: int) -> Objective:
    """Returns the objective `categorical` with its loss divided by the number of classes.

    Args:
        num_classes: Number of classes, at least 2.

    >>> loss = class_mean_categorical(2).example_loss(jnp.zeros((1, 2)), jnp.array([0]))
    >>> round(float(loss[0]), 4)  # log 2 / 2
    0.3466
    """
    return dataclasses.replace(
        categorical(num_classes),
        name="class_mean_categorical",
        example_loss=class_mean_cross_entropy,
    )


def one_vs_rest(num_classes: int) -> Objective:
    """Returns the objective for classes with a sigmoid cross-entropy for each class.

    Args:
        num_classes: Number of classes, at least 2. Labels are those of `categorical`.

    >>> loss = one_vs_rest(2).example_loss(jnp.zeros((1, 2)), jnp.array([0]))
    >>> round(float(loss[0]), 4)  # 2 log 2
    1.3863
    """
    return dataclasses.replace(
        categorical(num_classes),
        name="one_vs_rest",
        example_loss=sigmoid_cross_entropy,
        distribution=Categorical(log_normalized_sigmoid),
    )
