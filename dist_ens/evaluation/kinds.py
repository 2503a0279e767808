"""How members' outputs are read, for each kind of label: as distributions, pooled, and scored."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError
from dist_ens.losses import Objective, log_softmax, normal_distribution, pinball
from dist_ens.metrics import (
    classification_scores,
    classification_values,
    classwise_sums,
    diversity_values,
    entropy,
    mixture_log_probs,
    mixture_moments,
    regression_scores,
    regression_values,
    votes_of,
)

Values = dict[str, jax.Array]


class Kind(Protocol):
    """What members' outputs say of labels of one kind.

    `pooling` is how they become one; `has_spread`, whether a member alone says how far off it may
    be.

    A *prediction* is a dict of arrays, each of which begins with the axes of the batch; of many
    members they have a leading axis [members].
    """

    @property
    def pooling(self) -> str:
        """One of `config.POOLINGS`."""
        ...

    @property
    def has_spread(self) -> bool:
        """Whether a member says a distribution or quantiles, and not a point."""
        ...

    def of_samples(self, outputs: jax.Array) -> Values:
        """A member's prediction from its outputs, [samples, batch, ..., outputs]."""
        ...

    def pooled(self, predictions: Values) -> Values:
        """The ensemble's prediction from its members'."""
        ...

    def values(self, prediction: Values, labels: jax.Array) -> Values:
        """What each row adds to a predictor's scores, float32[batch, ...]."""
        ...

    def diversity(self, predictions: Values) -> Values:
        """How far members differ in each row, float32[batch, ...]."""
        ...

    def classwise(self, prediction: Values, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """What a batch adds to what is scored class by class; empty of real targets."""
        ...

    def scores(
        self,
        values: Mapping[str, np.ndarray],
        classwise: np.ndarray,
        unit: float,
        weights: Any,
        seed: int = 0,
    ) -> dict[str, Any]:
        """The scores of a predictor, in the targets' own unit; see `classification_scores`."""
        ...

    def told(self, prediction: Values) -> Values:
        """Returns what is kept of a prediction, to be scored or shown later."""
        ...

    def read(self, told: Mapping[str, np.ndarray]) -> Values:
        """The prediction again from what was told of it."""
        ...


@dataclasses.dataclass(frozen=True)
class Classes:
    """Labels are classes.

    Attributes:
        log_probs: Of a member's outputs.
        pooling: `probs`, `logits` or `vote`; see `config.EvaluationConfig`. Under `vote` a member
            that finds several classes most probable gives each an equal part of its vote.
    """

    log_probs: Callable[[jax.Array], jax.Array]
    pooling: str = "probs"

    @property
    def has_spread(self) -> bool:
        """See `Kind`."""
        return True

    def of_samples(self, outputs: jax.Array) -> Values:
        """See `Kind`; samples of one member are always averaged as probabilities."""
        outputs = outputs.astype(jnp.float32)
        log_probs = self.log_probs(outputs)
        prediction = {"log_probs": mixture_log_probs(log_probs)}
        if len(outputs) > 1:  # how far they differ is lost in their mean
            prediction["aleatoric"] = entropy(log_probs).mean(axis=0)
        if self.log_probs is log_softmax:  # of whose logits it is the energy
            prediction["energy"] = -jax.nn.logsumexp(outputs, axis=-1).mean(axis=0)
        return prediction

    def pooled(self, predictions: Values) -> Values:
        """See `Kind`."""
        log_probs = predictions["log_probs"]
        if self.pooling == "logits":
            together = jax.nn.log_softmax(log_probs.mean(axis=0))
        elif self.pooling == "vote":
            together = jnp.log(votes_of(log_probs).mean(axis=0))
        else:
            together = mixture_log_probs(log_probs)
        energy = {n: v.mean(axis=0) for n, v in predictions.items() if n == "energy"}
        return {"log_probs": together, **energy}

    def values(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Kind`."""
        values = classification_values(prediction["log_probs"], labels)
        values |= {n: v for n, v in prediction.items() if n in ("energy", "aleatoric")}
        if "aleatoric" in values:
            values["mutual_information"] = values["entropy"] - values["aleatoric"]
        return values

    def diversity(self, predictions: Values) -> Values:
        """See `Kind`."""
        return diversity_values(predictions["log_probs"], predictions.get("aleatoric"))

    def classwise(self, prediction: Values, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """See `Kind`."""
        return classwise_sums(prediction["log_probs"], labels, mask)

    def scores(
        self,
        values: Mapping[str, np.ndarray],
        classwise: np.ndarray,
        unit: float,
        weights: Any,
        seed: int = 0,
    ) -> dict[str, Any]:
        """See `Kind`."""
        return classification_scores(values, classwise, weights, seed)

    def told(self, prediction: Values) -> Values:
        """See `Kind`; the logarithms, for a probability may be too small for float32."""
        return {"log_probs": prediction["log_probs"]}

    def read(self, told: Mapping[str, np.ndarray]) -> Values:
        """See `Kind`; of its energy nothing is known."""
        return {"log_probs": jnp.asarray(told["log_probs"], jnp.float32)}


class _RealTargets:
    """What all kinds of real targets have alike: nothing of them goes class by class."""

    def diversity(self, predictions: Values) -> Values:
        """See `Kind`."""
        return {}

    def classwise(self, prediction: Values, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """See `Kind`."""
        return jnp.zeros(0)

    def scores(
        self,
        values: Mapping[str, np.ndarray],
        classwise: np.ndarray,
        unit: float,
        weights: Any,
        seed: int = 0,
    ) -> dict[str, Any]:
        """See `Kind`."""
        return regression_scores(values, unit, weights)


@dataclasses.dataclass(frozen=True)
class Normals(_RealTargets):
    """Labels are real targets, of which a member says a normal distribution, or its mean alone.

    Attributes:
        has_variance: Whether a member says a variance; else what rests on one is not scored.
        as_one: Whether the members' mixture is taken as one normal distribution.
    """

    has_variance: bool = True
    as_one: bool = True

    @property
    def pooling(self) -> str:
        """See `Kind`."""
        return "probs" if self.as_one else "mixture"

    @property
    def has_spread(self) -> bool:
        """See `Kind`."""
        return self.has_variance

    def of_samples(self, outputs: jax.Array) -> Values:
        """See `Kind`."""
        outputs = outputs.astype(jnp.float32)
        if self.has_variance:
            mean, variance = normal_distribution(outputs)
        else:
            mean, variance = outputs[..., 0], jnp.zeros(outputs.shape[:-1])
        return {"mean": jnp.moveaxis(mean, 0, -1), "variance": jnp.moveaxis(variance, 0, -1)}

    def pooled(self, predictions: Values) -> Values:
        """See `Kind`: the normals of all members, as those of one."""
        return {
            name: jnp.moveaxis(values, 0, -2).reshape(*values.shape[1:-1], -1)
            for name, values in predictions.items()
        }

    def values(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Kind`."""
        mean, variance = (jnp.moveaxis(prediction[name], -1, 0) for name in ("mean", "variance"))
        values = regression_values(mean, variance, labels, as_one=self.as_one)
        if self.has_variance:
            return values
        several = ("variance",) if len(mean) > 1 else ()
        of_points = ("prediction", "squared_error", "absolute_error", "crps", *several)
        return {name: values[name] for name in of_points}

    def told(self, prediction: Values) -> Values:
        """See `Kind`."""
        mean, variance = mixture_moments(
            *(jnp.moveaxis(prediction[name], -1, 0) for name in ("mean", "variance"))
        )
        return {"mean": mean, "variance": variance}

    def read(self, told: Mapping[str, np.ndarray]) -> Values:
        """See `Kind`; as one normal distribution."""
        return {name: jnp.asarray(values, jnp.float32)[..., None] for name, values in told.items()}


@dataclasses.dataclass(frozen=True)
class Quantiles(_RealTargets):
    """Labels are real targets, of which a member says some quantiles.

    Attributes:
        levels: Of the quantiles, ascending, the middle one 0.5.
    """

    levels: tuple[float, ...]

    @property
    def pooling(self) -> str:
        """See `Kind`."""
        return "probs"

    @property
    def has_spread(self) -> bool:
        """See `Kind`."""
        return True

    def of_samples(self, outputs: jax.Array) -> Values:
        """See `Kind`; quantiles that cross are put in order."""
        return {"quantiles": jnp.sort(outputs.astype(jnp.float32), axis=-1).mean(axis=0)}

    def pooled(self, predictions: Values) -> Values:
        """See `Kind`: each quantile is the mean of the members'."""
        return {"quantiles": predictions["quantiles"].mean(axis=0)}

    def values(self, prediction: Values, labels: jax.Array) -> Values:
        """See `Kind`."""
        quantiles = prediction["quantiles"]
        low, median, high = (
            quantiles[..., at] for at in (0, len(self.levels) // 2, len(self.levels) - 1)
        )
        return {
            "prediction": median,
            "squared_error": jnp.square(labels - median),
            "absolute_error": jnp.abs(labels - median),
            "pinball": pinball(quantiles, labels, levels=self.levels),
            "inside": jnp.where(jnp.isnan(high - low), jnp.nan, (low <= labels) & (labels <= high)),
            "width": high - low,
        }

    def told(self, prediction: Values) -> Values:
        """See `Kind`."""
        return dict(prediction)

    def read(self, told: Mapping[str, np.ndarray]) -> Values:
        """See `Kind`."""
        return {name: jnp.asarray(values, jnp.float32) for name, values in told.items()}


def kind_of(objective: Objective, pooling: str = "probs") -> Kind:
    """How what an objective trains is read.

    Args:
        objective: What members minimise.
        pooling: See `config.EvaluationConfig`.

    Returns:
        The kind.

    Raises:
        UserError: If such predictions are not pooled in this way.
    """
    of_classes = objective.log_probs is not None
    allowed: tuple[str, ...] = ("probs", "logits", "vote") if of_classes else ("probs", "mixture")
    if objective.levels:
        allowed = ("probs",)
    if pooling not in allowed:
        raise UserError(
            f"Predictions of {'classes' if of_classes else 'such targets'} are pooled by one of "
            f"{', '.join(allowed)}. Received: {pooling!r}. Try evaluation.pooling=probs."
        )
    if objective.log_probs is not None:
        return Classes(objective.log_probs, pooling)
    if objective.levels:
        return Quantiles(objective.levels)
    return Normals(objective.has_variance, as_one=pooling == "probs")
