"""Recalibration of the pooled prediction on validation data.

The members' probabilities are averaged first, and one map is fitted on the mean. Averaging members
that were calibrated one by one would lose the calibration. A map is never fitted on test data.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize
from scipy.special import softmax

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import SomeArray

# The smallest normal float32. Lower probabilities are raised to this one before and after a map. So
# all logarithms are at least -87.34, and no calibrated probability is 0 in float32.
MIN_PROB = float(np.finfo(np.float32).tiny)
# Bounds of the temperature. Rows without errors have no lowest best temperature, and noise has no
# highest one.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# Sum over the rows of |probability - [label = c]| below which class c is separated from all others.
_SEPARATED = 1e-2
_LISTED = 10


@dataclasses.dataclass(frozen=True)
class Recalibration:
    """A map, fitted by a function of `RECALIBRATIONS`, to calibrated log-probabilities.

    The parameters are JSON values. The warnings are sentences about parameters that the validation
    rows do not determine: an optimum at a bound or at infinity, or a label of probability 0.
    """

    method: str
    parameters: JsonDict
    warnings: tuple[str, ...] = ()

    def __call__(self, log_probs: SomeArray) -> SomeArray:
        """Returns calibrated log-probabilities, finite and normalised; float[rows, classes].

        They are in float64 for arrays of NumPy, and in float32 for arrays of JAX.
        """
        calibrated = _MAPS[self.method](_normalised(log_probs), **self.parameters)
        return calibrated.__array_namespace__().maximum(calibrated, np.log(MIN_PROB))


def fit_temperature(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits one temperature for all classes, which keeps the order of the classes.

        p(c | x) = softmax_c(log_probs(x) / T),  T minimises the mean of -log p(label | x)

    The mean is convex in 1/T. T is limited to [`MIN_TEMPERATURE`, `MAX_TEMPERATURE`], and 1 if it
    changes nothing.

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599; of the pooled prediction: Rahaman
    and Thiery (2021), https://arxiv.org/abs/2007.08792.
    """
    warnings = _warnings_of_zeros(log_probs, labels)
    log_probs = _normalised(log_probs)
    gaps = log_probs - log_probs[np.arange(len(labels)), labels][:, None]

    def slope(inverse_temperature: float) -> float:
        return float((softmax(inverse_temperature * gaps, axis=1) * gaps).sum(axis=1).mean())

    if slope(1.0) == 0:  # The slope is 0 everywhere if all classes are equally probable.
        inverse = 1.0
    elif slope(1 / MIN_TEMPERATURE) <= 0:
        inverse = 1 / MIN_TEMPERATURE
    elif slope(1 / MAX_TEMPERATURE) >= 0:
        inverse = 1 / MAX_TEMPERATURE
    else:
        inverse = brentq(slope, 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)
    for bound, side, advice in (
        (MIN_TEMPERATURE, "below", "Use more validation rows, or the scores without calibration."),
        (MAX_TEMPERATURE, "above", "Check the labels of the validation rows, or train for longer."),
    ):
        if inverse == 1 / bound:
            warnings.append(
                f"The best temperature is {side} {bound:g}, the bound at which the fit stopped: "
                f"{_errors(log_probs, labels)}. {advice}"
            )
    return Recalibration("temperature", {"temperature": 1 / inverse}, tuple(warnings))


