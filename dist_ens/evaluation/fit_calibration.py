"""Calibrations of the pooled prediction: fitted on data that was not trained on, and scored.

The map of probabilities or variances and the conformal rule are both fitted on predictions before
any calibration. So neither depends on the other, and the coverage of the rule holds.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from dist_ens.data import Source, Split
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation.calibration import Calibration, Predictor, objective_of
from dist_ens.evaluation.conformal import (
    LEFT_OUT_BY,
    SETS,
    ConformalRule,
    class_scores,
    out_of_bag_means,
    quantile_rank,
    uniform_of,
)
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import Examples, examples_of, labels_of, of_all
from dist_ens.evaluation.label_checks import check_classes, check_labels
from dist_ens.evaluation.out_of_bag import held_out_means, scores_of_summaries
from dist_ens.evaluation.scores import num_draws
from dist_ens.evaluation.scoring import evaluator_of, scorable
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State, require_state
from dist_ens.ground.types import Data, Score
from dist_ens.losses import Distribution, Objective
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.metrics.calibration_error import reliability_bins
from dist_ens.metrics.metric import one_a_row

_AUTO = "auto"
# Number of examples that are scored at a time. Their statistics of each class need much memory.
_AT_A_TIME = 1000


def calibrate(
    ensemble: Ensemble,
    state: State,
    data: Data,
    *,
    method: str | None = _AUTO,
    conformal: str | None = None,
    level: float = 0.9,
    batch_size: int | None = None,
    weights: ArrayLike | None = None,
) -> Calibration:
    """Fits a calibration of the pooled prediction on data that was not trained on.

    The members' predictions are pooled first, and one map is fitted for the pooled prediction. For
    the temperature T and for the variance it is

        p(c | x) = softmax_c(log p(c | x) / T),    variance * scale

    Labels that are 0 or 1 share one temperature. Real targets have a scale each.

    Args:
        ensemble: Ensemble with an objective.
        state: State of the ensemble, or of some members.
        data: Held-out data: a dict of arrays with `inputs` and `labels`, an iterable of batches, or
            a source of `dist_ens.data` (its validation split).
        method: Map to fit: `temperature`, `vector` or `isotonic` for classes, `variance` for real
            targets with a predicted variance. Default: the first of these that the objective has.
            None fits no map.
        conformal: Method for conformal predictions: `lac`, `aps` or `raps` for sets of classes,
            `cqr` for intervals of real targets. Default: none. Each of several targets has its own
            intervals, or for labels that are 0 or 1 its own sets (`lac`), of that coverage.
        level: Coverage of the sets or intervals, in (0, 1). `calibration.at(level)` changes it.
        batch_size: Number of examples at a time. Default: that of `dist_ens.evaluate`.
        weights: Weights of the members in the pool, float[members], as for `Ensemble.predict`,
            which must get the same. Default: equal weights.

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
    if isinstance(data, Source):
        data = Examples(_required(data.valid), data.spec)
    require_state(state)
    given = examples_of(data, state.class_names)
    here, state = ensemble.at(state._replace(class_names=()))
    distribution = objective_of(here).distribution
    # A source that standardises targets is not known to `Ensemble.predict`, whose unit counts here.
    examples = Examples(scorable(here, given).split)
    if Objective.WEIGHTS in examples.split.take(np.zeros(1, np.int64)):
        raise UserError("The data has weights, which a calibration does not take. Leave them out.")
    evaluator, split = evaluator_of(here, state, examples, (), batch_size, weights)
    if method == _AUTO:
        method = next(iter(distribution.calibrations), None)
    if conformal is None and method is None:
        raise UserError(f"There is nothing to fit. Give conformal=, of {distribution.conformal}.")
    found = Calibration(predictor=predictor_of(evaluator, state))
    if method is not None:
        found = fit_map(method, evaluator, state, split)
    if conformal is not None:
        rule = fit_rule(conformal, level, evaluator, state, split)
        found = dataclasses.replace(found, conformal=rule, level=level)
    return found


def predictor_of(evaluator: Evaluator, state: State) -> Predictor:
    """Returns the predictor that an evaluator scores; all hosts must call this."""
    return Predictor.of(evaluator.ensemble, state, evaluator.left_out, evaluator.weights)


