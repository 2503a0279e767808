"""The catalogue of metrics, with the properties that reports read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.json_text import Json
from dist_ens.ground.types import Score
from dist_ens.metrics.calibration_error import (
    adaptive_calibration_error,
    classwise_calibration_error,
    drawn_classwise_errors,
    expected_calibration_error,
)
from dist_ens.metrics.metric import (
    CLASSWISE,
    WHOLE_WEIGHTS,
    Metric,
    Reduction,
    Rows,
    ScoresOfClasses,
    in_own_unit,
)
from dist_ens.metrics.ranking import area_under_risk_coverage, risk_at_coverage
from dist_ens.metrics.resampling import mean_of
from dist_ens.metrics.unbalanced import f1_scores, ranking_score, recalls

# Name of the score of an ensemble whose loss is a function and not an objective.
LOSS = "loss"
# Probability of the central intervals whose coverage and width are scored.
INTERVAL_LEVEL = 0.9


def _nll(name: str) -> Reduction:
    return lambda rows: in_own_unit("log density", rows.mean(name), rows.unit)


def _root(name: str) -> Reduction:
    return lambda rows: np.sqrt(rows.mean(name)) * rows.unit


def _calibration(error: Callable[..., Score]) -> Reduction:
    def reduce(rows: Rows) -> Score:
        confidence, correct = (rows.statistics[name] for name in _TOP)
        return rows.ordered(
            lambda: rows.of_weights(lambda weights: error(confidence, correct, weights))
        )

    return reduce


def _classwise(rows: Rows) -> Score:
    sums = np.asarray(rows.classwise)

    def error() -> Score:
        if rows.num_draws is not None:
            return drawn_classwise_errors(sums, rows.num_draws, rows.seed)
        return classwise_calibration_error(*sums[:3])

    return rows.ordered(error)


def _risk(risk: Callable[..., Score], *level: float) -> Reduction:
    def reduce(rows: Rows) -> Score:
        confidence, errors = rows.statistics["confidence"], 1 - rows.statistics["correct"]
        return rows.ordered(
            lambda: rows.of_weights(lambda weights: risk(confidence, errors, *level, weights))
        )

    return reduce


def _coverage_of_pit(rows: Rows) -> Score:
    pit = rows.statistics["pit"]
    inside = np.where(np.isnan(pit), np.nan, np.abs(pit - 0.5) <= INTERVAL_LEVEL / 2)
    return rows.of_weights(lambda weights: mean_of(inside, weights))


def _spread_skill(rows: Rows) -> Score:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(rows.mean("variance")) / np.sqrt(rows.mean("squared_error"))


def _classes(rows: Rows, name: str) -> np.ndarray:
    return rows.statistics[name].astype(np.int64)


def _recalls(rows: Rows) -> Score:
    labels, correct = _classes(rows, "label"), rows.statistics["correct"]
    count = int(labels.max()) + 1
    return rows.of_weights(lambda weights: recalls(labels, correct, count, weights))


def _f1_scores(rows: Rows, num_classes: int | None = None) -> Score:
    labels, predictions = _classes(rows, "label"), _classes(rows, "prediction")
    count = num_classes or int(max(labels.max(), predictions.max())) + 1
    return rows.of_weights(lambda weights: f1_scores(labels, predictions, count, weights))


def _f1_of_labels(rows: Rows) -> Score:
    return np.stack([np.asarray(_f1_scores(each, 2))[..., 1] for each in rows.targets], axis=-1)


def _ranking_of_classes(score: str, name: str) -> ScoresOfClasses:
    def of_classes(rows: Rows) -> Score:
        labels, found = _classes(rows, "label"), list[Score]()
        while f"{name}_{len(found)}" in rows:
            probs = rows.statistics[f"{name}_{len(found)}"]
            is_class = np.equal(labels, len(found))
            found.append(rows.of_weights(partial(ranking_score, score, probs, is_class)))
        return np.stack(found, axis=-1)

    return of_classes


def _ranking_of_labels(score: str) -> ScoresOfClasses:
    def of_labels(rows: Rows) -> Score:
        found = []
        for each in rows.targets:
            probs, is_one = each.statistics["prob"], each.statistics["label"] == 1
            found.append(each.of_weights(partial(ranking_score, score, probs, is_one)))
        return np.stack(found, axis=-1)

    return of_labels


def _probabilities(prediction: Mapping[str, jax.Array], labels: jax.Array) -> jax.Array:
    return jnp.exp(prediction["log_probs"])


_TOP = ("confidence", "correct")
_SQUARED = ("squared_error",)
_lower = partial(Metric, direction="lower")
_higher = partial(Metric, direction="higher")
_apart = partial(Metric, in_table=False)
_lower_apart = partial(_lower, in_table=False)
_calibration_error = partial(_lower, statistics=_TOP, interval="unbiased")

_RANKINGS = (("auroc", "AUROC", "auroc"), ("average_precision", "", "aupr"))

ACCURACY = Metric("accuracy", direction="higher", statistics=("correct",))
EXACT_MATCH = _higher("exact_match")
BRIER = _lower("brier", label="Brier")
AUROC, AVERAGE_PRECISION = (
    _higher(
        name,
        label=label,
        statistics=("prob", "label", "confidence"),
        by_class=(name, _ranking_of_labels(score)),
    )
    for name, label, score in _RANKINGS
)
NLL = _lower("nll", label="NLL", unit="nats", reduce=_nll("nll"))
ECE = _calibration_error("ece", label="ECE", reduce=_calibration(expected_calibration_error))
MUTUAL_INFORMATION = _apart("mutual_information", unit="nats")
RMSE = _lower("rmse", label="RMSE", unit="target", statistics=_SQUARED, reduce=_root(*_SQUARED))
MAE = _lower("mae", label="MAE", unit="target", statistics=("absolute_error",))
PINBALL = _lower("pinball", unit="target")

# Metrics of class probabilities, and of how far members differ in them. A row with a tied label
# counts as partly correct, so ece, aece, aurc and risk_at_80 are expectations over random ties.
CLASSIFICATION: tuple[Metric, ...] = (
    ACCURACY,
    NLL,
    BRIER,
    ECE,
    _apart("top_5", label="top-5 accuracy", direction="higher"),
    _calibration_error(
        "aece",
        label="adaptive ECE",
        reduce=_calibration(adaptive_calibration_error),
        in_table=False,
    ),
    _calibration_error(
        "classwise_ece",
        label="classwise ECE",
        reduce=_classwise,
        statistics=(*_TOP, CLASSWISE),
        in_table=False,
    ),
    _lower_apart(
        "aurc",
        label="AURC",
        statistics=(*_TOP, WHOLE_WEIGHTS),
        reduce=_risk(area_under_risk_coverage),
    ),
    _lower_apart(
        "risk_at_80", label="risk at 80 %", statistics=_TOP, reduce=_risk(risk_at_coverage, 0.8)
    ),
    _apart("entropy", unit="nats"),
    _apart("aleatoric", unit="nats"),
    MUTUAL_INFORMATION,
    _apart("disagreement"),
    _apart("variance"),
)

# Metrics of unbalanced classes, which are computed if they are named. The last two need the
# probability of every class of every row on the host.
UNBALANCED: tuple[Metric, ...] = (
    _higher("balanced_accuracy", statistics=(*_TOP, "label"), by_class=("recall", _recalls)),
    _higher(
        "macro_f1",
        label="macro F1",
        statistics=("prediction", "label", "confidence"),
        by_class=("f1", _f1_scores),
    ),
    *(
        _higher(
            name,
            _probabilities,
            label=label,
            statistics=(f"{name}_0", "label", "confidence"),
            by_class=(name, _ranking_of_classes(score, name)),
        )
        for name, label, score in _RANKINGS
    ),
)

# Metrics of several labels of an example that are 0 or 1.
MULTILABEL: tuple[Metric, ...] = (
    EXACT_MATCH,
    NLL,
    BRIER,
    ECE,
    _higher(
        "macro_f1",
        label="macro F1",
        statistics=("prediction", "label", "confidence"),
        by_class=("f1", _f1_of_labels),
    ),
    AVERAGE_PRECISION,
    _apart("entropy", unit="nats"),
    _apart("aleatoric", unit="nats"),
    MUTUAL_INFORMATION,
    _apart("disagreement"),
    _apart("variance"),
)
MULTILABEL_OPTIONAL: tuple[Metric, ...] = (AUROC,)

# Metrics of predictions of real targets.
REGRESSION: tuple[Metric, ...] = (
    RMSE,
    MAE,
    NLL,
    _lower_apart("mixture_nll", label="mixture NLL", unit="nats", reduce=_nll("mixture_nll")),
    _lower("crps", label="CRPS", unit="target"),
    PINBALL,
    Metric("coverage", statistics=("pit",), reduce=_coverage_of_pit),
    Metric("coverage", statistics=("inside",)),
    _apart("width", unit="target"),
    _apart("sharpness", unit="target", statistics=("variance",), reduce=_root("variance")),
    _apart("spread_skill", statistics=("variance", *_SQUARED), reduce=_spread_skill),
)

# All metrics by name, in the order of the columns on the screen.
CATALOGUE: dict[str, Metric] = {
    metric.name: metric for metric in (EXACT_MATCH, *CLASSIFICATION, *UNBALANCED, *REGRESSION)
}
# Metrics that summarise a run, the most important one first.
HEADLINES = (ACCURACY, EXACT_MATCH, RMSE, NLL, PINBALL, MAE)
# Metrics that compare an ensemble with its mean member, and whose training curves are drawn.
COMPARED = (ACCURACY, RMSE, NLL)
# Metrics of ensembles of 1, 2, … members.
BY_SIZE = (NLL, ACCURACY, RMSE)
# Metrics that the report draws over the strength of a shift.
UNDER_SHIFT = (ACCURACY, NLL, ECE, RMSE, MUTUAL_INFORMATION)


# Measures of uncertainty that detect examples out of distribution: name, row statistic, and 1 if a
# measure is higher out of distribution, or -1 if lower.
UNCERTAINTIES = (
    ("entropy", "entropy", 1),
    ("max_probability", "confidence", -1),
    ("mutual_information", "mutual_information", 1),
    ("energy", "energy", 1),
    ("variance", "variance", 1),
    ("width", "width", 1),
)

# Fields of single examples in the report, and their units as `in_own_unit` takes them.
EXAMPLE_FIELDS: dict[str, str] = {
    "label": "position",
    "prediction": "position",
    "confidence": "",
    "nll": "log density",
    "entropy": "nats",
    "mutual_information": "nats",
    "variance": "target^2",
}


def headlines(scores: Iterable[str]) -> list[Metric]:
    """Returns the metrics among `scores` that summarise a run, the most important one first."""
    names = set(scores)
    return [metric for metric in HEADLINES if metric.name in names]


def described(name: str, others: Mapping[str, Json]) -> tuple[str, str | None]:
    """Returns the label and the direction of a metric, or of one described in `others`."""
    if name in CATALOGUE:
        return CATALOGUE[name].label, CATALOGUE[name].direction
    other = others.get(name, {})
    return other.get("label", name.replace("_", " ")), other.get("direction")


def direction_of(name: str, metrics: Sequence[Metric] = ()) -> str | None:
    """Returns whether a "lower" or a "higher" score is better; None if that is not known."""
    own = {metric.name: metric.describe() for metric in metrics}
    return "lower" if name == LOSS else described(name, own)[1]


def label_of(name: str) -> str:
    """Returns the label of a metric, or its name with spaces if it is not in the catalogue.

    >>> label_of("nll"), label_of("my_metric")
    ('NLL', 'my metric')
    """
    return described(name, {})[0]


def has_unit(scores: Iterable[str]) -> bool:
    """Returns whether a metric of the catalogue among `scores` has the targets' unit."""
    return any(name in CATALOGUE and CATALOGUE[name].unit == "target" for name in scores)


def formatted(scores: Mapping[str, float], name: str) -> str:
    """Returns the score of a name as text.

    It has four decimals, or four significant digits if one of `scores` has the targets' unit.

    >>> formatted({"nll": 0.25}, "nll"), formatted({"rmse": 123.456, "nll": 0.25}, "rmse")
    ('0.2500', '123.5')
    """
    return f"{scores[name]:{'.4g' if has_unit(scores) else '.4f'}}"


def in_table(scores: Iterable[str], metrics: Sequence[Metric] = ()) -> list[str]:
    """Returns the names of the scores that the table on the screen shows, in its order."""
    names = list(scores)
    columns = {metric.name: metric for metric in metrics} | CATALOGUE
    shown = [name for name in names if name not in columns or columns[name].in_table]
    known = [name for name in CATALOGUE if name in shown]
    return [*known, *(name for name in shown if name not in CATALOGUE)]
