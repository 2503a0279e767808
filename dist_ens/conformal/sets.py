"""Sets of labels from the probabilities of a classifier."""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from dist_ens.conformal.quantile import conformal_quantile
from dist_ens.errors import UserError
from dist_ens.metrics import mean_of
from dist_ens.metrics.recalibration import check_labels


@dataclasses.dataclass(frozen=True)
class PredictionSets:
    """From probabilities, which labels cannot be excluded: those that score at most `quantile`.

    Attributes:
        quantile: Of the calibration examples' scores.
        num_classes: Of the probabilities.
        class_scores: From probabilities, float64[rows, classes], the score that each row would have
            with each class as its label, likewise.
    """

    quantile: float
    num_classes: int
    class_scores: Callable[[np.ndarray], np.ndarray]

    def __call__(self, probs: np.ndarray) -> np.ndarray:
        """Whether a class is in the set of a row; bool[rows, classes]. A set may be empty.

        Args:
            probs: Of the same model as at calibration; float[rows, classes].

        Raises:
            UserError: For another number of classes, or for what cannot be probabilities.
        """
        probs = _checked_probs(probs)
        if probs.shape[1] != self.num_classes:
            raise UserError(
                "Sets are of the classes that calibrated them. Received: probabilities of "
                f"{probs.shape[1]} classes, calibrated on {self.num_classes}. Calibrate again."
            )
        return self.class_scores(probs) <= self.quantile


def lac(probs: np.ndarray, labels: np.ndarray, level: float) -> PredictionSets:
    """Sets of least size on average: the classes whose probability exceeds one threshold.

        score(x, c) = 1 - p(c | x)

    Args:
        probs: Of calibration examples, calibrated or not; float[n, classes].
        labels: int[n], in [0, classes).
        level: In (0, 1).

    Returns:
        What makes the sets. Where the model is unsure of everything they are empty.

    Raises:
        UserError: For labels, probabilities or a level that cannot be, or too few examples.

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
    """Sets whose size follows the difficulty of the row: the likeliest classes up to a total.

        score(x, c) = sum of p(k | x) over the classes k likelier than c  +  u * p(c | x)

    with u uniform in [0, 1), one for each row. Through its randomness the coverage is exact; labels
    whose probability is exactly 0 share one score, which can only raise it.

    Args:
        probs: Of calibration examples, calibrated or not; float[n, classes].
        labels: int[n], in [0, classes).
        level: In (0, 1).
        generator: What u is drawn from, now and at each prediction: a later call with the same rows
            makes other sets, and the same calls after the same seed the same.

    Returns:
        What makes the sets. One may be empty where the model is sure.

    Raises:
        UserError: For labels, probabilities or a level that cannot be, or too few examples.

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
    penalty: float = 0.01,
    k_reg: int = 5,
) -> PredictionSets:
    """The sets of `aps`, kept small: every class after the first `k_reg` costs a penalty.

        score(x, c) = score of aps  +  penalty * max(rank of c - k_reg, 0),  the likeliest of rank 1

    Args:
        probs: Of calibration examples, calibrated or not; float[n, classes].
        labels: int[n], in [0, classes).
        level: In (0, 1).
        generator: What u is drawn from, as in `aps`.
        penalty: Lambda of the paper, at least 0; 0 is `aps`.
        k_reg: Classes without a penalty, at least 0; with all of them it is `aps`.

    Returns:
        What makes the sets. One may be empty where the model is sure.

    Raises:
        UserError: For labels, probabilities, a level, a penalty or a `k_reg` that cannot be, or too
            few examples.

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
            "A penalty and the number of classes without it are at least 0. Received: penalty="
            f"{penalty}, k_reg={k_reg}. Try penalty=0.01 and k_reg=5."
        )
    scores = functools.partial(_aps_scores, generator=generator, penalty=penalty, k_reg=k_reg)
    return _calibrated(scores, probs, labels, level)


def coverage_of_sets(
    sets: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> float | np.ndarray:
    """The share of rows whose set holds the label, in [0, 1].

    Args:
        sets: bool[rows, classes].
        labels: int[rows], in [0, classes).
        weights: How often each row is drawn; float[draws, rows]. None: once.

    Returns:
        A float, or float64[draws] with weights.

    Raises:
        UserError: If there are no rows, or arrays that do not fit together.

    >>> coverage_of_sets(np.array([[True, False], [True, True]]), np.array([1, 1]))
    0.5
    """
    sets = _checked_sets(sets)
    labels = check_labels(labels, *sets.shape)
    return mean_of(sets[np.arange(len(labels)), labels], weights)


def mean_set_size(sets: np.ndarray, weights: np.ndarray | None = None) -> float | np.ndarray:
    """The mean number of classes in a set, in [0, classes].

    Args:
        sets: bool[rows, classes].
        weights: As in `coverage_of_sets`.

    Returns:
        Likewise.

    Raises:
        UserError: If there are no rows, or for something other than sets.

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
    probs = _checked_probs(probs)
    num_rows, num_classes = probs.shape
    labels = check_labels(labels, num_rows, num_classes)
    scores = class_scores(probs)[np.arange(num_rows), labels]
    return PredictionSets(conformal_quantile(scores, level), num_classes, class_scores)


def _lac_scores(probs: np.ndarray) -> np.ndarray:
    return 1 - probs


def _aps_scores(
    probs: np.ndarray, generator: np.random.Generator, penalty: float, k_reg: int
) -> np.ndarray:
    order = np.argsort(-probs, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    uniform = generator.random((len(probs), 1))
    after_free = np.maximum(np.arange(1, probs.shape[1] + 1) - k_reg, 0)
    ranked_scores = np.cumsum(ranked, axis=1) - (1 - uniform) * ranked + penalty * after_free
    scores = np.empty_like(ranked_scores)
    np.put_along_axis(scores, order, ranked_scores, axis=1)
    return scores


def _checked_probs(probs: np.ndarray) -> np.ndarray:
    probs = np.asarray(probs, np.float64)
    # A sum of float16 or float32 may be a little above 1; logits are far outside.
    if probs.ndim != 2 or not ((probs >= 0) & (probs <= 1.01)).all():
        received = f"from {probs.min()} to {probs.max()}" if probs.size else "none"
        raise UserError(
            "Probabilities are float[rows, classes], in [0, 1]. Received: shape "
            f"{list(probs.shape)}, {received}. Give probabilities, not their logarithms."
        )
    return probs


def _checked_sets(sets: np.ndarray) -> np.ndarray:
    sets = np.asarray(sets)
    if sets.ndim != 2 or sets.dtype != bool or not len(sets):
        raise UserError(
            "Sets are bool[rows, classes], at least one row. Received: "
            f"{sets.dtype}{list(sets.shape)}. Give those that a call of PredictionSets makes."
        )
    return sets