def fit_map(method: str, evaluator: Evaluator, state: State, split: Split | None) -> Calibration:
    """Fits a map of probabilities or variances on the validation split, with one group."""
    distribution = evaluator.distribution
    _require_fitting(method, distribution, distribution.calibrations)
    summary, labels = pooled_of(evaluator, state, _required(split))
    parameters, warnings = distribution.calibrate(method, summary, labels)
    return Calibration(
        predictor=predictor_of(evaluator, state),
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
    """Fits a conformal rule on the validation split, with an evaluator of one group.

    For cv+ and jackknife+ it is the training split, and `out_of_bag`, bool[members, examples], says
    which members were not trained on an example.
    """
    distribution = evaluator.distribution
    _require_fitting(method, distribution, distribution.conformal)
    split = _required(split)
    quantile_rank(len(split), level)
    scale = evaluator.zeros[0].tolist(), evaluator.units[0].tolist()
    if method in LEFT_OUT_BY:
        if out_of_bag is None:
            raise UserError(
                f"The conformal method {method!r} is one of dist-ens evaluate, for a run of "
                f"--config.data.examples={LEFT_OUT_BY[method]}."
            )
        pooled = np.setdiff1d(np.arange(len(out_of_bag)), evaluator.left_out)
        points, mask = held_out_means(evaluator, state, split)[pooled], out_of_bag[pooled]
        examples = {"out_of_bag": mask}
        if evaluator.weights is not None:
            examples["weights"] = evaluator.weights[pooled]
        means = out_of_bag_means(mask, points, examples.get("weights"))
        examples["residuals"] = np.abs(labels_of(split) - means)
        return ConformalRule(method, examples, *scale)
    summary, labels = pooled_of(evaluator, state, split)
    if method in SETS:
        probs, u = distribution.probabilities(summary), uniform_of_split(method, split)
        scores = _of_labels(class_scores(method, probs, u), labels)
        return ConformalRule(method, {"scores": np.sort(scores, axis=0)})
    return ConformalRule(method, {**summary, "labels": labels}, *scale)


def calibrated_scores(
    calibration: Calibration, evaluator: Evaluator, state: State, test: Split
) -> JsonDict:
    """Returns a map with its scores of the pooled prediction, and their `reliability`."""
    summary, labels = pooled_of(evaluator, state, test)
    method, parameters = calibration.method or "", calibration.parameters
    summary = dict(evaluator.distribution.calibrated(method, parameters, summary))
    slices = [slice(at, at + _AT_A_TIME) for at in range(0, len(test), _AT_A_TIME)]
    counts = np.ones(len(test), bool)
    parts = (({n: v[at] for n, v in summary.items()}, labels[at], counts[at]) for at in slices)
    scores, intervals, rows = scores_of_summaries(evaluator, parts)
    found: JsonDict = {
        "method": method,
        "parameters": dict(parameters),
        "warnings": [*calibration.warnings],
        "test": scores,
    }
    if intervals is not None:
        found["test_interval"] = intervals
    if "ece" in scores:
        bins = reliability_bins(rows["confidence"], rows["correct"])
        found["reliability"] = {name: values.tolist() for name, values in bins.items()}
    return found


def conformal_scores(
    rule: ConformalRule, level: float, evaluator: Evaluator, state: State, test: Split
) -> JsonDict:
    """Returns scores of conformal predictions, with intervals unless there are too many rows."""
    distribution = evaluator.distribution
    summary, labels = pooled_of(evaluator, state, test)
    if rule.method in SETS:
        u = uniform_of_split(rule.method, test)
        sets = rule.sets(distribution.probabilities(summary), u, level)
        covered, sizes, name = _of_labels(sets, labels), sets.sum(axis=-1), "mean_set_size"
    else:

        def points() -> np.ndarray:
            return np.delete(held_out_means(evaluator, state, test), evaluator.left_out, axis=0)

        low, high = rule.interval(distribution, summary, points, level)
        covered = (low <= labels) & (labels <= high)
        # The lower end of an empty interval is the larger one.
        sizes, name = np.maximum(high - low, 0) * evaluator.units[0], "mean_width"
    rows = {"coverage": covered, name: sizes}  # [examples], or [examples, targets].

    def scores(weights: np.ndarray | None) -> dict[str, Score]:
        of_examples = {n: values.reshape(len(test), -1).mean(axis=1) for n, values in rows.items()}
        return {n: mean_of(values, weights) for n, values in of_examples.items()}

    found: JsonDict = {"method": rule.method, "level": level, **scores(None)}
    if labels.ndim > 1:
        means = {n: values.mean(axis=0).tolist() for n, values in rows.items()}
        found["by_target"] = [
            {"target": number, **{n: values[number] for n, values in means.items()}}
            for number in range(labels.shape[1])
        ]
    draws = num_draws(len(test))
    if draws:
        drawn = scores(bootstrap_weights(len(test), draws, 0))
        found["interval"] = {name: interval(values) for name, values in drawn.items()}
    return found


def pooled_of(
    evaluator: Evaluator, state: State, split: Split
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns pooled predictions, [examples, ...], and labels of a split, in its unit."""
    if evaluator.ensemble.num_groups > 1:
        raise UserError("Only one group can be calibrated. Train on a table with one split.")
    targets = evaluator.distribution.num_targets
    labels = one_a_row(labels_of(split), (len(split), *([] if targets is None else [targets])))
    summary = {n: leaf[0] for n, leaf in evaluator.pooled_predictions(state, split).items()}
    if "log_probs" in summary:
        shape = summary["log_probs"].shape
        check_labels(evaluator.distribution, shape if targets is None else shape[:-1], labels)
        check_classes(labels, shape[-1])
    return summary, labels


def _of_labels(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the value of each label, [...], among those of all classes, [..., classes]."""
    return np.take_along_axis(values, labels.astype(np.int64)[..., None], axis=-1)[..., 0]


def uniform_of_split(method: str, split: Split) -> np.ndarray:
    """Returns the numbers of `uniform_of` for the examples of a split; zeros for lac."""
    if method == "lac":
        return np.zeros(len(split))
    return of_all(split, lambda batch: uniform_of(batch[Objective.INPUTS]))


def _require_fitting(method: str, distribution: Distribution, methods: tuple[str, ...]) -> None:
    if method not in methods:
        raise UserError(
            f"The method {method!r} does not fit {type(distribution).__name__} predictions, which "
            f"have {', '.join(methods) or 'none'}."
        )


def _required(split: Split | None) -> Split:
    if split is None:
        raise UserError(
            "Calibrations are fitted on validation data, and the run held none out. Train with "
            "--config.data.validation=0.1."
        )
    return split
