"""Checks of the files that a report reads: a file of another form is refused before drawing."""

from collections.abc import Callable, Mapping

from dist_ens.json_text import Json, is_number, is_whole
from dist_ens.layout import DATA, ENSEMBLE

Form = Callable[[Json], bool]


def _require(value: Json, forms: Mapping[str, Form]) -> None:
    """Raises an error if a file does not hold an object whose values have the required forms.

    Args:
        value: Content of the file.
        forms: Check of the value of each key. A key may be absent, and other keys may be present.

    Raises:
        ValueError: If `value` is not an object, or one of its values has another form.
    """
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    for key, has_form in forms.items():
        if key in value and not has_form(value[key]):
            raise ValueError(f"the value of {key!r} does not have the form that dist-ens writes")


def require_curves(value: Json) -> None:
    """Raises an error if a file does not hold the curves of a report.

    Args:
        value: Content of the file.

    Raises:
        ValueError: If a curve has another form, or a member in `disagreement` has no id.
    """
    _require(value, _CURVES)
    if len(value.get("disagreement", ())) not in (0, len(value.get("member_id", ()))):
        raise ValueError("'member_id' does not name each member of 'disagreement'")


def require_summary(value: Json) -> None:
    """Raises a `ValueError` if a file does not hold the summary of a run."""
    _require(value, _SUMMARY)


def _is_text(value: Json) -> bool:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def _is_name(value: Json) -> bool:
    """Returns whether a value is a string or null."""
    return value is None or isinstance(value, str)


def _list_of(has_form: Form) -> Form:
    """Returns the check of a list of values that all pass a check."""
    return lambda value: isinstance(value, list) and all(map(has_form, value))


def _object_of(has_form: Form) -> Form:
    """Returns the check of an object whose values all pass a check."""
    return lambda value: isinstance(value, dict) and all(map(has_form, value.values()))


def _object_with(**forms: Form) -> Form:
    """Returns the check of an object that has at least these keys."""
    return lambda value: (
        isinstance(value, dict)
        and all(key in value and has_form(value[key]) for key, has_form in forms.items())
    )


def _columns(value: Json) -> bool:
    """Returns whether a value is an object of lists of numbers, all of one length."""
    return _object_of(_list_of(is_number))(value) and len({len(v) for v in value.values()}) <= 1


def _columns_with(*names: str) -> Form:
    """Returns the check of `_columns` that has at least these keys."""
    return lambda value: _columns(value) and all(name in value for name in names)


def _is_risk_coverage(value: Json) -> bool:
    """Returns whether a value holds a risk-coverage curve."""
    if not _object_with(score=_is_text)(value):
        return False
    return _columns_with("coverage")({k: v for k, v in value.items() if k != "score"})


def _is_score_against_members(value: Json) -> bool:
    """Returns whether a value holds the scores over the number of members."""
    if not _object_with(num_members=_list_of(is_whole))(value):
        return False
    counts, scores = value["num_members"], {k: v for k, v in value.items() if k != "num_members"}
    return all(
        _columns_with("mean", "low", "high")(score) and len(score["mean"]) == len(counts)
        for score in scores.values()
    )


def _is_density(value: Json) -> bool:
    """Returns whether a value holds two densities over the same bins."""
    numbers = _list_of(is_number)
    return (
        _object_with(**{"edges": numbers, "in": numbers, "out": numbers})(value)
        and len(value["edges"]) == len(value["in"]) + 1 == len(value["out"]) + 1
    )


def _is_ood(value: Json) -> bool:
    """Returns whether a value holds densities in and out of distribution."""
    return _object_with(name=_is_text)(value) and all(
        _is_density(density) for key, density in value.items() if key != "name"
    )


def _is_square(value: Json) -> bool:
    """Returns whether a value holds a square matrix with at least one row."""
    is_matrix = _list_of(_list_of(is_number))(value) and value
    return is_matrix and all(len(row) == len(value) for row in value)


def _is_pit(value: Json) -> bool:
    """Returns whether a value holds counts of PIT values."""
    return _columns(value) and bool(value) and all(value.values())


def _is_failed_member(value: Json) -> bool:
    """Returns whether a value holds the fields of a member with failed updates."""
    numbers = ("member_id", "failed_updates", "first_step", "last_step")
    return (
        isinstance(value, dict)
        and all(is_whole(value.get(name)) for name in numbers)
        and _is_text(value.get("cause"))
        and isinstance(value.get("is_frozen"), bool)
    )


_SCORES = _object_of(is_number)
_EXAMPLES = _list_of(_object_of(lambda value: is_number(value) or _is_text(value)))
_EXPERIMENT = _object_with(
    seed=is_whole,
    data=_object_with(source=_is_text, examples=_is_text, global_batch_size=is_whole),
    loss=_object_with(name=_is_text),
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
    "by_class": _list_of(_object_with(**{"class": _is_text, "examples": is_whole})),
    "members": _list_of(lambda value: _SCORES(value) and is_whole(value.get("member_id"))),
    "broken_members": _list_of(is_whole),
    "left_out_members": _list_of(is_whole),
    "failures": _object_with(policy=_is_name, members=_list_of(_is_failed_member)),
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
