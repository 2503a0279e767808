"""The curves and examples that a report draws, as plain numbers that JSON can hold."""

from collections.abc import Callable, Mapping

import numpy as np

from dist_ens.data import Split
from dist_ens.evaluation.scores import Evaluation
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.metrics.calibration_error import reliability_bins
from dist_ens.metrics.catalogue import EXAMPLE_FIELDS
from dist_ens.metrics.metric import in_own_unit
from dist_ens.metrics.ranking import risk_coverage_curve

_EXAMPLES = 12  # Number of the hardest examples, and of the most uncertain ones.
_MOST_PAIRED = 100  # Largest number of members whose pairs are compared.
_PIT_BINS = 20
_LEVELS = np.linspace(0.05, 0.95, 19)
# Statistics that order the predictions of real targets, with their units. The first that exists is
# used.
_DOUBTS = {"variance": "target^2", "width": "target"}


def curves_of(evaluation: Evaluation) -> JsonDict:
    """Returns the curves of the pooled prediction, and of the members taken together, by name.

    The `hardest` examples have the largest errors; one whose class is predicted rightly is never
    among them. `disagreement` of a pair is the share of rows with different classes, or the root
    mean square of the difference. The result is empty if a pooled prediction is NaN. Rows have
    equal weights.
    """
    if not evaluation.is_sound:
        return {}
    both = {"ensemble": evaluation.groups, "mean_member": evaluation.pooled_members}
    flat = {who: {n: rows.ravel() for n, rows in values.items()} for who, values in both.items()}
    curves: JsonDict = {"score_against_members": evaluation.score_against_members()}
    if {"confidence", "correct"} <= evaluation.groups.keys():
        curves["reliability"] = {who: _reliability(values) for who, values in flat.items()}
        curves["risk_coverage"] = _risk_coverage(
            {who: (v["confidence"], 1 - v["correct"]) for who, v in flat.items()}, "error rate"
        )
    else:
        curves |= _risks_of_targets(evaluation, both)
    if "pit" in evaluation.groups:
        coverages = {who: _coverages(values["pit"]) for who, values in flat.items()}
        curves["coverage_curve"] = {"nominal": _LEVELS.tolist(), **coverages}
        counts = np.histogram(flat["ensemble"]["pit"], _PIT_BINS, (0, 1))[0]
        curves["pit"] = {"ensemble": counts.tolist()}
    if evaluation.num_groups == 1 and "prediction" in evaluation.members:
        curves |= _disagreement(evaluation)
    if evaluation.num_groups == evaluation.rows_per_example == 1:
        curves |= _single_examples(evaluation)
    return curves


def pictures_of(
    evaluation: Evaluation, split: Split, curves: Mapping[str, Json]
) -> list[np.ndarray]:
    """Returns the inputs of the examples in the curves, or nothing if they are not pictures."""
    shown = [each["index"] for n in ("hardest", "most_uncertain") for each in curves.get(n, [])]
    if not shown:
        return []
    inputs = split.take(np.array(shown, np.int64))["inputs"]
    is_picture = inputs.ndim == 3 or (inputs.ndim == 4 and inputs.shape[-1] in (1, 3))
    return list(inputs) if is_picture else []


def _reliability(values: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    bins = reliability_bins(values["confidence"], values["correct"])
    return {name: of_bins.tolist() for name, of_bins in bins.items()}


def _coverages(pit: np.ndarray) -> list[float]:
    distance = 2 * np.abs(pit - 0.5)
    return [float((distance <= level).mean()) for level in _LEVELS]


def _single_examples(evaluation: Evaluation) -> JsonDict:
    values = {name: rows[0] for name, rows in evaluation.groups.items()}
    distribution = evaluation.distribution
    hardest = _highest_first(values[distribution.error_statistic])
    if "correct" in values:
        hardest = hardest[values["correct"][hardest] == 0]
    found = {"hardest": _examples(evaluation, hardest)}
    if distribution.uncertainty_statistic in values:
        order = _highest_first(values[distribution.uncertainty_statistic])
        found["most_uncertain"] = _examples(evaluation, order)
    return found


def _risks_of_targets(
    evaluation: Evaluation, both: Mapping[str, Mapping[str, np.ndarray]]
) -> JsonDict:
    """Returns the RMSE of the most certain predictions, over the share of predictions."""
    ranked: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if evaluation.num_targets > 1:  # Errors of targets in different units have no mean.
        return {}
    for who, values in both.items():
        name = next((name for name in _DOUBTS if name in values), None)
        if name is None or "squared_error" not in values:
            continue
        doubt = values[name]
        # Rows [members or groups]; a member's group is its position modulo their number.
        units = np.resize(evaluation.units, len(doubt))[:, None]
        squares = values["squared_error"] * units**2
        if np.isfinite(squares).all() and not np.isnan(doubt).any():
            doubt = in_own_unit(_DOUBTS[name], doubt, units)
            ranked[who] = (-doubt.ravel(), squares.ravel())
    if "ensemble" not in ranked:
        return {}
    return {"risk_coverage": _risk_coverage(ranked, "RMSE", np.sqrt)}


def _risk_coverage(
    ranked: Mapping[str, tuple[np.ndarray, np.ndarray]],
    score: str,
    of_risk: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> JsonDict:
    """Returns the risk-coverage curve of each predictor, from its confidences and errors."""
    curves = {who: risk_coverage_curve(*pair) for who, pair in ranked.items()}
    return {
        "coverage": curves["ensemble"][0].tolist(),
        **{who: of_risk(risk).tolist() for who, (_, risk) in curves.items()},
        "score": score,
    }


def _disagreement(evaluation: Evaluation) -> JsonDict:
    """Returns the `disagreement` of every pair of some members, and their `member_id`."""
    member_ids = evaluation.member_ids[evaluation.is_pooled]
    if len(member_ids) == 1:
        return {}
    count = min(len(member_ids), _MOST_PAIRED)
    paired = np.linspace(0, len(member_ids) - 1, count).round().astype(int)
    predictions = evaluation.pooled_members["prediction"][paired].astype(np.float64)
    if evaluation.num_targets > 1 and "correct" not in evaluation.members:
        return {}
    if "correct" in evaluation.members:
        found = [(predictions != one).mean(axis=1).tolist() for one in predictions]
    else:
        unit = float(evaluation.units.ravel()[0])
        found = [
            (np.sqrt(np.square(predictions - one).mean(axis=1)) * unit).tolist()
            for one in predictions
        ]
    return {"disagreement": found, "member_id": member_ids[paired].tolist()}


def _highest_first(values: np.ndarray) -> np.ndarray:
    """Returns the positions of values in descending order, int[rows]; NaN is the highest."""
    return np.argsort(-np.nan_to_num(values, nan=np.inf), kind="stable")


def _examples(evaluation: Evaluation, order: np.ndarray) -> list[dict[str, float | str]]:
    """Returns the first rows in an order, with targets in their unit and names of classes."""
    unit, zero = (float(each.ravel()[0]) for each in (evaluation.units, evaluation.zeros))
    rows = {"label": evaluation.labels[0]}
    rows |= {name: each[0] for name, each in evaluation.groups.items() if name in EXAMPLE_FIELDS}
    names = evaluation.class_names
    return [
        {
            "index": int(evaluation.example_of_row[at]),
            **{
                name: names[int(rows[name][at])]
                if names and of == "position"
                else in_own_unit(of, float(rows[name][at]), unit, zero)
                for name, of in EXAMPLE_FIELDS.items()
                if name in rows
            },
        }
        for at in order[:_EXAMPLES]
    ]
