"""Sets of labels from the probabilities of a classifier."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dist_ens.conformal.quantile import conformal_quantile
from dist_ens.errors import UserError, counted
from dist_ens.metrics import mean_of
from dist_ens.metrics.recalibration import check_labels

# Penalty and number of classes without it, by default.
_RAPS_OPTIONS = (0.01, 5)


@dataclasses.dataclass(frozen=True)
class PredictionSets:
    """A map from probabilities to sets: the classes whose score is at most `quantile`.

    Attributes:
        quantile: Conformal quantile of the calibration examples' scores.
        num_classes: Number of classes.
        class_scores: Function from probabilities to the score of each class as the label of each
            row; float64[rows, classes] both.
    """

    quantile: float
    num_classes: int
    class_scores: Callable[[np.ndarray], np.ndarray]

    def __call__(self, probs: np.ndarray) -> np.ndarray:
        """Returns whether a class is in the set of a row; bool[rows, classes].

        A set may be empty.

        Args:
            probs: Class probabilities of the model that was calibrated; float[rows, classes].

        Raises:
            UserError: If the number of classes is not that of the calibration, or a probability is
                not in [0, 1].
        """
        probs = _checked_probs(probs)
        if probs.shape[1] != self.num_classes:
            raise UserError(
                f"The probabilities have {counted(probs.shape[1], 'class')}, and the sets were "
                f"calibrated on {self.num_classes}. Calibrate again on predictions of these "
                "classes."
            )
        return self.class_scores(probs) <= self.quantile


def lac(probs: np.ndarray, labels: np.ndarray, level: float) -> PredictionSets:
    """Calibrates least ambiguous sets (LAC): the classes whose probability reaches a threshold.

        score(x, c) = 1 - p(c | x)

    These sets have the smallest mean size.

    Args:
        probs: Class probabilities of the calibration examples, recalibrated or not;
            float[n, classes].
        labels: Labels of the calibration examples; int[n], in [0, classes).
        level: Requested coverage, in (0, 1).

    Returns:
        The map from probabilities to sets. A set is empty if no class reaches the threshold.

    Raises:
        UserError: If a label is not in [0, classes), a probability is not in [0, 1], `level` is not
            in (0, 1), the lengths differ, or there are too few examples.

    >>> probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])  # labels 0 score 0.1, 0.2 and 0.6
    >>> sets = lac(probs, np.array([0, 0, 0]), level=0.5)
    >>> sets(np.array([[0.85, 0.15], [0.6, 0.4]]))
    array([[ True, False],
           [False, False]])

    Source: Sadinle et al. (2019), https://arxiv.org/abs/1609.00451.
    """
    return _calibrated(_lac_scores, probs, labels, level)


def aps(
    probs: np.ndarray, labels: np.ndarray, level: float, generator: np.random.Generator
) -> PredictionSets:
    """Calibrates adaptive prediction sets (APS): the most probable classes up to a total.

        score(x, c) = sum of p(k | x) over the classes k more probable than c  +  u * p(c | x)

    Harder rows have larger sets. The number u is uniform in [0, 1), one for each row. This
    randomness makes the coverage exact. Labels of probability exactly 0 share one score, which can
    only raise the coverage.

    Args:
        probs: Class probabilities of the calibration examples, recalibrated or not;
            float[n, classes].
        labels: Labels of the calibration examples; int[n], in [0, classes).
        level: Requested coverage, in (0, 1).
        generator: Generator of u, for the calibration and for each later prediction. A second
            prediction of the same rows therefore gives other sets. The same sequence of calls after
            the same seed gives the same sets.

    Returns:
        The map from probabilities to sets. A set can be empty if the model is confident.

    Raises:
        UserError: If a label is not in [0, classes), a probability is not in [0, 1], `level` is not
            in (0, 1), the lengths differ, or there are too few examples.

    >>> probs = np.array([[0.6, 0.3, 0.1]] * 10)
    >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
    >>> sets = aps(probs, labels, 0.8, np.random.default_rng(0))
    >>> sets(np.array([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]]))
    array([[ True, False, False],
           [ True,  True,  True]])

    Source: Romano et al. (2020), https://arxiv.org/abs/2006.02544.
    """
    return raps(probs, labels, level, generator, penalty=0.0)


def raps(
    probs: np.ndarray,
    labels: np.ndarray,
    level: float,
    generator: np.random.Generator,
    *,
    penalty: float = _RAPS_OPTIONS[0],
    k_reg: int = _RAPS_OPTIONS[1],
) -> PredictionSets:
    """Calibrates regularised adaptive prediction sets (RAPS), smaller than those of `aps`.

        score(x, c) = score of aps  +  penalty * max(rank of c - k_reg, 0)

    The most probable class has rank 1.

    Args:
        probs: Class probabilities of the calibration examples, recalibrated or not;
            float[n, classes].
        labels: Labels of the calibration examples; int[n], in [0, classes).
        level: Requested coverage, in (0, 1).
        generator: Generator of u, for the calibration and for each later prediction; see `aps`.
        penalty: Penalty of each class after the first `k_reg`, lambda in the paper; at least 0. 0
            gives the sets of `aps`.
        k_reg: Number of classes without a penalty, at least 0.

    Returns:
        The map from probabilities to sets. A set can be empty if the model is confident.

    Raises:
        UserError: If `penalty` or `k_reg` is negative, `level` is not in (0, 1), or there are too
            few examples; if a label is not in [0, classes), a probability is not in [0, 1], or the
            lengths differ.

    >>> probs = np.array([[0.6, 0.3, 0.1]] * 10)
    >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
    >>> sets = raps(probs, labels, 0.8, np.random.default_rng(0), penalty=1.0, k_reg=1)
    >>> sets(np.array([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]]))
    array([[ True, False, False],
           [ True,  True, False]])

    Source: Angelopoulos et al. (2021), https://arxiv.org/abs/2009.14193.
    """
    if not 0 <= penalty < math.inf or k_reg < 0:
        raise UserError(
            f"penalty={penalty}, k_reg={k_reg} are not both finite and at least 0. Try "
            "penalty=0.01 and k_reg=5."
        )

    def scores(probs: np.ndarray) -> np.ndarray:
        return _aps_scores(probs, generator.random(len(probs)), penalty, k_reg)

    return _calibrated(scores, probs, labels, level)


def class_scores(method: str, probs: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Computes the score of each class as the label of each row, for a rule that is stored.

    Args:
        method: "lac", "aps" or "raps", with the default values of their options.
        probs: Class probabilities; float[rows, classes].
        uniform: Number u of each row, in [0, 1], for aps and raps; float[rows].

    Returns:
        Nonconformity scores, float64[rows, classes]. A class is in the set of a row if its score is
        at most the `conformal_quantile` of the calibration labels' scores.

    Raises:
        UserError: If a probability is not in [0, 1].

    >>> class_scores("aps", np.array([[0.75, 0.25]]), uniform=np.array([0.5]))  # 0.75 / 2 first
    array([[0.375, 0.875]])
    """
    probs = _checked_probs(probs)
    if method == "lac":
        return _lac_scores(probs)
    penalty, k_reg = _RAPS_OPTIONS if method == "raps" else (0.0, 0)
    return _aps_scores(probs, uniform, penalty, k_reg)