def fit_vector(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits a scale and a bias for each class, each of which must occur.

        p(c | x) = softmax_c(scale * log_probs(x) + bias)

    The mean of -log p(label | x) is convex. L-BFGS minimises it, starting from the fitted
    temperature. The biases are determined up to a constant, and sum to 0. The mean has no minimum
    if the rows can be separated without an error. The search then ends with slopes below 1e-9.

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599.
    """
    temperature = fit_temperature(log_probs, labels).parameters["temperature"]
    warnings = _warnings_of_zeros(log_probs, labels)
    log_probs = _normalised(log_probs)
    num_rows, num_classes = log_probs.shape
    _check_every_class_occurs(labels, num_classes)
    rows = np.arange(num_rows)

    def calibrated_and_excess(scale_and_bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        calibrated = _vector_map(log_probs, *np.split(scale_and_bias, 2))
        excess = np.exp(calibrated)
        excess[rows, labels] -= 1
        return calibrated, excess

    def nll_and_slope(scale_and_bias: np.ndarray) -> tuple[float, np.ndarray]:
        calibrated, excess = calibrated_and_excess(scale_and_bias)
        slopes = np.concatenate([(excess * log_probs).mean(axis=0), excess.mean(axis=0)])
        return -float(calibrated[rows, labels].mean()), slopes

    start = np.concatenate([np.full(num_classes, 1 / temperature), np.zeros(num_classes)])
    found = minimize(
        nll_and_slope,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 10_000, "maxfun": 20_000, "ftol": 1e-15, "gtol": 1e-9},
    )
    scale, bias = np.split(found.x, 2)
    calibrated, excess = calibrated_and_excess(found.x)
    # A class that is confused with another has a sum of about 1 or more, any other class nearly 0.
    separated = np.flatnonzero(np.abs(excess).sum(axis=0) < _SEPARATED).tolist()
    if separated and num_classes > 1:
        warnings.append(
            f"No finite scale and bias is best for {_classes(separated)}, which no validation row "
            f"is confused with: {_errors(calibrated, labels)}, and the fit stopped at scales up to "
            f"{np.abs(scale).max():.3g}. Use more validation rows, or fit a temperature, which is "
            "one number for all classes."
        )
    parameters = {"scale": scale.tolist(), "bias": bias.tolist()}
    return Recalibration("vector", parameters, tuple(warnings))


def fit_isotonic(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits an isotonic regression of [label = c] on the probability of class c, for each class c.

        p(c | x) = f_c(p_c(x)) / sum_k f_k(p_k(x)),  f_c increasing, linear between thresholds

    Rows for which all f are 0 get equal probabilities. An f is exactly 0 below the lowest
    probability with which its class occurred in validation. A test row of that class then costs 87
    nats. So the map needs many rows.

    Source: Zadrozny and Elkan (2002), "Transforming classifier scores into accurate multiclass
    probability estimates".
    """
    from sklearn.isotonic import IsotonicRegression  # Slow to import, and rarely needed.

    log_probs = _normalised(log_probs)
    _check_every_class_occurs(labels, log_probs.shape[1])
    fits = [
        IsotonicRegression().fit(probs, labels == c) for c, probs in enumerate(np.exp(log_probs).T)
    ]
    warnings = []
    steps = [c for c, fit in enumerate(fits) if {*fit.y_thresholds_.tolist()} == {0, 1}]
    if steps:
        warnings.append(
            f"The calibrated probability of {_classes(steps)} is a single step from 0 to 1: "
            f"{_errors(log_probs, labels)}, too few to fit more. A test row on the wrong side of "
            "the step costs 87 nats. Use more validation rows, or fit a temperature."
        )
    return Recalibration(
        "isotonic",
        {
            "thresholds": [fit.X_thresholds_.tolist() for fit in fits],
            "values": [fit.y_thresholds_.tolist() for fit in fits],
        },
        tuple(warnings),
    )


RECALIBRATIONS: dict[str, Callable[[np.ndarray, np.ndarray], Recalibration]] = {
    "temperature": fit_temperature,
    "vector": fit_vector,
    "isotonic": fit_isotonic,
}


def fit_variance_scale(
    means: np.ndarray, variances: np.ndarray, targets: np.ndarray, *, by_target: bool = False
) -> np.ndarray:
    """Fits the factor for all variances that minimises the mean of -log N(y; mean, scale variance).

        scale = mean((y - mean)^2 / variance)

    The result is float64[]. With `by_target` the last axis is one of targets, and each target has
    its own factor, float64[targets].

    Source: Laves et al. (2020), "Well-calibrated regression uncertainty in medical imaging with
    deep learning", https://proceedings.mlr.press/v121/laves20a.html.
    """
    means, variances, targets = (np.asarray(v, np.float64) for v in (means, variances, targets))
    axes = tuple(range(means.ndim - 1)) if by_target else None
    return np.asarray(np.mean(np.square(targets - means) / variances, axis=axes))


def _check_every_class_occurs(labels: np.ndarray, num_classes: int) -> None:
    """Raises a `UserError` if a class has no validation row."""
    absent = np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0).tolist()
    if absent:
        raise UserError(
            f"There are no validation rows of class {', '.join(map(str, absent))} among "
            f"{len(labels):,}, and this map is fitted for each class. Add such rows, or fit a "
            "temperature, which is one number for all classes."
        )


def _warnings_of_zeros(log_probs: np.ndarray, labels: np.ndarray) -> list[str]:
    """Returns a warning if labels have a probability that a fit raises to `MIN_PROB`."""
    of_label = np.asarray(log_probs)[np.arange(len(labels)), labels]
    count = np.count_nonzero(of_label < np.log(MIN_PROB))
    if not count:
        return []
    return [
        f"{count:,} of {len(labels):,} validation rows give their label a probability below "
        f"{MIN_PROB:.2g}, which the fit takes for {MIN_PROB:.2g} ({-np.log(MIN_PROB):.3g} nats). "
        "Pool the members as probs if they are pooled as votes, or fit isotonic functions, which "
        "hardly depend on that bound."
    ]


def _errors(log_probs: np.ndarray, labels: np.ndarray) -> str:
    of_label = log_probs[np.arange(len(labels)), labels]
    count = np.count_nonzero(log_probs.max(axis=1) > of_label)
    return f"{count:,} of {len(labels):,} validation rows are predicted wrongly"


def _classes(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:_LISTED]))
    more = f" and {len(numbers) - _LISTED:,} more" if len(numbers) > _LISTED else ""
    return f"class{'' if len(numbers) == 1 else 'es'} {listed}{more}"


def _normalised(log_probs: SomeArray) -> SomeArray:
    """Returns log-probabilities as float[rows, classes], finite and normalised."""
    xp = log_probs.__array_namespace__()
    return _log_softmax(xp.maximum(log_probs.astype(float), np.log(MIN_PROB)))


def _log_softmax(logits: SomeArray) -> SomeArray:
    """Returns the logarithm of the softmax of each row, for arrays of NumPy or of JAX."""
    xp = logits.__array_namespace__()
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))


def _vector_map(log_probs: SomeArray, scale: ArrayLike, bias: ArrayLike) -> SomeArray:
    return _log_softmax(np.asarray(scale)[None] * log_probs + np.asarray(bias)[None])


def _isotonic_map(
    log_probs: SomeArray, thresholds: list[list[float]], values: list[list[float]]
) -> SomeArray:
    xp = log_probs.__array_namespace__()
    columns = zip(xp.exp(log_probs).T, thresholds, values, strict=True)
    fitted = xp.stack([xp.interp(p, *map(np.array, line)) for p, *line in columns], axis=1)
    fitted = xp.where(fitted.sum(axis=1, keepdims=True) == 0, 1.0, fitted)
    return xp.log(xp.maximum(fitted / fitted.sum(axis=1, keepdims=True), MIN_PROB))


_MAPS: dict[str, Callable[..., np.ndarray]] = {
    "temperature": lambda log_probs, temperature: _log_softmax(log_probs / temperature),
    "vector": _vector_map,
    "isotonic": _isotonic_map,
}
