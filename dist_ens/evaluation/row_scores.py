"""Statistics of every row of a data set, and the scores and intervals computed from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dist_ens.errors import BrokenMembersError
from dist_ens.evaluation.scores import Scores
from dist_ens.losses import Distribution
from dist_ens.metrics import CATALOGUE, Metric, Rows, bootstrap_weights, interval, scores_of

# Resamples of the examples from which a score's interval is read.
_DRAWS = 400
# More rows are resampled less often, and not at all where it would be too seldom.
_MOST_DRAWN = 40_000_000
_FEWEST_DRAWS = 100


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Row statistics of a data set; a row is an example, or a position in one.

    Attributes:
        distribution: Predictive distribution of the members.
        metrics: Metrics that are scored.
        by_size_metrics: Metrics of `by_size`, by name.
        units: Standard deviation that divided the targets of each group; 1 for their own unit.
        zeros: Mean that was subtracted from the targets of each group before.
        member_ids: Ids of the members, in their order; they are of the groups in turn.
        left_out: Ids of the members that are not pooled.
        rows_per_example: 1, or the number of positions in an example.
        example_of_row: Position of each row's example in the data set, int[rows].
        labels: Labels, [groups, rows].
        groups: Statistics of each group's pooled prediction, by name float32[groups, rows].
        members: Statistics of the members, by name float32[members, rows].
        group_classwise: Sums over classes of the groups, float64[groups, ...].
        member_classwise: Sums over classes of the members, float64[members, ...].
        weights: Weight of each row, positive, float64[rows]; None weights all rows equally.
        sizes: Numbers of members of which ensembles were scored; empty where not asked for.
        by_size: First statistic of each of `by_size_metrics` for ensembles of so many members,
            drawn at random, by name float32[sizes, groups, rows].
    """

    distribution: Distribution
    metrics: Sequence[Metric]
    by_size_metrics: Mapping[str, Metric]
    units: Sequence[float]
    zeros: Sequence[float]
    member_ids: np.ndarray
    left_out: Sequence[int]
    rows_per_example: int
    example_of_row: np.ndarray
    labels: np.ndarray
    groups: Mapping[str, np.ndarray]
    members: Mapping[str, np.ndarray]
    group_classwise: np.ndarray
    member_classwise: np.ndarray
    weights: np.ndarray | None = None
    sizes: Sequence[int] = ()
    by_size: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        """Number of groups of members."""
        return len(self.units)

    @property
    def broken_members(self) -> list[int]:
        """Ids of the members some of whose predictions are NaN."""
        broken = np.isnan(self.members[self.distribution.error_statistic]).any(axis=1)
        return self.member_ids[broken].tolist()

    @property
    def is_pooled(self) -> np.ndarray:
        """Whether each member belongs to the ensemble, bool[members]."""
        return ~np.isin(self.member_ids, self.left_out)

    @property
    def pooled_members(self) -> dict[str, np.ndarray]:
        """`members`, without those that are left out."""
        is_pooled = self.is_pooled
        return {name: rows[is_pooled] for name, rows in self.members.items()}

    def require_sound(self) -> "Evaluation":
        """Returns this evaluation if no pooled prediction is NaN.

        Raises:
            BrokenMembersError: If predictions of pooled members are NaN.
        """
        broken = [i for i in self.broken_members if i not in self.left_out]
        if broken:
            raise BrokenMembersError(broken)
        return self

    @property
    def is_sound(self) -> bool:
        """Whether no pooled prediction is NaN."""
        return not np.isnan(self.groups[self.distribution.error_statistic]).any()

    def scores(self, *, intervals: bool = False) -> Scores:
        """Computes the scores.

        Args:
            intervals: Whether 95 % bootstrap intervals are computed; too many rows have none.
        """
        groups = [self._of_group(group) for group in range(self.num_groups)]
        members = [
            {"member_id": int(member_id), **self._of_member(position)}
            for position, member_id in enumerate(self.member_ids)
        ]
        own = tuple(m for m in self.metrics if m.name not in CATALOGUE and m.name in groups[0])
        if not intervals or not self._num_draws:
            return Scores(groups, members, self.left_out, metrics=own)
        of_groups = [self._of_group(g, self._draws[g]) for g in range(self.num_groups)]
        of_members = [
            self._of_member(position, self._draws[position % self.num_groups])
            for position in range(len(self.member_ids))
        ]
        pooled = np.flatnonzero(self.is_pooled)
        unbiased = _unbiased(self.metrics)
        found = {
            "ensemble": _intervals(_mean(of_groups), _mean(groups), unbiased),
            "mean_member": _intervals(
                _mean([of_members[position] for position in pooled]),
                _mean([members[position] for position in pooled]),
                unbiased,
            ),
            "members": [
                {"member_id": int(member_id), **_intervals(draws, scores, unbiased)}
                for member_id, draws, scores in zip(
                    self.member_ids, of_members, members, strict=True
                )
            ],
        }
        return Scores(groups, members, self.left_out, found, own)

    def score_against_members(self) -> dict[str, Any]:
        """Scores ensembles of 1, 2, … members, drawn at random from these, with intervals.

        Returns:
            `num_members`, and for each metric lists `mean`, `low` and `high` of as many numbers.
        """
        curve: dict[str, Any] = {"num_members": [int(size) for size in self.sizes]}
        for name, values in self.by_size.items():
            metric = self.by_size_metrics[name]

            def over_groups(rows: np.ndarray, draws: Any, metric: Metric = metric) -> Any:
                of_groups = [
                    metric.score(
                        Rows(
                            {metric.statistics[0]: row},
                            unit=unit,
                            weights=self.weights,
                            draws=of_group,
                        )
                    )
                    for row, unit, of_group in zip(rows, self.units, draws, strict=True)
                ]
                return np.mean(of_groups, axis=0)

            nothing = [None] * self.num_groups
            few = not self._num_draws
            means = [float(over_groups(rows, nothing)) for rows in values]
            ends = [
                (np.nan, np.nan) if few else interval(over_groups(rows, self._draws))
                for rows in values
            ]
            low, high = zip(*ends, strict=True)
            curve[name] = {"mean": means, "low": list(low), "high": list(high)}
        return curve

    @property
    def _num_draws(self) -> int:
        return num_draws(self.labels.shape[1])

    @cached_property
    def _draws(self) -> list[np.ndarray]:
        """How often each row is drawn, float32[draws, rows] of each group."""
        return [_draws_of(self.example_of_row, group) for group in range(self.num_groups)]

    def _of_group(self, group: int, draws: np.ndarray | None = None) -> dict[str, Any]:
        return self._scores(self.groups, self.group_classwise, group, group, draws)

    def _of_member(self, position: int, draws: np.ndarray | None = None) -> dict[str, Any]:
        group = position % self.num_groups
        return self._scores(self.members, self.member_classwise, position, group, draws)

    def _scores(
        self,
        statistics: Mapping[str, np.ndarray],
        classwise: np.ndarray,
        position: int,
        group: int,
        draws: np.ndarray | None,
    ) -> dict[str, Any]:
        values = {name: rows[position] for name, rows in statistics.items()}
        unit = self.units[group]
        rows = Rows(values, classwise[position], unit, self.weights, draws, seed=group)
        return scores_of(self.metrics, rows)


