"""Numbers, and the facts about a run, as the text of a report page."""

import math
from collections.abc import Mapping, Sequence

from dist_ens.ground.errors import counted
from dist_ens.ground.json_text import Json
from dist_ens.layout import DATA, ENSEMBLE
from dist_ens.metrics.catalogue import has_unit, label_of

DASH = "—"
MOST_MEMBERS = 20  # That the page lists.


def facts(summary: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Returns the facts in a summary of a run, as pairs of a term and its value."""
    failures, mesh = summary.get("failures", {}), summary.get("mesh")
    pace = summary.get("member_examples_per_second")
    found = [
        ("members", _members(summary)),
        ("weights", listed_weights(*_weights(summary))),
        ("chosen", _chosen(summary)),
        ("NaN predicted", _broken(summary)),
        (f"failed, policy {failures.get('policy')}", _failed(failures.get("members", []))),
        *_trained_on(
            summary.get("experiment", {}), summary.get("network"), summary.get("own_loss")
        ),
        ("steps", f"{summary['steps']:,}" if "steps" in summary else ""),
        (f"mesh, {ENSEMBLE} x {DATA}", mesh and f"{mesh[ENSEMBLE]} x {mesh[DATA]}"),
        ("execution", summary.get("execution")),
        ("time", _duration(summary["seconds"]) if is_finite(summary.get("seconds")) else ""),
        ("member-examples per second", f"{pace:,.0f}" if is_finite(pace) else ""),
    ]
    return [(term, value) for term, value in found if value]


def _members(summary: Mapping[str, Json]) -> str:
    if "num_members" not in summary:
        return ""
    members, groups = summary["num_members"], summary.get("groups") or 1
    in_groups = f" in {groups:,} groups of {members // groups:,}" if groups > 1 else ""
    heads = summary.get("heads")
    of_heads = f" with {counted(heads, 'head')} each" if heads else ""
    return f"{members:,}{in_groups}{of_heads}"


def listed_weights(member_ids: Sequence[int], weights: Sequence[float]) -> str:
    """Returns members with their weights as text.

    >>> listed_weights([3, 17], [0.75, 0.25])
    '3 (0.75), 17 (0.25)'
    """
    pairs = [f"{i} ({w:.3g})" for i, w in zip(member_ids, weights, strict=True)]
    more = len(pairs) - MOST_MEMBERS
    return ", ".join([*pairs[:MOST_MEMBERS], *([f"{more:,} more"] if more > 0 else [])])


def _weights(summary: Mapping[str, Json]) -> tuple[list[int], list[float]]:
    """Returns the members with which the scores were made, and their weights if not equal."""
    weights = summary.get("member_weights") or []
    ids = [member["member_id"] for member in summary.get("members", ())[: len(weights)]]
    pooled = [(i, w) for i, w in zip(ids, weights, strict=True) if w]
    return [i for i, _ in pooled], [w for _, w in pooled]


def _chosen(summary: Mapping[str, Json]) -> str:
    """Returns how members were chosen, or that the scores were made before, in words."""
    choice = summary.get("choice")
    are_old = "these scores were made before, and dist-ens evaluate makes new ones"
    if choice is None:
        return f"all members; {are_old}" if summary.get("member_weights") else ""
    how = f"by {choice['method']} selection on the validation {label_of(choice['metric'])}"
    ids, weights = choice["member_ids"], choice["weights"]
    scored = dict(zip(*_weights(summary), strict=True))
    if scored.keys() == {*ids} and all(
        abs(scored[i] - w) < 1e-6 for i, w in zip(ids, weights, strict=True)
    ):
        return how
    listed = listed_weights(ids, weights)
    return f"{listed}, {how}; {are_old}"


def told_of_more(gains: Mapping[str, Json]) -> list[str]:
    """Returns sentences about the gains of `Scores.more_members`, as JSON holds them.

    >>> told_of_more({"nll": {"more": 8, "gain": 0.0041, "low": 0.0031, "high": 0.0051}})
    ['8 more members would gain 0.0041 ± 0.0010 NLL.']
    >>> told_of_more({})
    ['Nothing can be said about more members: it takes 4 or more of equal weight, and few rows.']
    """
    if not gains:
        return [
            "Nothing can be said about more members: it takes 4 or more of equal weight, and few "
            "rows."
        ]
    told = []
    for name, found in gains.items():
        gain, half = (
            number(each, {name: each})
            for each in (found["gain"], (found["high"] - found["low"]) / 2)
        )
        verb = "would gain" if found["low"] > 0 else "would gain nothing that can be measured:"
        told.append(f"{found['more']:,} more members {verb} {gain} ± {half} {label_of(name)}.")
    return told


def _broken(summary: Mapping[str, Json]) -> str:
    """Returns which members predict NaN, in words."""
    broken = summary.get("broken_members")
    if not broken:
        return ""
    is_left_out = {*broken} <= {*summary.get("left_out_members", ())}
    left_out = ", left out of the ensemble" if is_left_out else ""
    return f"by members {', '.join(map(str, broken))}{left_out}"


def _failed(members: list[Mapping[str, Json]]) -> str:
    """Returns what happened to the members with failed updates, in words."""
    clauses = []
    for member in members[:MOST_MEMBERS]:
        first, last = member["first_step"], member["last_step"]
        when = f"at step {first:,}" if first == last else f"from step {first:,} to {last:,}"
        count = counted(member["failed_updates"], "failed update")
        frozen = ", frozen" if member["is_frozen"] else ""
        clauses.append(f"member {member['member_id']}: {count} {when} ({member['cause']}){frozen}")
    if more := len(members) - len(clauses):
        clauses.append(f"{more:,} more")
    return "; ".join(clauses)


def _trained_on(
    experiment: Mapping[str, Json], network: str | None, own_loss: str | None
) -> list[tuple[str, str]]:
    """Returns the settings by which runs differ, as pairs of a term and its value.

    `own_loss` is the name of a loss that a config file makes itself.
    """
    if not experiment:
        return []
    data, loss, optimizer = (experiment[name] for name in ("data", "loss", "optimizer"))
    examples = "" if data["examples"] == "shared" else f", {data['examples']}"
    beside = "".join(
        f", {name.replace('_', ' ')} {value}" for name, value in loss["options"].items() if value
    )
    given = experiment.get("hyper", {}).get("options", {}).get("learning_rate")
    rate = f"{optimizer['learning_rate']:g}" if given is None else "a rate of each member"
    schedule = "" if optimizer["schedule"] == "constant" else f", {optimizer['schedule']}"
    return [
        ("network", network or DASH),
        ("data", data["source"] + examples),
        ("loss", own_loss or loss["name"] + beside),
        ("optimizer", f"{optimizer['name']}, {rate}{schedule}"),
        ("batch", f"{data['global_batch_size']:,}"),
        ("seed", str(experiment["seed"])),
    ]


def _duration(seconds: float) -> str:
    """Returns a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def is_finite(value: Json) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Json, scores: Mapping[str, Json]) -> str:
    """Returns a number as text, or a dash if it is not finite.

    A score has four decimals, or four significant digits if it has the targets' unit.

    >>> number(0.25, {"nll": 0.25}), number(123.456, {"rmse": 5.0}), number(None, {})
    ('0.2500', '123.5', '—')
    """
    if not is_finite(value):
        return DASH
    if scores and not has_unit(scores) and abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:#.4g}".removesuffix(".")


def interval(intervals: Mapping[str, Json] | None, name: str, scores: Mapping[str, Json]) -> str:
    """Returns the two ends of a score's interval, or an empty string without an interval."""
    ends = (intervals or {}).get(name)
    return " to ".join(number(end, scores) for end in ends) if ends else ""