def coverage_of_sets(
    sets: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """Computes the fraction of rows whose set contains the label.

        coverage = mean of [label in set]

    Args:
        sets: Whether a class is in the set of a row; bool[rows, classes].
        labels: Labels; int[rows], in [0, classes).
        weights: Number of times each row is drawn in each resample; float[draws, rows]. Default:
            every row counts once.

    Returns:
        Coverage in [0, 1]: a float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, the lengths differ, or a label is not in [0, classes).

    >>> coverage_of_sets(np.array([[True, False], [True, True]]), np.array([1, 1]))
    0.5
    """
    sets = _checked_sets(sets)
    labels = check_labels(labels, *sets.shape)
    return mean_of(sets[np.arange(len(labels)), labels], weights)


def mean_set_size(sets: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """Computes the mean number of classes in a set.

    Args:
        sets: Whether a class is in the set of a row; bool[rows, classes].
        weights: Number of times each row is drawn in each resample; float[draws, rows]. Default:
            every row counts once.

    Returns:
        Mean size in [0, classes]: a float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, or `sets` is not bool[rows, classes].

    >>> mean_set_size(np.array([[True, False], [True, True]]))
    1.5
    """
    return mean_of(_checked_sets(sets).sum(axis=1), weights)


def _calibrated(
    class_scores: Callable[[np.ndarray], np.ndarray],
    probs: np.ndarray,
    labels: np.ndarray,
    level: float,
) -> PredictionSets:
    """Returns the map to sets whose quantile is that of the labels' scores."""
    probs = _checked_probs(probs)
    num_rows, num_classes = probs.shape
    labels = check_labels(labels, num_rows, num_classes)
    scores = class_scores(probs)[np.arange(num_rows), labels]
    return PredictionSets(conformal_quantile(scores, level), num_classes, class_scores)


def _lac_scores(probs: np.ndarray) -> np.ndarray:
    """Returns the score of each class in `lac`; float64[rows, classes]."""
    return 1 - probs


def _aps_scores(probs: np.ndarray, uniform: np.ndarray, penalty: float, k_reg: int) -> np.ndarray:
    """Returns the score of each class in `raps`; float64[rows, classes]."""
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    after_free = np.maximum(np.arange(1, probs.shape[1] + 1) - k_reg, 0)
    drawn_part = (1 - uniform[:, None]) * ranked
    ranked_scores = np.cumsum(ranked, axis=1) - drawn_part + penalty * after_free
    scores = np.empty_like(ranked_scores)
    np.put_along_axis(scores, order, ranked_scores, axis=1)
    return scores


def _checked_probs(probs: np.ndarray) -> np.ndarray:
    """Returns probabilities as float64[rows, classes]; raises if they are invalid."""
    probs = np.asarray(probs, np.float64)
    # A probability in float16 or float32 may be a little above 1. Logits are far outside.
    if probs.ndim != 2 or not ((probs >= 0) & (probs <= 1.01)).all():
        found = f"lie from {probs.min()} to {probs.max()}" if probs.size else "hold no number"
        raise UserError(
            f"The probabilities have the shape {list(probs.shape)} and {found}. Give "
            "float[rows, classes] in [0, 1], and not logits or logarithms."
        )
    return probs


def _checked_sets(sets: np.ndarray) -> np.ndarray:
    """Returns sets as bool[rows, classes]; raises if they are something else."""
    sets = np.asarray(sets)
    if sets.ndim != 2 or sets.dtype != bool or not len(sets):
        raise UserError(
            f"The sets are {sets.dtype}{list(sets.shape)}, and must be bool[rows, classes] with at "
            "least one row. Give the result of a call of PredictionSets."
        )
    return sets