def scores_of_rows(
    metrics: Sequence[Metric],
    values: Mapping[str, np.ndarray],
    classwise: np.ndarray,
    num_examples: int,
    unit: float,
) -> tuple[dict[str, float], dict[str, tuple[float, float]] | None]:
    """Computes the scores of one predictor, and their 95 % bootstrap intervals.

    Args:
        metrics: Metrics that are scored.
        values: Row statistics by name, float32[rows].
        classwise: Sums over classes; empty without classes.
        num_examples: Number of examples, each one's rows next to each other.
        unit: Standard deviation that divided the targets.

    Returns:
        The scores in the targets' own unit, and their intervals `(low, high)`; None of too many
        rows.
    """
    num_rows = len(next(iter(values.values())))
    scores = scores_of(metrics, Rows(values, classwise, unit))
    if not num_draws(num_rows):
        return scores, None
    draws = _draws_of(np.repeat(np.arange(num_examples), num_rows // num_examples))
    drawn = scores_of(metrics, Rows(values, classwise, unit, draws=draws))
    return scores, _intervals(drawn, scores, _unbiased(metrics))


def num_draws(num_rows: int) -> int:
    """Returns the number of resamples for a number of rows; 0 where they would be too few."""
    draws = min(_DRAWS, _MOST_DRAWN // num_rows)
    return draws if draws >= _FEWEST_DRAWS else 0


def _draws_of(example_of_row: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns how often each row is drawn, float32[draws, rows]: those of an example together."""
    examples, position = np.unique(example_of_row, return_inverse=True)
    draws = bootstrap_weights(len(examples), num_draws(len(example_of_row)), seed)
    return draws if len(examples) == len(position) else draws[:, position]


def _mean(scores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([draws[name] for draws in scores], axis=0) for name in scores[0]}


def _unbiased(metrics: Sequence[Metric]) -> set[str]:
    return {metric.name for metric in metrics if metric.interval == "unbiased"}


def _intervals(
    draws: Mapping[str, Any], scores: Mapping[str, Any], unbiased: set[str]
) -> dict[str, tuple[float, float]]:
    found = {}
    for name, values in draws.items():
        low, high = interval(values)
        if name in unbiased:
            # A resample adds noise of its own to a sum of distances.
            bias = float(np.mean(values) - scores[name])
            low, high = (float(np.maximum(0, end - bias)) for end in (low, high))  # NaN stays.
        found[name] = (low, high)
    return found
