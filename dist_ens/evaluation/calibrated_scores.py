"""Scores of calibrated and conformal predictions on a test split."""

import numpy as np

from dist_ens.data import Split
from dist_ens.evaluation.calibration import Calibration
from dist_ens.evaluation.conformal_rule import SETS, ConformalRule
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.fit_calibration import pooled_of, uniform_of_split
from dist_ens.evaluation.out_of_bag import Part, held_out_means, scores_of_summaries
from dist_ens.evaluation.row_scores import num_draws
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Score
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.metrics.calibration_error import reliability_bins

# Number of examples that are scored at a time. Their statistics of each class need much memory.
_AT_A_TIME = 1000


def calibrated_scores(
    calibration: Calibration, evaluator: Evaluator, state: State, test: Split
) -> JsonDict:
    """Returns the scores of the pooled prediction after a map of probabilities or variances.

    The map's `method`, `parameters` and `warnings` are included, and for classes the `reliability`.
    """
    summary, labels = pooled_of(evaluator, state, test)
    method, parameters = calibration.method or "", calibration.parameters
    summary = dict(evaluator.distribution.calibrated(method, parameters, summary))
    parts: list[Part] = [
        (
            {name: leaf[first : first + _AT_A_TIME] for name, leaf in summary.items()},
            labels[first : first + _AT_A_TIME],
            None,
        )
        for first in range(0, len(test), _AT_A_TIME)
    ]
    scores, intervals = scores_of_summaries(evaluator, parts)
    found: JsonDict = {
        "method": method,
        "parameters": dict(parameters),
        "warnings": [*calibration.warnings],
        "test": scores,
    }
    if intervals is not None:
        found["test_interval"] = intervals
    if "ece" in scores:
        rows = [evaluator.values_of(*part)[0] for part in parts]
        confidence, correct = (
            np.concatenate([of[name] for of in rows]) for name in ("confidence", "correct")
        )
        bins = reliability_bins(confidence, correct)
        found["reliability"] = {name: values.tolist() for name, values in bins.items()}
    return found


def conformal_scores(
    rule: ConformalRule, level: float, evaluator: Evaluator, state: State, test: Split
) -> JsonDict:
    """Returns the scores of conformal sets or intervals, with `interval`s of these scores.

    The score `mean_width` is in the targets' own unit. Too many rows have no `interval`.
    """
    distribution = evaluator.distribution
    summary, labels = pooled_of(evaluator, state, test)
    if rule.method in SETS:
        u = uniform_of_split(rule.method, test)
        sets = rule.sets(distribution.probabilities(summary), u, level)
        covered, sizes = sets[np.arange(len(labels)), labels], sets.sum(axis=1)
        name, unit = "mean_set_size", 1.0
    else:

        def points() -> np.ndarray:
            return np.delete(held_out_means(evaluator, state, test), evaluator.left_out, axis=0)

        low, high = rule.interval(distribution, summary, points, level)
        covered = (low <= labels) & (labels <= high)
        sizes = np.maximum(high - low, 0)  # The lower end of an empty interval is the larger one.
        name, unit = "mean_width", evaluator.units[0]

    def scores(weights: np.ndarray | None) -> dict[str, Score]:
        return {"coverage": mean_of(covered, weights), name: mean_of(sizes, weights) * unit}

    found: JsonDict = {"method": rule.method, "level": level, **scores(None)}
    draws = num_draws(len(test))
    if draws:
        drawn = scores(bootstrap_weights(len(test), draws, 0))
        found["interval"] = {name: interval(values) for name, values in drawn.items()}
    return found
