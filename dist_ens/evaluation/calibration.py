"""Scores of recalibrated and conformal predictions of an ensemble on a test split."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dist_ens import conformal
from dist_ens.data import Spec, Split
from dist_ens.errors import UserError
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.out_of_bag import held_out_means
from dist_ens.evaluation.row_scores import num_draws
from dist_ens.json_text import JsonDict
from dist_ens.metrics import bootstrap_weights, interval
from dist_ens.state import State
from dist_ens.types import Score

# Number of examples that are scored at a time. Their statistics of each class need much memory.
_AT_A_TIME = 1000
SETS: dict[str, Callable[..., conformal.PredictionSets]] = {
    "lac": conformal.lac,
    "aps": conformal.aps,
    "raps": conformal.raps,
}


def recalibrated(
    method: str, evaluator: Evaluator, state: State, spec: Spec, valid: Split | None, test: Split
) -> JsonDict:
    """Scores the pooled prediction after recalibration on validation data.

    Args:
        method: One of the distribution's `calibrations`, such as `temperature` or `variance`.
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        spec: Description of the data.
        valid: Validation split, on which the map is fitted. None if the run held out no examples.
        test: Test split, on which the calibrated prediction is scored.

    Returns:
        `method`, `parameters`, `warnings` (sentences about parameters that the validation split
        does not determine), `test` and, unless there are too many rows, `test_interval`.

    Raises:
        UserError: If there is no validation split, or the method does not fit the predictions.
    """
    distribution = evaluator.distribution
    if method not in distribution.calibrations:
        fitting = ", ".join(distribution.calibrations)
        way_out = (
            f"Choose one of {fitting}."
            if fitting
            else "Train with a loss that predicts a variance, --config.loss.name=gaussian_nll."
        )
        raise UserError(
            f"The calibration {method!r} does not fit {type(distribution).__name__} predictions of "
            f"{spec}. {way_out}"
        )
    held, labels = _summary(evaluator, state, spec, valid, "A calibration map is fitted")
    at_test, test_labels = _summary(evaluator, state, spec, test, "Scores are taken")
    fitted = distribution.calibrate(method, held, labels)
    at_test = fitted.apply(at_test)
    scores, intervals = evaluator.scores_of(
        (
            {name: leaf[first : first + _AT_A_TIME] for name, leaf in at_test.items()},
            test_labels[first : first + _AT_A_TIME],
            None,
        )
        for first in range(0, len(test), _AT_A_TIME)
    )
    found = {
        "method": method,
        "parameters": fitted.parameters,
        "warnings": [*fitted.warnings],
        "test": scores,
    }
    return found if intervals is None else found | {"test_interval": intervals}


def conformal_scores(
    method: str,
    level: float,
    evaluator: Evaluator,
    state: State,
    spec: Spec,
    splits: Mapping[str, Any],
    out_of_bag: np.ndarray | None,
) -> JsonDict:
    """Scores conformal sets or intervals of the pooled prediction on the test split.

    Args:
        method: One of the distribution's `conformal`. `lac`, `aps` and `raps` make sets of classes.
            `cqr` makes intervals from quantiles or from normal distributions. `cv+` and
            `jackknife+` make intervals from members that left examples out.
        level: Requested coverage, in (0, 1).
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        spec: Description of the data.
        splits: Splits `train`, `valid` and `test`. `valid` is None if no examples were held out.
        out_of_bag: Whether a member was not trained on an example; bool[members, examples]. None if
            all members were trained on all examples.

    Returns:
        `method`, `level`, `coverage` on the test split, and `mean_set_size` or, in the targets' own
        unit, `mean_width`. Unless there are too many rows, also an `interval` of the two scores.

    Raises:
        UserError: If the method does not fit the predictions or the run.
    """
    distribution = evaluator.distribution
    if method not in distribution.conformal or spec.label_shape:
        fitting = ", ".join(distribution.conformal)
        way_out = (
            f"Choose --conformal from {fitting}."
            if fitting and not spec.label_shape
            else "Leave --conformal out."
        )
        raise UserError(
            f"--conformal={method} does not fit {type(distribution).__name__} predictions of "
            f"{spec}. {way_out}"
        )
    test = splits["test"]
    at_test, labels = _summary(evaluator, state, spec, test, "Coverage is computed")
    if method in SETS:
        held, its_labels = _summary(evaluator, state, spec, splits["valid"], _CALIBRATED)
        drawn = () if method == "lac" else (np.random.default_rng(0),)
        held_probs, probs = (distribution.probabilities(of) for of in (held, at_test))
        sets = SETS[method](held_probs, its_labels, level, *drawn)(probs)
        return {"method": method, "level": level} | _with_intervals(
            lambda weights: {
                "coverage": conformal.coverage_of_sets(sets, labels, weights),
                "mean_set_size": conformal.mean_set_size(sets, weights),
            },
            len(test),
        )
    if method == "cqr":
        held, its_labels = _summary(evaluator, state, spec, splits["valid"], _CALIBRATED)
        ends = distribution.central_interval(held, level)
        intervals = conformal.split_cqr(*ends, its_labels, level)
        low, high = intervals(*distribution.central_interval(at_test, level))
    else:
        train = splits["train"]
        if out_of_bag is None:
            raise UserError(
                f"--conformal={method} needs members that were trained on "
                f"{'folds' if method == 'cv+' else 'bootstrap samples'}. Train with "
                f"--config.data.examples={'kfold' if method == 'cv+' else 'bootstrap'}."
            )
        at_train = held_out_means(evaluator, state, train)
        at_test_too = held_out_means(evaluator, state, test)
        its_labels = train.take(np.arange(len(train)))["labels"]
        residuals = np.abs(its_labels - conformal.out_of_bag_means(out_of_bag, at_train))
        low, high = conformal.jackknife_plus(residuals, out_of_bag, at_test_too, level)
    return {"method": method, "level": level} | _with_intervals(
        lambda weights: {
            "coverage": conformal.coverage_of_intervals(low, high, labels, weights),
            "mean_width": conformal.mean_width(low, high, weights) * evaluator.units[0],
        },
        len(test),
    )


def _with_intervals(
    scores: Callable[[np.ndarray | None], dict[str, Score]], num_rows: int
) -> JsonDict:
    """Returns scores and, unless there are too many rows, their 95 % intervals as `interval`."""
    found, draws = scores(None), num_draws(num_rows)
    if not draws:
        return found
    drawn = scores(bootstrap_weights(num_rows, draws, 0))
    return found | {"interval": {name: interval(values) for name, values in drawn.items()}}


_CALIBRATED = "Conformal predictions are calibrated"


def _summary(
    evaluator: Evaluator, state: State, spec: Spec, split: Split | None, what: str
) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    """Returns the summary of the pooled predictions of a split of one group, and its labels.

    Args:
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        spec: Description of the data.
        split: Split; None if the run held out no examples.
        what: Purpose of the split, which begins a sentence of an error message.

    Raises:
        UserError: If there are several groups, or no split.
    """
    if spec.num_groups > 1:
        raise UserError(
            f"{what} on one group of members, and the ensemble has {spec.num_groups}. Train on a "
            "table with one split, one row in its train_idx and test_idx."
        )
    if split is None:
        raise UserError(
            f"{what} on validation data, and the run held none out. Train with "
            "--config.data.validation=0.1."
        )
    summary = evaluator.pooled_predictions(state, split)
    labels = split.take(np.arange(len(split)))["labels"]
    return {name: values[0] for name, values in summary.items()}, labels
