"""Recalibration: pool the members, then calibrate the pooled prediction on validation data.

The members' probabilities are averaged first, and one map is fitted on the mean: members that were
each calibrated are no longer calibrated when averaged. A map is never fitted on test data.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import log_softmax, softmax

from dist_ens.errors import UserError

# The smallest normal float32. Lower probabilities, 0 too, count as this one, before a map and after
# it: all logarithms are finite, at least -87.34, and none calibrated is 0 in float32.
MIN_PROB = float(np.finfo(np.float32).tiny)
# Where no temperature is best: rows without an error ask for ever lower ones, noise for higher.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# Sum over the rows of |probability - [label = c]| below which class c is separated from all others.
_SEPARATED = 1e-2
_LIMIT_REACHED = 1  # the status of scipy's L-BFGS at its limit of iterations or evaluations
_LISTED = 10


@dataclasses.dataclass(frozen=True)
class Recalibration:
    """A map from log-probabilities to calibrated ones.

    `Recalibration(method, parameters)` makes the same map again from JSON.

    Attributes:
        method: A name in `RECALIBRATIONS`.
        parameters: Numbers and lists of numbers: of temperature `temperature`, of vector `scale`
            and `bias` by class, of isotonic `thresholds` and `values`, a list of each by class.
        warnings: Sentences that say where the validation rows leave the parameters undetermined: an
            optimum that lies at a bound or at infinity, or a label of probability 0.
    """

    method: str
    parameters: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def __call__(self, log_probs: np.ndarray) -> np.ndarray:
        """Returns calibrated log-probabilities, in nats; float64[rows, classes].

        They are finite and normalised.

        Args:
            log_probs: Of the ensemble, in nats, -inf for a probability of 0; float[rows, classes].

        Raises:
            UserError: For other classes than in the fit, NaN, or numbers above 0.
        """
        log_probs = _checked(log_probs)
        fitted = {len(v) for v in self.parameters.values() if isinstance(v, list)}
        if fitted - {log_probs.shape[1]}:
            raise UserError(
                "A map calibrates the classes that it was fitted on. Received: "
                f"{log_probs.shape[1]} classes, fitted on {fitted.pop()}. Fit it on predictions of "
                "these classes."
            )
        return np.maximum(_MAPS[self.method](log_probs, **self.parameters), np.log(MIN_PROB))


def fit_temperature(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits one temperature for all classes, which changes no prediction's order of classes.

        p(c | x) = softmax_c(log_probs(x) / T),  T minimises the mean of -log p(label | x)

    The mean is convex in 1/T: its slope has one zero, which is found. Rows without an error have
    none, nor have predictions no better than chance: T is then `MIN_TEMPERATURE` or
    `MAX_TEMPERATURE`, and 1 where T changes nothing. The map's `warnings` say so.

    Args:
        log_probs: Of the ensemble on validation data, in nats, -inf for 0; float[rows, classes].
        labels: int[rows], in [0, classes).

    Returns:
        The map; its parameter `temperature` is above 1 where predictions were overconfident.

    Raises:
        UserError: If there are no rows, or labels or log-probabilities that cannot be.

    >>> log_probs = np.log([[0.9, 0.1]] * 4)  # 90 % sure, and right 3 times of 4
    >>> recalibration = fit_temperature(log_probs, np.array([0, 0, 0, 1]))
    >>> round(recalibration.parameters["temperature"], 6)
    2.0
    >>> np.exp(recalibration(log_probs[:1])).round(6)
    array([[0.75, 0.25]])

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599; of the pooled prediction: Rahaman
    and Thiery (2021), https://arxiv.org/abs/2007.08792.
    """
    given = log_probs
    log_probs, labels = _validation(given, labels)
    gaps = log_probs - log_probs[np.arange(len(labels)), labels][:, None]

    def slope(inverse_temperature: float) -> float:
        return float((softmax(inverse_temperature * gaps, axis=1) * gaps).sum(axis=1).mean())

    if slope(1.0) == 0:  # as it is everywhere if all classes are equally likely in all rows
        inverse = 1.0
    elif slope(1 / MIN_TEMPERATURE) <= 0:
        inverse = 1 / MIN_TEMPERATURE
    elif slope(1 / MAX_TEMPERATURE) >= 0:
        inverse = 1 / MAX_TEMPERATURE
    else:
        inverse = brentq(slope, 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)
    warnings = _warnings_of_zeros(given, labels)
    errors = _errors(log_probs, labels)
    if inverse == 1 / MIN_TEMPERATURE:
        warnings.append(
            f"The best temperature is below {MIN_TEMPERATURE:g}, the bound at which the fit "
            f"stopped: {errors}. Use more validation rows, or the scores without calibration."
        )
    if inverse == 1 / MAX_TEMPERATURE:
        warnings.append(
            f"The best temperature is above {MAX_TEMPERATURE:g}, the bound at which the fit "
            f"stopped: {errors}. Check the labels of the validation rows, or train for longer."
        )
    if log_probs.shape[1] > 1 and not gaps.any():
        warnings.append(
            f"No temperature changes the predictions: all {len(labels):,} validation rows give "
            "every class the same probability. Train for longer."
        )
    return Recalibration("temperature", {"temperature": 1 / inverse}, tuple(warnings))


