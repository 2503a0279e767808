"""A calibration of the pooled prediction, and the predictions that it changes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import jax
import numpy as np

from dist_ens.ensemble import Ensemble
from dist_ens.evaluation.conformal import SETS, ConformalRule, uniform_of
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Inputs
from dist_ens.layout import to_host
from dist_ens.losses import Distribution, Objective, Prediction


@dataclasses.dataclass(frozen=True)
class Predictor:
    """The ensemble at a step, without the members left out, that a calibration belongs to.

    `weights` are those of these members in the pool, and None if they are equal.
    """

    step: int
    member_ids: tuple[int | str, ...]
    seed: int
    objective: str
    pooling: str
    dropout_samples: int | None
    weights: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        ensemble: Ensemble,
        state: State,
        left_out: Sequence[int] = (),
        weights: np.ndarray | None = None,
    ) -> Self:
        """Returns the predictor of an ensemble without some positions; all hosts must call this.

        Members of weight 0 are left out too. `weights` are float64[members] with sum 1.
        """
        objective = objective_of(ensemble)
        steps, ids = to_host(state.step), ensemble.predictor_ids(state)
        given = np.ones(len(ids)) if weights is None else weights.copy()
        given[list(left_out)] = 0
        pooled = np.round(given[given > 0], 12)  # Sums of weights are rounded.
        return cls(
            int(steps.max()),
            tuple(ids[given > 0].tolist()),
            ensemble.seed,
            objective.name,
            objective.distribution.pooling,
            ensemble.dropout_samples,
            None if (pooled == pooled[0]).all() else tuple(pooled.tolist()),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A calibration of an ensemble's pooled prediction, which `calibrate` fits.

    `ensemble.predict(state, inputs, calibration=calibration)` applies it.

    Attributes:
        predictor: Step, members and objective that it was fitted for. Others are refused.
        method: Name of the map: `temperature`, `vector` or `isotonic` for classes, `variance` for
            real targets. None if probabilities and variances are not changed.
        parameters: Parameters of the map, as JSON values.
        warnings: Sentences about parameters that the data does not determine.
        conformal: Rule for conformal sets or intervals. None without.
        level: Coverage of the sets or intervals, in (0, 1).

    `to_dict` and `from_dict` store it as JSON:

    >>> predictor = Predictor(500, (0, 1), 0, "categorical", "probs", None)
    >>> calibration = Calibration(
    ...     predictor=predictor, method="temperature", parameters={"temperature": 1.5}
    ... )
    >>> Calibration.from_dict(calibration.to_dict()) == calibration
    True
    """

    predictor: Predictor
    method: str | None = None
    parameters: JsonDict = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    conformal: ConformalRule | None = None
    level: float = 0.9

    def at(self, level: float) -> Self:
        """Returns this calibration with sets or intervals of another coverage, in (0, 1)."""
        return dataclasses.replace(self, level=level)

    def require_of(self, predictor: Predictor) -> None:
        """Raises a `UserError` unless this calibration was fitted for a predictor."""
        for name, value in vars(predictor).items():
            fitted = getattr(self.predictor, name)
            if value != fitted:
                raise UserError(
                    f"The calibration was fitted for another prediction: {name} {fitted!r} in "
                    f"place of {value!r}. Fit it again for the state that predicts."
                )

    def applied(
        self,
        prediction: Prediction,
        ensemble: Ensemble,
        state: State,
        inputs: Inputs,
        weights: np.ndarray | None = None,
    ) -> Prediction:
        """Returns the calibrated prediction of an ensemble, with its sets or intervals."""
        self.require_of(Predictor.of(ensemble, state, weights=weights))
        prediction = jax.tree.map(
            lambda leaf: to_host(leaf) if isinstance(leaf, jax.Array) else leaf, prediction
        )
        return self.of_prediction(objective_of(ensemble).distribution, prediction, inputs)

    def of_prediction(
        self, distribution: Distribution, prediction: Prediction, inputs: Inputs
    ) -> Prediction:
        """Returns a calibrated prediction, in float64 for arrays of NumPy.

        Arrays of JAX may be traced, and stay in float32.
        """
        shown = {n: v.astype(float) for n, v in distribution.shown_of(prediction).items()}
        calibrated, conformal = self.arrays(distribution, shown, lambda: prediction.members, inputs)
        if self.method is not None:
            prediction = distribution.with_shown(prediction, calibrated)
        return dataclasses.replace(prediction, **conformal)

    def arrays(
        self,
        distribution: Distribution,
        shown: Mapping[str, np.ndarray],
        points: Callable[[], np.ndarray],
        inputs: Inputs,
    ) -> tuple[Mapping[str, np.ndarray], JsonDict]:
        """Returns the calibrated arrays of a prediction, and `sets` or `interval` by this name.

        `shown` is the prediction as `Distribution.shown` returns it, and `points` returns the
        members' means or medians, [members, batch].
        """
        summary = distribution.from_shown(shown)
        found: JsonDict = {}
        if self.conformal is not None and self.conformal.method in SETS:
            probs = distribution.probabilities(summary)
            is_lac = self.conformal.method == "lac"  # Only the others need a number of each input.
            u = np.zeros(1) if is_lac else uniform_of(inputs)
            found["sets"] = self.conformal.sets(probs, u, self.level)
        elif self.conformal is not None:
            found["interval"] = self.conformal.own_interval(distribution, shown, points, self.level)
        if self.method is None:
            return shown, found
        return distribution.shown(
            distribution.calibrated(self.method, self.parameters, summary)
        ), found

    def to_dict(self) -> JsonDict:
        """Returns the fields by name, in types that JSON can hold."""
        return {
            **vars(self),
            "predictor": dataclasses.asdict(self.predictor),
            "parameters": dict(self.parameters),
            "warnings": list(self.warnings),
            "conformal": self.conformal and self.conformal.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: JsonDict) -> Self:
        """Returns the calibration that `to_dict` wrote, also after a round trip through JSON."""
        predictor = dict(values["predictor"])
        for name in ("member_ids", "weights"):
            if predictor.get(name) is not None:
                predictor[name] = tuple(predictor[name])
        rule = values["conformal"]
        fields = {
            "predictor": Predictor(**predictor),
            "warnings": tuple(values["warnings"]),
            "conformal": None if rule is None else ConformalRule.from_dict(rule),
        }
        return cls(**{**values, **fields})


def objective_of(ensemble: Ensemble) -> Objective:
    """Returns the objective of an ensemble; raises a `UserError` if its loss is a function."""
    if ensemble.objective is None:
        raise UserError(
            "The loss of this ensemble is a function, which says nothing of predictions that could "
            "be calibrated or chosen. Use an objective, such as losses.categorical(10)."
        )
    return ensemble.objective
