"""The objective for several labels of an example that are each 0 or 1.

Logits are log-odds of 1, float[..., labels]. Labels are int or bool, [..., labels]; or
probabilities of 1, float[..., labels].
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import whole_number
from dist_ens.losses.categorical import Categorical, sigmoid_cross_entropy
from dist_ens.losses.distribution import Distribution, Objective, Summary, Values
from dist_ens.losses.prediction import Prediction
from dist_ens.metrics.catalogue import MULTILABEL, MULTILABEL_OPTIONAL
from dist_ens.metrics.metric import Metric


def log_sigmoids(logits: jax.Array) -> jax.Array:
    """Returns the log-probabilities of 0 and of 1, float[..., labels, 2].

    >>> jnp.exp(log_sigmoids(jnp.log(jnp.array([3.0])))).round(4).tolist()
    [[0.25, 0.75]]
    """
    return jnp.stack([jax.nn.log_sigmoid(-logits), jax.nn.log_sigmoid(logits)], axis=-1)


def binary_cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the sum over the labels of their binary cross-entropies, in nats.

        loss = -sum_k (label_k log sigmoid(logits_k) + (1 - label_k) log sigmoid(-logits_k))

    It is the NLL of labels that are independent given the inputs. The gradient of a logit does not
    depend on the number of labels.

    >>> loss = binary_cross_entropies(jnp.zeros(2), jnp.array([0, 1]))
    >>> round(float(loss), 4)  # 2 log 2
    1.3863
    """
    return sigmoid_cross_entropy(logits, labels.astype(logits.dtype))


def exact_match(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Returns whether all labels are predicted, as `{"exact_match": float32[...]}`.

    A label is predicted as 1 if its probability is above 1/2.

    >>> exact_match(jnp.array([[1.0, -1.0], [1.0, 1.0]]), jnp.array([[1, 0], [1, 0]]))
    {'exact_match': Array([1., 0.], dtype=float32)}
    """
    are_right = (logits > 0) == (labels > 0.5)
    return {"exact_match": are_right.all(axis=-1).astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class MultiLabel(Categorical):
    """The distribution of several labels that are each 0 or 1, independent given the inputs.

    Each label is a categorical distribution over 0 and 1: the summary of a prediction holds
    `log_probs`, float32[batch, ..., labels, 2]. Statistics are [batch, ..., labels].

    Attributes:
        num_targets: Number of labels of an example.
        pooling: Way in which members are pooled, as in `Categorical`, for each label.

    >>> outputs = jnp.log(jnp.array([[[1.0, 3.0]], [[3.0, 3.0]]]))  # [members, batch, labels]
    >>> MultiLabel(num_targets=2).predict(outputs).mean.round(4).tolist()
    [[0.625, 0.75]]
    """

    num_targets: int | None = None
    metrics: ClassVar[tuple[Metric, ...]] = MULTILABEL
    optional_metrics: ClassVar[tuple[Metric, ...]] = MULTILABEL_OPTIONAL
    calibrations: ClassVar[tuple[str, ...]] = ("temperature",)
    conformal: ClassVar[tuple[str, ...]] = ("lac",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_probs", log_sigmoids)

    @override
    def row_statistics(self, prediction: Values, labels: jax.Array) -> Values:
        labels = labels.astype(jnp.int32)
        values = super().row_statistics(prediction, labels)
        are_right = (values["prediction"] == labels).all(axis=-1, keepdims=True)
        broken = jnp.isnan(values["nll"]).any(axis=-1, keepdims=True)
        matches = jnp.where(broken, jnp.nan, are_right.astype(jnp.float32))
        return values | {
            "brier": values["brier"] / 2,  # Both classes have the same squared error.
            "prob": jnp.exp(prediction["log_probs"][..., 1]),
            "exact_match": jnp.broadcast_to(matches, labels.shape),
        }

    @override
    def diversity(self, predictions: Values, weights: jax.Array | None = None) -> Values:
        values = super().diversity(predictions, weights)
        return values | {"variance": values["variance"] / 2}

    @override
    def classwise(self, prediction: Values, labels: jax.Array, weights: jax.Array) -> jax.Array:
        return Distribution.classwise(self, prediction, labels, weights)

    @override
    def predict(
        self, outputs: jax.Array, *, has_samples: bool = False, weights: jax.Array | None = None
    ) -> Prediction:
        """Returns the probabilities of 1, [batch, labels], and each label's entropy in nats."""
        found = super().predict(outputs, has_samples=has_samples, weights=weights)
        return dataclasses.replace(found, mean=found.mean[..., 1], members=found.members[..., 1])

    @override
    def shown(
        self, summary: Summary, mean: np.ndarray | None = None, std: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        return {"probs": np.exp(summary["log_probs"][..., 1])}

    @override
    def from_shown(self, shown: Summary) -> Summary:
        probs = np.asarray(shown["probs"], np.float64)
        return super().from_shown({"probs": np.stack([1 - probs, probs], axis=-1)})

    @override
    def calibrate(
        self, method: str, summary: Summary, labels: np.ndarray
    ) -> tuple[JsonDict, tuple[str, ...]]:
        """Fits one temperature of the log-odds of all labels."""
        return super().calibrate(method, summary, labels.astype(np.int64))

    @override
    def with_shown(self, prediction: Prediction, shown: Summary) -> Prediction:
        from scipy.special import entr  # As for `calibrate`, which few programs call.

        probs = shown["probs"]
        total = entr(probs) + entr(1 - probs)
        return dataclasses.replace(
            prediction, mean=probs, total=total, aleatoric=None, epistemic=None
        )


def multilabel(num_labels: int) -> Objective:
    """Returns the objective for several labels of an example that are each 0 or 1.

    The loss of an example is the sum of the binary cross-entropies of its labels, the NLL of labels
    that are independent given the inputs.

    Args:
        num_labels: Number of labels of an example, at least 1. Labels are int or bool,
            [batch, num_labels], in {0, 1}; with mixup and label smoothing, probabilities of 1.

    Raises:
        UserError: If `num_labels` is not a whole number of at least 1.

    >>> loss = multilabel(2).example_loss(jnp.zeros((1, 2)), jnp.array([[0, 1]]))
    >>> round(float(loss[0]), 4)  # 2 log 2
    1.3863
    """
    num_labels = whole_number("num_labels", num_labels, least=1)
    return Objective(
        "multilabel",
        binary_cross_entropies,
        MultiLabel(num_targets=num_labels),
        exact_match,
        num_outputs=num_labels,
        num_classes=2,
    )