def fit_vector(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits a scale and a bias for each class.

        p(c | x) = softmax_c(scale * log_probs(x) + bias)

    minimises the mean of -log p(label | x), which is convex, by L-BFGS from the fitted temperature.
    Biases are determined but for a constant, and sum to 0, as the slopes along them do. Rows that
    can be separated without an error have no minimum: the search ends where slopes are below 1e-9,
    and the map's `warnings` say so.

    Args:
        log_probs: Of the ensemble on validation data, in nats, -inf for 0; float[rows, classes].
        labels: int[rows], in [0, classes), each class at least once.

    Returns:
        The map, with parameters `scale` and `bias`, each a list by class.

    Raises:
        UserError: If there are no rows, a class without a row, or labels or log-probabilities that
            cannot be.

    >>> log_probs = np.log([[0.5, 0.5], [0.8, 0.2], [0.2, 0.8]] * 4)
    >>> labels = np.array([0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1])  # of class 0: 3, 3 and 1 of 4
    >>> np.exp(fit_vector(log_probs, labels)(log_probs[:3])).round(3)
    array([[0.75, 0.25],
           [0.75, 0.25],
           [0.25, 0.75]])

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599.
    """
    temperature = fit_temperature(log_probs, labels).parameters["temperature"]
    given = log_probs
    log_probs, labels = _validation(given, labels)
    num_rows, num_classes = log_probs.shape
    _check_every_class_occurs(labels, num_classes)
    rows = np.arange(num_rows)

    def nll_and_slope(scale_and_bias: np.ndarray) -> tuple[float, np.ndarray]:
        scale, bias = np.split(scale_and_bias, 2)
        calibrated = log_softmax(scale * log_probs + bias, axis=1)
        excess = np.exp(calibrated)
        excess[rows, labels] -= 1
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
    warnings = _warnings_of_zeros(given, labels)
    calibrated = log_softmax(scale * log_probs + bias, axis=1)
    excess = np.exp(calibrated)
    excess[rows, labels] -= 1
    # A class that some row is confused with has a sum of about 1 or more, any other nearly 0.
    separated = np.flatnonzero(np.abs(excess).sum(axis=0) < _SEPARATED).tolist()
    if separated and num_classes > 1:
        warnings.append(
            f"No finite scale and bias is best for {_classes(separated)}, which no validation row "
            f"is confused with: {_errors(calibrated, labels)}, and the fit stopped at scales up to "
            f"{np.abs(scale).max():.3g}. Use more validation rows, or fit a temperature, which is "
            "one number for all classes."
        )
    if found.status == _LIMIT_REACHED:
        warnings.append(
            f"The fit stopped after {found.nit:,} iterations, before the best scales and biases "
            f"were found: {_errors(calibrated, labels)}. Fit a temperature, which is one number "
            "for all classes."
        )
    parameters = {"scale": scale.tolist(), "bias": bias.tolist()}
    return Recalibration("vector", parameters, tuple(warnings))


def fit_isotonic(log_probs: np.ndarray, labels: np.ndarray) -> Recalibration:
    """Fits for each class the rising function of its probability with the least squared error.

        p(c | x) = f_c(p_c(x)) / sum_k f_k(p_k(x)),  f_c fitted to [label = c], linear between steps

    Rows for which all f are 0 are given equal probabilities. An f is exactly 0 below the lowest
    probability with which its class occurred in validation; a test row of that class then costs
    87 nats, so judge it by accuracy, Brier score and calibration error, and fit it on many rows.
    The map's `warnings` name the classes whose f is a single step from 0 to 1.

    Args:
        log_probs: Of the ensemble on validation data, in nats, -inf for 0; float[rows, classes].
        labels: int[rows], in [0, classes), each class at least once.

    Returns:
        The map, with parameters `thresholds` and `values`, each a list of lists by class.

    Raises:
        UserError: If there are no rows, a class without a row, or labels or log-probabilities that
            cannot be.

    >>> log_probs = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]])
    >>> recalibration = fit_isotonic(log_probs, np.array([0, 1, 0, 1]))
    >>> np.exp(recalibration(log_probs)).round(6)  # 0.8 and 0.7 were in the wrong order: 1 of 2
    array([[1. , 0. ],
           [0.5, 0.5],
           [0.5, 0.5],
           [0. , 1. ]])

    Source: Zadrozny and Elkan (2002), "Transforming classifier scores into accurate multiclass
    probability estimates".
    """
    from sklearn.isotonic import IsotonicRegression  # takes long to import, and is seldom needed

    log_probs, labels = _validation(log_probs, labels)
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


def fit_variance_scale(means: np.ndarray, variances: np.ndarray, targets: np.ndarray) -> float:
    """Fits the factor on all variances with which normal distributions match real targets best.

        scale = mean((y - mean)^2 / variance)

    minimises the mean of -log N(y; mean, scale * variance).

    Args:
        means: Of the ensemble on validation data, in the targets' unit; float[rows].
        variances: Likewise, in its square, positive; float[rows].
        targets: float[rows].

    Returns:
        The factor, above 1 where predictions were overconfident; multiply test variances by it.

    Raises:
        UserError: If there are no rows, or not equally many, a variance that is not positive, or a
            factor of 0 or one that is not finite.

    >>> fit_variance_scale(np.array([0.0, 0.0]), np.array([1.0, 4.0]), np.array([3.0, 2.0]))
    5.0

    Source: Laves et al. (2020), "Well-calibrated regression uncertainty in medical imaging with
    deep learning", https://proceedings.mlr.press/v121/laves20a.html.
    """
    means, variances, targets = (np.asarray(v, np.float64) for v in (means, variances, targets))
    if targets.ndim != 1 or not targets.shape == means.shape == variances.shape or not targets.size:
        raise UserError(
            "Means, variances and targets are float[rows], at least one row, of the same rows. "
            f"Received: shapes {list(means.shape)}, {list(variances.shape)} and "
            f"{list(targets.shape)}. Give those of all validation rows."
        )
    if not (variances > 0).all():
        raise UserError(
            f"A variance is positive. Received: {np.count_nonzero(~(variances > 0)):,} of "
            f"{len(variances):,} that are not. Give variances, not their logarithms."
        )
    scale = float(np.mean(np.square(targets - means) / variances))
    if not 0 < scale < np.inf:
        raise UserError(
            "The factor on the variance is positive and finite. Received: mean((y - mean)^2 / "
            f"variance) = {scale}. Give finite numbers, and validation targets that were not "
            "trained on."
        )
    return scale


def check_labels(labels: np.ndarray, num_rows: int, num_classes: int) -> np.ndarray:
    """Returns labels, int[num_rows], if they fit the number of rows and of classes.

    Args:
        labels: int[num_rows], in [0, num_classes).
        num_rows: Of the predictions.
        num_classes: Likewise.

    Raises:
        UserError: If they are not, or if there are none.
    """
    labels = np.asarray(labels)
    if labels.shape != (num_rows,) or labels.dtype.kind not in "iu" or not num_rows:
        raise UserError(
            f"The labels are {labels.dtype}{list(labels.shape)} for {num_rows:,} rows of "
            "predictions. Give the index of each row's class, int[rows], and at least one row."
        )
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise UserError(
            f"Label {outside[0]} is not in [0, {num_classes}), the classes of the predictions. "
            "Leave such rows out, or predict its class."
        )
    return labels


def _check_every_class_occurs(labels: np.ndarray, num_classes: int) -> None:
    absent = np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0).tolist()
    if absent:
        raise UserError(
            "What is fitted for each class needs validation rows of each. Received: none of class "
            f"{', '.join(map(str, absent))} among {len(labels):,}. Add such rows, or fit a "
            "temperature, which is for all classes."
        )


def _warnings_of_zeros(log_probs: np.ndarray, labels: np.ndarray) -> list[str]:
    """Returns a warning if labels have a probability that a fit raises to `MIN_PROB`.

    Args:
        log_probs: Log-probabilities as they were given, checked; float[rows, classes].
        labels: Classes, checked; int[rows].
    """
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
    """Returns how many rows are predicted wrongly, in words."""
    of_label = log_probs[np.arange(len(labels)), labels]
    count = np.count_nonzero(log_probs.max(axis=1) > of_label)
    return f"{count:,} of {len(labels):,} validation rows are predicted wrongly"


def _classes(numbers: list[int]) -> str:
    """Returns the classes in words, the first few of many."""
    listed = ", ".join(map(str, numbers[:_LISTED]))
    more = f" and {len(numbers) - _LISTED:,} more" if len(numbers) > _LISTED else ""
    return f"class{'' if len(numbers) == 1 else 'es'} {listed}{more}"


def _validation(log_probs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    log_probs = _checked(log_probs)
    return log_probs, check_labels(labels, *log_probs.shape)


def _checked(log_probs: np.ndarray) -> np.ndarray:
    """Log-probabilities as float64[rows, classes], finite and normalised."""
    log_probs = np.asarray(log_probs, np.float64)
    # What float16 makes of the logarithm of 1 may be a little above 0; probabilities are far above.
    if log_probs.ndim != 2 or not log_probs.shape[1] or not (log_probs <= 0.01).all():
        most = log_probs.max() if log_probs.size else "nothing"  # NaN if one is
        raise UserError(
            "Log-probabilities are float[rows, classes], at most 0 and never NaN. Received: shape "
            f"{list(log_probs.shape)}, the largest {most}. Give the logarithms of the "
            "ensemble's probabilities."
        )
    return log_softmax(np.maximum(log_probs, np.log(MIN_PROB)), axis=1)


def _temperature_map(log_probs: np.ndarray, temperature: float) -> np.ndarray:
    return log_softmax(log_probs / temperature, axis=1)


def _vector_map(log_probs: np.ndarray, scale: list[float], bias: list[float]) -> np.ndarray:
    return log_softmax(np.asarray(scale) * log_probs + np.asarray(bias), axis=1)


def _isotonic_map(
    log_probs: np.ndarray, thresholds: list[list[float]], values: list[list[float]]
) -> np.ndarray:
    columns = zip(np.exp(log_probs).T, thresholds, values, strict=True)
    fitted = np.stack([np.interp(*column) for column in columns], axis=1)
    fitted[fitted.sum(axis=1) == 0] = 1.0
    return np.log(np.maximum(fitted / fitted.sum(axis=1, keepdims=True), MIN_PROB))


_MAPS: dict[str, Callable[..., np.ndarray]] = {
    "temperature": _temperature_map,
    "vector": _vector_map,
    "isotonic": _isotonic_map,
}
