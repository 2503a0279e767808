"""Whether an ensemble's uncertainty can be trusted: recalibrated, and as conformal predictions."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dist_ens import conformal
from dist_ens.data import Spec, Split
from dist_ens.errors import UserError
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.out_of_bag import held_out_means
from dist_ens.evaluation.scores import num_draws
from dist_ens.metrics import bootstrap_weights, interval
from dist_ens.metrics.recalibration import RECALIBRATIONS, fit_variance_scale
from dist_ens.state import State

# Examples that are scored at a time: what they add class by class is larger than they are.
_AT_A_TIME = 1000
SETS: dict[str, Any] = {"lac": conformal.lac, "aps": conformal.aps, "raps": conformal.raps}


def recalibrated(
    method: str, evaluator: Evaluator, state: State, spec: Spec, valid: Split | None, test: Split
) -> dict[str, Any]:
    """Scores of the pooled prediction after a map that was fitted on validation data.

    Args:
        method: `temperature`, `vector` or `isotonic` of classes, `variance` of real targets.
        evaluator: Of the ensemble, of one group.
        state: Of the ensemble.
        spec: Of the data.
        valid: To fit the map on.
        test: To score it on.

    Returns:
        `method`, `parameters`, `warnings` (sentences on what the validation split does not
        determine), `test` and, of not too many rows, `test_interval`.

    Raises:
        UserError: If there is no validation split, or the method is not one for such labels.
    """
    warnings: tuple[str, ...] = ()
    told, labels = _told(evaluator, state, spec, valid, "A map that calibrates is fitted")
    at_test, test_labels = _told(evaluator, state, spec, test, "Scores are taken")
    says_variance = "variance" in told and evaluator.kind.has_spread
    if spec.num_classes is None and not says_variance:
        raise UserError(
            "Of real targets a predicted variance is calibrated. Received: members that say none. "
            "Train with --config.loss.name=gaussian_nll."
        )
    if (method == "variance") != says_variance:
        raise UserError(
            "Probabilities of classes are calibrated by temperature, vector or isotonic, a "
            f"predicted variance by variance. Received: {method!r} for {spec}. Choose another."
        )
    if method == "variance":
        scale = fit_variance_scale(told["mean"], told["variance"], labels)
        parameters: Mapping[str, Any] = {"scale": scale}
        at_test = {**at_test, "variance": at_test["variance"] * scale}
    else:
        log_probs, test_log_probs = told["log_probs"], at_test["log_probs"]
        num_classes = log_probs.shape[-1]
        recalibrate = RECALIBRATIONS[method](log_probs.reshape(-1, num_classes), labels.reshape(-1))
        parameters, warnings = recalibrate.parameters, recalibrate.warnings
        calibrated = recalibrate(test_log_probs.reshape(-1, num_classes))
        at_test = {"log_probs": calibrated.reshape(test_log_probs.shape)}
    scores, intervals = evaluator.scores_of(
        (
            {name: leaf[first : first + _AT_A_TIME] for name, leaf in at_test.items()},
            test_labels[first : first + _AT_A_TIME],
            None,
        )
        for first in range(0, len(test), _AT_A_TIME)
    )
    found = {"method": method, "parameters": parameters, "warnings": [*warnings], "test": scores}
    return found if intervals is None else found | {"test_interval": intervals}


def conformal_scores(
    method: str,
    level: float,
    evaluator: Evaluator,
    state: State,
    spec: Spec,
    splits: Mapping[str, Any],
    out_of_bag: np.ndarray | None,
) -> dict[str, Any]:
    """How conformal sets or intervals of the pooled prediction hold on the test split.

    Args:
        method: `lac`, `aps` or `raps`, sets of classes; `cqr`, intervals from quantiles or from a
            normal distribution's; `cv+` or `jackknife+`, intervals from members that left examples
            out.
        level: Coverage that is asked for, in (0, 1).
        evaluator: Of the ensemble, of one group.
        state: Of the ensemble.
        spec: Of the data.
        splits: `train`, `valid` (None where nothing was held out) and `test`.
        out_of_bag: Which training examples each member was not trained on, bool[members, examples];
            None: all were trained on all.

    Returns:
        `method`, `level`, `coverage` on the test split, `mean_set_size` or, in the targets' own
        unit, `mean_width`; and, of not too many rows, an `interval` of each of the two.

    Raises:
        UserError: If the method is not one for such labels or such a run.
    """
    of_sets = method in SETS
    if of_sets != (spec.num_classes is not None) or spec.label_shape:
        raise UserError(
            "Sets of classes are lac, aps or raps; intervals of real targets cqr, cv+ or "
            f"jackknife+. Received: {method!r} for {spec}. Choose another --conformal."
        )
    test = splits["test"]
    at_test, labels = _told(evaluator, state, spec, test, "Coverage is told")
    if of_sets:
        held, its_labels = _told(evaluator, state, spec, splits["valid"], _CALIBRATED)
        drawn = () if method == "lac" else (np.random.default_rng(0),)
        held_probs, probs = (np.exp(of["log_probs"].astype(np.float64)) for of in (held, at_test))
        sets = SETS[method](held_probs, its_labels, level, *drawn)(probs)
        return {"method": method, "level": level} | _with_intervals(
            lambda weights: {
                "coverage": conformal.coverage_of_sets(sets, labels, weights),
                "mean_set_size": conformal.mean_set_size(sets, weights),
            },
            len(test),
        )
    if method == "cqr":
        held, its_labels = _told(evaluator, state, spec, splits["valid"], _CALIBRATED)
        intervals = conformal.split_cqr(*evaluator.central_interval(held, level), its_labels, level)
        low, high = intervals(*evaluator.central_interval(at_test, level))
    else:
        train = splits["train"]
        if out_of_bag is None:
            raise UserError(
                "cv+ is of members that left a fold out, jackknife+ of members on bootstrap "
                f"samples. Received: {method} for other members. Train with "
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
    scores: Callable[[np.ndarray | None], dict[str, Any]], num_rows: int
) -> dict[str, Any]:
    """Scores, and under `interval` the ends of their 95 % intervals; none of too many rows."""
    found, draws = scores(None), num_draws(num_rows)
    if not draws:
        return found
    drawn = scores(bootstrap_weights(num_rows, draws, 0))
    return found | {"interval": {name: interval(values) for name, values in drawn.items()}}


_CALIBRATED = "Conformal predictions are calibrated"


def _told(
    evaluator: Evaluator, state: State, spec: Spec, split: Split | None, what: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the pooled predictions of a split of one group, and its labels, in one unit."""
    if spec.num_groups > 1:
        raise UserError(
            f"{what} on one group of members. Received: {spec.num_groups} groups. Train on a table "
            "with one split, one row in its train_idx and test_idx."
        )
    if split is None:
        raise UserError(
            f"{what} on validation data, never on test data. Received: a run that held none out. "
            "Train with --config.data.validation=0.1."
        )
    told = evaluator.pooled_predictions(state, split)
    labels = split.take(np.arange(len(split)))["labels"]
    return {name: values[0] for name, values in told.items()}, labels
