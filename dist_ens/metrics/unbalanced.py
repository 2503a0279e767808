"""Scores of each class, of which unbalanced classes have the mean.

`labels` and `predictions` are classes, int[rows]. `weights` are the number of times that each row
counts in each resample, float[draws, rows]; by default every row counts once. Scores are
float64[classes], or float64[draws, classes] with weights, and NaN for a class without a score.
"""

import numpy as np

from dist_ens.ground.types import Score
from dist_ens.metrics.ranking import detection_scores


def recalls(
    labels: np.ndarray, correct: np.ndarray, num_classes: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Computes the recall of each class: the mean of `correct` over the rows of the class.

    A class without rows has no score. The mean of the others is the balanced accuracy.

    >>> recalls(np.array([0, 0, 1]), np.array([1.0, 0.0, 1.0]), num_classes=3)
    array([0.5, 1. , nan])

    Source: Brodersen et al. (2010), "The balanced accuracy and its posterior distribution".
    """
    return _divided(
        _sums(labels, correct, num_classes, weights), _sums(labels, None, num_classes, weights)
    )


def f1_scores(
    labels: np.ndarray, predictions: np.ndarray, num_classes: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Computes the F1 score of each class, the harmonic mean of its precision and its recall.

        f1_c = 2 hits_c / (rows of class c + rows predicted as c)

    A class that is neither a label nor a prediction has no score.

    >>> f1_scores(np.array([0, 0, 1]), np.array([0, 1, 1]), num_classes=2).round(4)
    array([0.6667, 0.6667])
    """
    hits = (labels == predictions).astype(np.float64)
    either = [_sums(each, None, num_classes, weights) for each in (labels, predictions)]
    return _divided(2 * _sums(labels, hits, num_classes, weights), either[0] + either[1])


def ranking_score(
    name: str, probs: np.ndarray, is_class: np.ndarray, weights: np.ndarray | None = None
) -> Score:
    """Computes how well the probability of one class ranks its rows before the others.

    Args:
        name: "auroc", or "aupr", the average precision; see `detection_scores`. A class without
            rows has no score. A class that has all rows has no AUROC, and average precision 1.
        probs: Probability of the class, float[rows].
        is_class: Whether a row is of the class, bool[rows].
        weights: See above.

    >>> ranking_score("auroc", np.array([0.9, 0.5, 0.2]), np.array([True, False, True]))
    0.5
    """
    if is_class.any() and not is_class.all():
        drawn = [None if weights is None else weights[:, each] for each in (~is_class, is_class)]
        return detection_scores(probs[~is_class], probs[is_class], *drawn)[name]
    value = 1.0 if is_class.any() and name == "aupr" else np.nan
    return value if weights is None else np.full(len(weights), value)


def _sums(
    classes: np.ndarray, values: np.ndarray | None, num_classes: int, weights: np.ndarray | None
) -> np.ndarray:
    """Returns the sums of the rows' values, 1 by default, over the rows of each class."""
    if weights is None:
        return np.bincount(classes, values, num_classes).astype(np.float64)
    of_draws = weights if values is None else weights * values
    return np.stack([np.bincount(classes, each, num_classes) for each in of_draws])


def _divided(sums: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.divide(sums, numbers, out=np.full(sums.shape, np.nan), where=numbers > 0)
