"""Calibration of the pooled prediction on validation data, and the predictions that it changes.

The map of probabilities or variances and the conformal rule are both fitted on predictions before
any calibration. So neither depends on the other, and the coverage of the rule holds.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Self

import jax
import numpy as np

from dist_ens.conformal import out_of_bag_means, quantile_rank
from dist_ens.data import Source, Split
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.evaluation.conformal_rule import SETS, ConformalRule, uniform_of
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.out_of_bag import held_out_means
from dist_ens.evaluation.scoring import (
    BATCH_SIZE,
    Examples,
    check_groups,
    evaluator_of,
    examples_of,
    parts_of_objective,
)
from dist_ens.json_text import JsonDict
from dist_ens.layout import to_host
from dist_ens.losses import Distribution, Objective, Prediction
from dist_ens.state import State
from dist_ens.types import Data, Inputs

_AUTO = "auto"
# Number of examples whose inputs are read at a time.
_AT_A_TIME = 1000


@dataclasses.dataclass(frozen=True)
class Predictor:
    """The ensemble at a step, whose pooled prediction a calibration belongs to.

    Attributes:
        step: Number of updates that the members have seen.
        member_ids: Ids of the members that are pooled.
        seed: Seed of the ensemble.
        objective: Name of the objective.
        pooling: Way in which members are pooled.
        dropout_samples: Number of samples of each member; None without.
    """

    step: int
    member_ids: tuple[int, ...]
    seed: int
    objective: str
    pooling: str
    dropout_samples: int | None

    @classmethod
    def of(cls, ensemble: Ensemble, state: State, left_out: tuple[int, ...] = ()) -> Self:
        """Returns the predictor of an ensemble; every host must call this.

        Args:
            ensemble: Ensemble.
            state: State of the ensemble.
            left_out: Positions of members that are not pooled.

        Raises:
            UserError: If the loss of the ensemble is a function.
        """
        objective = _objective_of(ensemble)
        steps, ids = to_host((state.step, state.member_id))
        return cls(
            int(steps.max()),
            tuple(np.delete(ids, left_out).tolist()),
            ensemble.seed,
            objective.name,
            objective.distribution.pooling,
            ensemble.dropout_samples,
        )

    def differences(self, other: Self) -> list[str]:
        """Returns a clause for each field in which another predictor differs."""
        fields = [field.name for field in dataclasses.fields(self)]
        return [
            f"{name} {getattr(self, name)!r} in place of {getattr(other, name)!r}"
            for name in fields
            if getattr(self, name) != getattr(other, name)
        ]


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
        """Returns this calibration with sets or intervals of another coverage.

        Args:
            level: Requested coverage, in (0, 1).
        """
        return dataclasses.replace(self, level=level)

    def require_of(self, predictor: Predictor) -> None:
        """Checks that this calibration was fitted for a predictor.

        Raises:
            UserError: If the two differ.
        """
        different = self.predictor.differences(predictor)
        if different:
            raise UserError(
                f"The calibration was fitted for another prediction: {'; '.join(different)}. Fit "
                "it again for the state that predicts."
            )

    def applied(
        self, prediction: Prediction, ensemble: Ensemble, state: State, inputs: Inputs
    ) -> Prediction:
        """Returns the calibrated prediction, with its sets or intervals, on the host.

        Args:
            prediction: Prediction of the ensemble before any calibration.
            ensemble: Ensemble that predicts.
            state: State of the ensemble.
            inputs: Inputs of the examples, leaves [batch, ...].

        Raises:
            UserError: If it was fitted for another prediction.
        """
        self.require_of(Predictor.of(ensemble, state))
        distribution = _objective_of(ensemble).distribution
        prediction = jax.tree.map(
            lambda leaf: to_host(leaf) if isinstance(leaf, jax.Array) else leaf, prediction
        )
        shown = {n: v.astype(np.float64) for n, v in distribution.shown_of(prediction).items()}
        calibrated, conformal = self.arrays(
            distribution, shown, lambda: np.asarray(prediction.members), inputs
        )
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

        Args:
            distribution: Predictive distribution.
            shown: Prediction of the ensemble as `Distribution.shown` returns it.
            points: Function that returns the members' means or medians, [members, batch].
            inputs: Inputs of the examples, leaves [batch, ...].
        """
        summary = distribution.from_shown(shown)
        found: JsonDict = {}
        if self.conformal is not None and self.conformal.method in SETS:
            probs = distribution.probabilities(summary)
            found["sets"] = self.conformal.sets(probs, uniform_of(inputs), self.level)
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
            "predictor": dataclasses.asdict(self.predictor),
            "method": self.method,
            "parameters": dict(self.parameters),
            "warnings": list(self.warnings),
            "conformal": self.conformal and self.conformal.to_dict(),
            "level": self.level,
        }

    @classmethod
    def from_dict(cls, values: JsonDict) -> Self:
        """Returns the calibration that `to_dict` wrote, also after a round trip through JSON.

        Args:
            values: Fields by name.

        Raises:
            UserError: If a field is absent, or has a value that it cannot have.
        """
        try:
            of = values["predictor"]
            rule = values["conformal"]
            return cls(
                predictor=Predictor(**{**of, "member_ids": tuple(of["member_ids"])}),
                method=values["method"],
                parameters=values["parameters"],
                warnings=tuple(values["warnings"]),
                conformal=None if rule is None else ConformalRule.from_dict(rule),
                level=values["level"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The calibration cannot be read: {type(error).__name__}: {error}. Fit it again."
            ) from error


def calibrate(
    ensemble: Ensemble,
    state: State,
    data: Data,
    *,
    method: str | None = _AUTO,
    conformal: str | None = None,
    level: float = 0.9,
    batch_size: int = BATCH_SIZE,
) -> Calibration:
    """Fits a calibration of the pooled prediction on data that was not trained on.

    The members' predictions are pooled first, and one map is fitted for the pooled prediction. For
    the temperature T and for the variance it is

        p(c | x) = softmax_c(log p(c | x) / T),    variance * scale

    Args:
        ensemble: Ensemble with an objective.
        state: State of the ensemble, or of some members.
        data: Held-out data: a dict of arrays with `inputs` and `labels`, an iterable of batches, or
            a source of `dist_ens.data` (its validation split).
        method: Map to fit: `temperature`, `vector` or `isotonic` for classes, `variance` for real
            targets with a predicted variance. Default: the first of these that the objective has.
            None fits no map.
        conformal: Method for conformal predictions: `lac`, `aps` or `raps` for sets of classes,
            `cqr` for intervals of real targets. Default: none.
        level: Coverage of the sets or intervals, in (0, 1). `calibration.at(level)` changes it.
        batch_size: Number of examples at a time.

    Returns:
        The calibration, for `ensemble.predict(state, inputs, calibration=…)`.

    Raises:
        UserError: If a method does not fit the objective, the data has weights or does not fit the
            ensemble, there are too few examples, or there is nothing to fit.

    >>> import optax
    >>> from dist_ens.losses import categorical
    >>> network = (
    ...     lambda key: {"w": np.log(9.0).astype(np.float32) * np.eye(2, dtype=np.float32)},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), categorical(2), num_members=1)
    >>> data = {"inputs": np.eye(2)[[0] * 40], "labels": np.array([0, 0, 0, 1] * 10)}
    >>> state = ensemble.init(data)
    >>> calibration = calibrate(ensemble, state, data, conformal="lac")
    >>> probs = ensemble.predict(state, np.eye(2)[:1]).mean  # right in 3 of 4 examples
    >>> np.asarray(probs, float).round(2)
    array([[0.9, 0.1]])
    >>> p = ensemble.predict(state, np.eye(2)[:1], calibration=calibration)
    >>> p.mean.round(2), p.sets
    (array([[0.75, 0.25]]), array([[ True,  True]]))

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599; of the pooled prediction: Rahaman
    and Thiery (2021), https://arxiv.org/abs/2007.08792.
    """
    here, state = ensemble.at(state)
    objective, given = _objective_of(here), examples_of(_held_out(data))
    check_groups(here, given.spec)
    # A source that standardises targets is not known to `Ensemble.predict`, whose unit counts here.
    examples = Examples(parts_of_objective(objective, given.split))
    if objective.WEIGHTS in examples.split.take(np.zeros(1, np.int64)):
        raise UserError(
            "The data has weights, which a calibration does not take. Leave them out, and the "
            "examples of weight 0 with them."
        )
    evaluator, split = evaluator_of(here, state, examples, (), batch_size)
    distribution = objective.distribution
    if method == _AUTO:
        method = next(iter(distribution.calibrations), None)
    if conformal is None and method is None:
        raise UserError(
            f"There is nothing to fit: {type(distribution).__name__} predictions have the "
            f"calibrations {distribution.calibrations} and the conformal methods "
            f"{distribution.conformal}. Give one of them as method= or conformal=."
        )
    found = Calibration(predictor=Predictor.of(here, state))
    if method is not None:
        found = fit_map(method, evaluator, state, split)
    if conformal is not None:
        rule = fit_rule(conformal, level, evaluator, state, split)
        found = dataclasses.replace(found, conformal=rule, level=level)
    return found


def fit_map(method: str, evaluator: Evaluator, state: State, split: Split | None) -> Calibration:
    """Fits a map of probabilities or variances.

    Args:
        method: Name of the map.
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Validation split. None if the run held out no examples.

    Raises:
        UserError: If the method does not fit the predictions, or the split does not determine it.
        BrokenMembersError: If predictions of pooled members are NaN.
    """
    distribution = evaluator.distribution
    if method not in distribution.calibrations:
        fitting = ", ".join(distribution.calibrations)
        way_out = (
            f"Choose one of {fitting}."
            if fitting
            else "Train with a loss that predicts a variance, such as gaussian_nll."
        )
        raise UserError(
            f"The calibration {method!r} does not fit {type(distribution).__name__} predictions. "
            f"{way_out}"
        )
    summary, labels, _ = pooled_of(evaluator, state, _required(split))
    parameters, warnings = distribution.calibrate(method, summary, labels)
    return Calibration(
        predictor=Predictor.of(evaluator.ensemble, state, evaluator.left_out),
        method=method,
        parameters=parameters,
        warnings=warnings,
    )


def fit_rule(
    method: str,
    level: float,
    evaluator: Evaluator,
    state: State,
    split: Split | None,
    out_of_bag: np.ndarray | None = None,
) -> ConformalRule:
    """Fits a conformal rule.

    Args:
        method: Name of the method.
        level: Requested coverage, in (0, 1).
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Validation split; None if the run held out no examples. For cv+ and jackknife+ the
            training split.
        out_of_bag: Whether a member was not trained on an example, for cv+ and jackknife+;
            bool[members, examples].

    Raises:
        UserError: If the method does not fit the predictions, or there are too few examples.
        BrokenMembersError: If predictions of pooled members are NaN.
    """
    distribution = evaluator.distribution
    if method not in distribution.conformal:
        fitting = ", ".join(distribution.conformal)
        way_out = f"Choose one of {fitting}." if fitting else "Leave it out."
        raise UserError(
            f"The conformal method {method!r} does not fit {type(distribution).__name__} "
            f"predictions. {way_out}"
        )
    split = _required(split)
    if np.ndim(split.take(np.zeros(1, np.int64))[Objective.LABELS]) > 1:
        raise UserError(
            "An example has several labels, as a text has, and a conformal prediction is that of "
            "one label. Leave the conformal method out."
        )
    quantile_rank(len(split), level)  # There must be enough examples for the level.
    scale = evaluator.zeros[0], evaluator.units[0]
    if method in ("cv+", "jackknife+"):
        if out_of_bag is None:
            kind = "folds" if method == "cv+" else "bootstrap samples"
            examples = "kfold" if method == "cv+" else "bootstrap"
            raise UserError(
                f"The conformal method {method!r} needs members that were trained on {kind}. Train "
                f"a config with --config.data.examples={examples}, and use dist-ens evaluate."
            )
        pooled = np.setdiff1d(np.arange(len(out_of_bag)), evaluator.left_out)
        points, mask = held_out_means(evaluator, state, split)[pooled], out_of_bag[pooled]
        labels = split.take(np.arange(len(split)))[Objective.LABELS]
        residuals = np.abs(labels - out_of_bag_means(mask, points))
        return ConformalRule(method, {"residuals": residuals, "out_of_bag": mask}, *scale)
    summary, labels, u = pooled_of(evaluator, state, split)
    if method in SETS:
        return ConformalRule.of_sets(method, distribution.probabilities(summary), labels, u)
    return ConformalRule(method, {**summary, "labels": labels}, *scale)


def pooled_of(
    evaluator: Evaluator, state: State, split: Split
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns the pooled predictions of a split, its labels, and the numbers of `uniform_of`.

    Args:
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Split to predict.

    Returns:
        The summary with leaves [examples, ...] and the labels, both in the unit of the split, and
        float64[examples].

    Raises:
        UserError: If there are several groups.
        BrokenMembersError: If predictions of pooled members are NaN.
    """
    if evaluator.ensemble.num_groups > 1:
        raise UserError(
            f"A calibration is that of one group of members, and the ensemble has "
            f"{evaluator.ensemble.num_groups}. Train on a table with one split, one row in its "
            "train_idx and test_idx."
        )
    summary = evaluator.pooled_predictions(state, split)
    labels, u = [], []
    for first in range(0, len(split), _AT_A_TIME):
        part = split.take(np.arange(first, min(first + _AT_A_TIME, len(split))))
        labels.append(np.asarray(part[Objective.LABELS]))
        u.append(uniform_of(part[Objective.INPUTS]))
    summary = {name: values[0] for name, values in summary.items()}
    return summary, np.concatenate(labels), np.concatenate(u)


def _objective_of(ensemble: Ensemble) -> Objective:
    """Returns the objective of an ensemble; raises a `UserError` if its loss is a function."""
    if ensemble.objective is None:
        raise UserError(
            "The loss of this ensemble is a function, which says nothing of predictions that could "
            "be calibrated. Make the ensemble with an objective, such as losses.categorical(10)."
        )
    return ensemble.objective


def _required(split: Split | None) -> Split:
    """Returns a validation split; raises a `UserError` if the run held out no examples."""
    if split is None:
        raise UserError(
            "Calibrations are fitted on validation data, and the run held none out. Train with "
            "--config.data.validation=0.1."
        )
    return split


def _held_out(data: Data) -> Data:
    """Returns the validation split of a source, and any other data as it is.

    Raises:
        UserError: If the source has no validation split.
    """
    if not isinstance(data, Source):
        return data
    if data.valid is None:
        raise UserError(
            "The source has no validation split, on which a calibration is fitted. Give "
            "source.with_validation(0.1) to fit and to calibrate."
        )
    return data.valid
