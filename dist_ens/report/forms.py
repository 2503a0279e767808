"""The forms of what a report reads back: a file in another form is refused before it is drawn."""

from collections.abc import Callable, Mapping
from typing import Any

from dist_ens.json_text import is_number, is_whole
from dist_ens.layout import DATA, ENSEMBLE

Form = Callable[[Any], bool]


def _require(value: Any, forms: Mapping[str, Form]) -> None:
    """Raises an error if a file does not hold an object whose values have their forms.

    Args:
        value: What the file holds.
        forms: Form of the value of each key. A key may be absent, and others may be there.

    Raises:
        ValueError: If `value` is not an object, or one of its values has another form.
    """
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    for key, has_form in forms.items():
        if key in value and not has_form(value[key]):
            raise ValueError(f"the value of {key!r} has another form than dist-ens writes")


def require_curves(value: Any) -> None:
    """Raises an error if a file does not hold the curves of a report.

    Raises:
        ValueError: If one of them has another form, or a member of `disagreement` has no name.
    """
    _require(value, _CURVES)
    if len(value.get("disagreement", ())) not in (0, len(value.get("member_id", ()))):
        raise ValueError("'member_id' does not name each member of 'disagreement'")


def require_summary(value: Any) -> None:
    """Raises a `ValueError` if a file does not hold the summary of a run."""
    _require(value, _SUMMARY)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _list_of(has_form: Form) -> Form:
    return lambda value: isinstance(value, list) and all(map(has_form, value))


def _object_of(has_form: Form) -> Form:
    return lambda value: isinstance(value, dict) and all(map(has_form, value.values()))


def _object_with(**forms: Form) -> Form:
    """An object that has at least these keys."""
    return lambda value: (
        isinstance(value, dict)
        and all(key in value and has_form(value[key]) for key, has_form in forms.items())
    )


def _columns(value: Any) -> bool:
    """An object of lists of numbers, all of one length."""
    return _object_of(_list_of(is_number))(value) and len({len(v) for v in value.values()}) <= 1


def _columns_with(*names: str) -> Form:
    return lambda value: _columns(value) and all(name in value for name in names)


def _is_risk_coverage(value: Any) -> bool:
    if not _object_with(score=_is_text)(value):
        return False
    return _columns_with("coverage")({k: v for k, v in value.items() if k != "score"})


def _is_score_against_members(value: Any) -> bool:
    if not _object_with(num_members=_list_of(is_whole))(value):
        return False
    counts, scores = value["num_members"], {k: v for k, v in value.items() if k != "num_members"}
    return all(
        _columns_with("mean", "low", "high")(score) and len(score["mean"]) == len(counts)
        for score in scores.values()
    )


def _is_density(value: Any) -> bool:
    numbers = _list_of(is_number)
    return (
        _object_with(**{"edges": numbers, "in": numbers, "out": numbers})(value)
        and len(value["edges"]) == len(value["in"]) + 1 == len(value["out"]) + 1
    )


def _is_ood(value: Any) -> bool:
    return _object_with(name=_is_text)(value) and all(
        _is_density(density) for key, density in value.items() if key != "name"
    )


def _is_square(value: Any) -> bool:
    is_matrix = _list_of(_list_of(is_number))(value) and value
    return is_matrix and all(len(row) == len(value) for row in value)


def _is_pit(value: Any) -> bool:
    return _columns(value) and bool(value) and all(value.values())


_SCORES = _object_of(is_number)
_EXAMPLES = _list_of(_object_of(lambda value: is_number(value) or _is_text(value)))
_EXPERIMENT = _object_with(
    seed=is_whole,
    data=_object_with(source=_is_text, examples=_is_text, global_batch_size=is_whole),
    loss=_object_with(
        name=_is_text, label_smoothing=is_number, mixup=is_number, adversarial=is_number
    ),
    optimizer=_object_with(name=_is_text, schedule=_is_text, learning_rate=is_number),
)
_SUMMARY: Mapping[str, Form] = {
    "steps": is_whole,
    "num_members": is_whole,
    "groups": is_whole,
    "mesh": _object_with(**{ENSEMBLE: is_whole, DATA: is_whole}),
    "network": _is_name,
    "experiment": lambda value: value == {} or _EXPERIMENT(value),
    "test": _SCORES,
    "mean_member": _SCORES,
    "test_std": _SCORES,
    "mean_member_std": _SCORES,
    "test_interval": _object_of(_list_of(is_number)),
    "mean_member_interval": _object_of(_list_of(is_number)),
    "metrics": _object_of(_object_with(label=_is_text, direction=_is_name)),
    "members": _list_of(lambda value: _SCORES(value) and is_whole(value.get("member_id"))),
    "broken_members": _list_of(is_whole),
    "left_out_members": _list_of(is_whole),
}
_CURVES: Mapping[str, Form] = {
    "reliability": _object_of(_columns_with("confidence", "accuracy", "count")),
    "coverage_curve": _columns_with("nominal"),
    "pit": _is_pit,
    "risk_coverage": _is_risk_coverage,
    "score_against_members": _is_score_against_members,
    "shift": _object_of(_columns_with("strength")),
    "ood": _is_ood,
    "disagreement": _is_square,
    "member_id": _list_of(is_whole),
    "hardest": _EXAMPLES,
    "most_uncertain": _EXAMPLES,
}
