"""What predictions of a split score: the ensemble, its members, and how sure the scores are."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dist_ens.errors import BrokenMembersError
from dist_ens.evaluation.kinds import Kind
from dist_ens.metrics import bootstrap_weights, interval, mean_of

# Resamples of the examples from which a score's interval is read.
_DRAWS = 400
# More rows than that are resampled less often, and not at all where it would be too seldom.
_MOST_DRAWN = 40_000_000
_FEWEST_DRAWS = 100
# Sums of distances, to which a resample adds noise of its own: what it adds on average is taken off
# their interval.
_GROW_IN_RESAMPLES = ("ece", "aece", "classwise_ece")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores over a split; a score is a number by its name.

    Attributes:
        groups: For each group of members, of their pooled prediction, on the group's own examples.
        members: Of each member, on its group's examples, with its `member_id`.
        left_out: Ids of the members that are not of the ensemble.
        ensemble_interval: For each score the ends of its 95 % interval; None where not asked for.
        mean_member_interval: Likewise.
        member_intervals: Likewise, of each member.
    """

    groups: list[dict[str, float]]
    members: list[dict[str, float]]
    left_out: Sequence[int] = ()
    ensemble_interval: dict[str, tuple[float, float]] | None = None
    mean_member_interval: dict[str, tuple[float, float]] | None = None
    member_intervals: list[dict[str, Any]] | None = None

    @property
    def ensemble(self) -> dict[str, float]:
        """The mean of each score over the groups; of one group its scores."""
        return self._over_groups(np.mean)

    @property
    def mean_member(self) -> dict[str, float]:
        """The mean over the ensemble's members of each score that a member has."""
        members = [each for each in self.members if each["member_id"] not in self.left_out]
        names = [name for name in members[0] if name != "member_id"]
        return {name: float(np.mean([member[name] for member in members])) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """`{"test", "members"}`; `test_std` of several groups; intervals under `…_interval`."""
        several = {"test_std": self._over_groups(np.std)} if len(self.groups) > 1 else {}
        scores = {"test": self.ensemble, **several, "members": self.members}
        if self.ensemble_interval is None:
            return scores
        return scores | {
            "test_interval": self.ensemble_interval,
            "mean_member_interval": self.mean_member_interval,
            "members_interval": self.member_intervals,
        }

    def _over_groups(self, reduce: Any) -> dict[str, float]:
        names = self.groups[0]
        return {name: float(reduce([scores[name] for scores in self.groups])) for name in names}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Predictions of a split, row by row: of an example, or of a position in it.

    Attributes:
        kind: How they are scored.
        units: What the targets of each group were divided by; 1 where they were not.
        zeros: What was taken off the targets of each group before; 0 where nothing was.
        member_ids: Of the members, in their order; they are of the groups in turn.
        left_out: Ids of the members that are not pooled.
        rows_per_example: 1, or the positions of one.
        labels: [groups, rows].
        groups: What each row adds to the scores of a group's pooled prediction, by name
            float32[groups, rows].
        members: Likewise of the members, float32[members, rows].
        group_classwise: What is scored class by class, float64[groups, ...].
        member_classwise: Likewise, float64[members, ...].
        sizes: Numbers of members of which ensembles were scored; empty where not asked for.
        by_size: `nll` or so of ensembles of so many members, drawn at random, by name
            float32[sizes, groups, rows].
    """

    kind: Kind
    units: Sequence[float]
    zeros: Sequence[float]
    member_ids: np.ndarray
    left_out: Sequence[int]
    rows_per_example: int
    labels: np.ndarray
    groups: Mapping[str, np.ndarray]
    members: Mapping[str, np.ndarray]
    group_classwise: np.ndarray
    member_classwise: np.ndarray
    sizes: Sequence[int] = ()
    by_size: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        """Of members."""
        return len(self.units)

    @property
    def broken_members(self) -> list[int]:
        """Ids of the members some of whose predictions are no numbers."""
        names = [name for name in ("nll", "squared_error") if name in self.members]
        broken = np.isnan(self.members[names[0]]).any(axis=1)
        return self.member_ids[broken].tolist()

    @property
    def is_pooled(self) -> np.ndarray:
        """Which members the ensemble is of, bool[members]."""
        return ~np.isin(self.member_ids, self.left_out)

    @property
    def pooled_members(self) -> dict[str, np.ndarray]:
        """What `members` has of those that the ensemble is of."""
        is_pooled = self.is_pooled
        return {name: rows[is_pooled] for name, rows in self.members.items()}

    def require_sound(self) -> "Evaluation":
        """This one.

        Raises:
            BrokenMembersError: If predictions of members that are pooled are no numbers.
        """
        broken = [i for i in self.broken_members if i not in self.left_out]
        if broken:
            raise BrokenMembersError(broken)
        return self

    @property
    def is_sound(self) -> bool:
        """Whether all pooled predictions are numbers."""
        name = "nll" if "nll" in self.groups else "squared_error"
        return not np.isnan(self.groups[name]).any()

    def scores(self, *, intervals: bool = False) -> Scores:
        """The scores, with 95 % bootstrap intervals if asked for; none of too many rows."""
        groups = [self._of_group(group) for group in range(self.num_groups)]
        members = [
            {"member_id": int(member_id), **self._of_member(position)}
            for position, member_id in enumerate(self.member_ids)
        ]
        if not intervals or not self._draws:
            return Scores(groups, members, self.left_out)
        of_groups = [self._of_group(g, self._weights[g]) for g in range(self.num_groups)]
        of_members = [
            self._of_member(position, self._weights[position % self.num_groups])
            for position in range(len(self.member_ids))
        ]
        pooled = np.flatnonzero(self.is_pooled)
        return Scores(
            groups,
            members,
            self.left_out,
            _intervals(_mean(of_groups), _mean(groups)),
            _intervals(
                _mean([of_members[position] for position in pooled]),
                _mean([members[position] for position in pooled]),
            ),
            [
                {"member_id": int(member_id), **_intervals(draws, scores)}
                for member_id, draws, scores in zip(
                    self.member_ids, of_members, members, strict=True
                )
            ],
        )

    def score_against_members(self) -> dict[str, Any]:
        """Scores of ensembles of 1, 2, … members, drawn at random from these, with intervals.

        Returns:
            `num_members`, and for each score lists `mean`, `low` and `high` of as many numbers.
        """
        curve: dict[str, Any] = {"num_members": [int(size) for size in self.sizes]}
        for name, values in self.by_size.items():
            called, in_own_unit = _BY_SIZE[name]

            def over_groups(rows: np.ndarray, weights: Any, of_mean: Any = in_own_unit) -> Any:
                of_groups = [
                    of_mean(mean_of(row, of_group), unit)
                    for row, unit, of_group in zip(rows, self.units, weights, strict=True)
                ]
                return np.mean(of_groups, axis=0)

            nothing = [None] * self.num_groups
            few = not self._draws
            means = [float(over_groups(rows, nothing)) for rows in values]
            ends = [
                (np.nan, np.nan) if few else interval(over_groups(rows, self._weights))
                for rows in values
            ]
            low, high = zip(*ends, strict=True)
            curve[called] = {"mean": means, "low": list(low), "high": list(high)}
        return curve

    @property
    def _draws(self) -> int:
        return num_draws(self.labels.shape[1])

    @cached_property
    def _weights(self) -> list[np.ndarray]:
        num_rows = self.labels.shape[1]
        examples = num_rows // self.rows_per_example
        return [_weights_of(examples, num_rows, group) for group in range(self.num_groups)]

    def _of_group(self, group: int, weights: np.ndarray | None = None) -> dict[str, Any]:
        values = {name: rows[group] for name, rows in self.groups.items()}
        classwise, unit = self.group_classwise[group], self.units[group]
        return self.kind.scores(values, classwise, unit, weights, seed=group)

    def _of_member(self, position: int, weights: np.ndarray | None = None) -> dict[str, Any]:
        values = {name: rows[position] for name, rows in self.members.items()}
        classwise, group = self.member_classwise[position], position % self.num_groups
        return self.kind.scores(values, classwise, self.units[group], weights, seed=group)


def scores_of_rows(
    kind: Kind,
    values: Mapping[str, np.ndarray],
    classwise: np.ndarray,
    num_examples: int,
    unit: float,
) -> tuple[dict[str, float], dict[str, tuple[float, float]] | None]:
    """The scores of a prediction of some examples, and their 95 % bootstrap intervals.

    Args:
        kind: How they are scored.
        values: What each row adds to the scores, by name float32[rows].
        classwise: What all add to what is scored class by class; empty of real targets.
        num_examples: Whose rows they are, each one's next to each other.
        unit: What real targets were divided by.

    Returns:
        The scores, in the targets' own unit, and the ends of their intervals; None of too many
        rows.
    """
    num_rows = len(next(iter(values.values())))
    scores = kind.scores(values, classwise, unit, None)
    if not num_draws(num_rows):
        return scores, None
    weights = _weights_of(num_examples, num_rows)
    return scores, _intervals(kind.scores(values, classwise, unit, weights), scores)


def num_draws(num_rows: int) -> int:
    """How many resamples so many rows have; 0 where they would be too few."""
    draws = min(_DRAWS, _MOST_DRAWN // num_rows)
    return draws if draws >= _FEWEST_DRAWS else 0


def _weights_of(num_examples: int, num_rows: int, seed: int = 0) -> np.ndarray:
    """How often each row is drawn, float32[draws, rows]: those of an example together."""
    weights = bootstrap_weights(num_examples, num_draws(num_rows), seed)
    return np.repeat(weights, num_rows // num_examples, axis=1)


def _mean(scores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([draws[name] for draws in scores], axis=0) for name in scores[0]}


def _intervals(
    draws: Mapping[str, Any], scores: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    found = {}
    for name, values in draws.items():
        low, high = interval(values)
        if name in _GROW_IN_RESAMPLES:
            bias = float(np.mean(values) - scores[name])
            low, high = (float(np.maximum(0, end - bias)) for end in (low, high))  # NaN stays
        found[name] = (low, high)
    return found


# What a score of ensembles by their size is called, and its value from the mean over the rows.
_BY_SIZE: dict[str, tuple[str, Any]] = {
    "nll": ("nll", lambda mean, unit: mean + np.log(unit)),
    "correct": ("accuracy", lambda mean, unit: mean),
    "squared_error": ("rmse", lambda mean, unit: np.sqrt(mean) * unit),
}
