"""Scores of an ensemble on the examples of each class, and on each of several targets."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.ground.json_text import JsonDict
from dist_ens.losses import Categorical
from dist_ens.metrics import Rows, scores_of
from dist_ens.metrics.catalogue import EXACT_MATCH

if TYPE_CHECKING:
    from dist_ens.evaluation.scores import Evaluation

_OF_EACH_CLASS = ("accuracy", "nll", "brier")  # Scores that are means over the examples.
# Classes are unbalanced if the largest has this many times the examples of the smallest.
_UNBALANCED = 2


def by_class(evaluation: "Evaluation") -> list[JsonDict]:
    """Returns the ensemble's scores on the examples of each class; see `Scores.by_class`."""
    if not isinstance(evaluation.distribution, Categorical) or evaluation.distribution.num_targets:
        return []
    of_classes = _scores_of_classes(evaluation)
    [num_classes] = evaluation.group_classwise.shape[2:3] or [0]  # A subclass may have no sums.
    counts = np.bincount(evaluation.labels[0], minlength=num_classes)
    is_unbalanced = counts.max() >= _UNBALANCED * counts.min() and evaluation.rows_per_example == 1
    if not (evaluation.class_names or of_classes or is_unbalanced):
        return []
    means = [metric for metric in evaluation.metrics if metric.name in _OF_EACH_CLASS]
    found: list[JsonDict] = []
    for number, count in enumerate(counts.tolist()):
        name = evaluation.class_names[number] if evaluation.class_names else number
        scored: JsonDict = {"class": name, "examples": count}
        if count:
            of_class = evaluation.labels[0] == number
            values = {n: rows[0][of_class] for n, rows in evaluation.groups.items()}
            weights = None if evaluation.weights is None else evaluation.weights[of_class]
            scored |= scores_of(means, Rows(values, weights=weights))
            if "accuracy" in scored:
                scored["recall"] = scored["accuracy"]
        found.append(scored | _at(of_classes, number))
    return found


def by_target(evaluation: "Evaluation") -> list[JsonDict]:
    """Returns the ensemble's scores on each of several targets."""
    if evaluation.distribution.num_targets is None:
        return []
    of_classes, rows = _scores_of_classes(evaluation), evaluation.rows_of(evaluation.groups, 0)
    means = [m for m in evaluation.metrics if m.by_class is None and m is not EXACT_MATCH]
    return [
        {"target": target, **scores_of(means, each), **_at(of_classes, target)}
        for target, each in enumerate(rows.targets)
    ]


def _scores_of_classes(evaluation: "Evaluation") -> dict[str, np.ndarray]:
    """Returns the scores of each class of the metrics that are their means, by name."""
    rows = evaluation.rows_of(evaluation.groups, 0)
    if not evaluation.is_sound:
        return {}
    return {
        metric.by_class[0]: np.asarray(metric.by_class[1](rows))
        for metric in evaluation.metrics
        if metric.by_class is not None and all(name in rows for name in metric.statistics)
    }


def _at(scores: Mapping[str, np.ndarray], number: int) -> dict[str, float]:
    """Returns the scores of one class that has some, by name."""
    return {
        name: float(each[number])
        for name, each in scores.items()
        if number < len(each) and not np.isnan(each[number])
    }
