"""Statistics of every row of a data set, and the scores and intervals computed from them."""

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.evaluation.more_members import gain_of_more
from dist_ens.evaluation.part_scores import by_class, by_target
from dist_ens.evaluation.score_table import table_of
from dist_ens.ground.errors import BrokenMembersError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Score
from dist_ens.losses import Distribution
from dist_ens.metrics import CATALOGUE, Metric, Rows, bootstrap_weights, interval, scores_of

if TYPE_CHECKING:
    from rich.table import Table

# Number of resamples of the examples from which the interval of a score is computed.
_DRAWS = 400
# Many rows get fewer resamples, and no interval if there would be too few resamples.
_MOST_DRAWN = 40_000_000
_FEWEST_DRAWS = 100
_WIDTH = 160  # Width of a table as a text.


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """The scores of an ensemble and its members on a data set, which print as a table.

    Attributes:
        groups: Scores by name of the pooled prediction of each group of members, on the examples of
            the group. An ensemble is one group. A table with several splits has several groups.
        members: Scores of each member, or of each head of each member, with its `member_id`.
        left_out: Ids of the members that are not pooled, or with weight 0.
        member_weights: Weights of the members in the pool, in their order, with sum 1. None if they
            are equal.
        more_members: Gain of some scores from twice as many members: `more`, their number, `gain`,
            above 0 for a better score, and `low` and `high`, the ends of its 95 % interval. Empty
            if nothing can be said, None if it was not computed.
        intervals: 95 % bootstrap intervals, `(low, high)` in place of each score: `ensemble` and
            `mean_member`, dicts by name, and `members`, a list of dicts with `member_id`. None if
            they were not requested, or there are too many rows to resample.
        metrics: Metrics outside the catalogue.
        by_class: Scores of the ensemble on the examples of each class, with the name or number of
            the `class` and its number of `examples`. `recall` is the accuracy on them. Optional
            metrics add the score of the class, such as `auroc`. Empty if the classes have no names,
            the largest has less than twice the examples of the smallest (or there is one at each
            position), and no such metric is computed.
        hyper: Settings of the members by name, in the order of `members`; see `Ensemble`.
        by_target: Scores of the ensemble on each of several targets, with the number of the
            `target`. Empty for one target.
    """

    groups: list[dict[str, float]]
    members: list[JsonDict]
    left_out: Sequence[int] = ()
    intervals: JsonDict | None = None
    metrics: tuple[Metric, ...] = ()
    by_class: Sequence[JsonDict] = ()
    hyper: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    member_weights: Sequence[float] | None = None
    more_members: JsonDict | None = None
    by_target: Sequence[JsonDict] = ()

    @property
    def ensemble(self) -> dict[str, float]:
        """Scores of the ensemble, or their means over several groups; empty if not scored."""
        return self._over_groups(np.mean)

    @property
    def mean_member(self) -> dict[str, float]:
        """Mean over the ensemble's members of each score that a member has."""
        members = [each for each in self.members if each["member_id"] not in self.left_out]
        names = [name for name in members[0] if name != "member_id"]
        return {name: float(np.mean([member[name] for member in members])) for name in names}

    def to_dict(self) -> JsonDict:
        """Returns the scores in the form in which files hold them.

        `test` and `members` hold the scores, `test_std` the deviation over several groups.
        Intervals are `test_interval`, `mean_member_interval` and `members_interval`. `metrics`
        describes those outside the catalogue.
        """
        scores: JsonDict = {"test": self.ensemble}
        if len(self.groups) > 1:
            scores["test_std"] = self._over_groups(np.std)
        scores["members"] = self.members
        if self.member_weights is not None:
            scores["member_weights"] = list(self.member_weights)
        if self.more_members is not None:
            scores["more_members"] = self.more_members
        if self.intervals is not None:
            scores["test_interval"] = self.intervals["ensemble"]
            scores["mean_member_interval"] = self.intervals["mean_member"]
            scores["members_interval"] = self.intervals["members"]
        if self.by_class:
            scores["by_class"] = list(self.by_class)
        if self.by_target:
            scores["by_target"] = list(self.by_target)
        if self.hyper:
            scores["hyper"] = dict(self.hyper)
        if self.metrics:
            scores["metrics"] = {metric.name: metric.describe() for metric in self.metrics}
        return scores

    def table(self, title: str | None = "test split", others: str = "in summary.json") -> "Table":
        """Returns the table for the terminal, with at most 20 members.

        Args:
            title: Title of the table.
            others: Text that says where the scores of further members are.
        """
        return table_of(self, title, others)

    def __repr__(self) -> str:
        """Returns the scores as a table of plain text."""
        from dist_ens.ground.terminal import PlainConsole

        console = PlainConsole(file=io.StringIO(), width=_WIDTH, color_system=None)
        console.print(self.table(title=None, others="in .members"))
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    def _over_groups(self, reduce: Callable[[list[float]], float]) -> dict[str, float]:
        names = self.groups[0]
        return {name: float(reduce([scores[name] for scores in self.groups])) for name in names}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The row statistics of a data set. A row is an example, or a position in an example.

    With several targets it is a target of one of these; the targets of an example are in order.

    Attributes:
        units: Standard deviation by which the targets of each group were divided, float64[groups]
            or float64[groups, targets].
        zeros: Mean that was subtracted from the targets of each group before the division.
        member_ids: Ids of the members. The member at position m is in group m % groups.
        left_out: Ids of the members that are not pooled, or with weight 0.
        member_weights: Weights of the members in the pool, float64[members]. None if equal.
        example_of_row: Position of each row's example in the data set, int[rows].
        labels: Labels, [groups, rows].
        groups: Statistics of each group's pooled prediction, float32[groups, rows].
        members: Statistics of the members, float32[members, rows].
        group_classwise: Sums over classes of the groups, float64[groups, ...].
        member_classwise: Sums over classes of the members, float64[members, ...].
        weights: Weight of each row, positive, float64[rows]. None: all rows count equally.
        sizes: Numbers of members of the ensembles in `by_size`. Empty if these were not scored.
        by_size: First statistic of some metrics, by the metrics' names, for ensembles of randomly
            drawn members, float32[sizes, groups, rows].
        hyper: Settings of the members by name, float32[members] each.
        by_order: Means of these over the rows in each random order of the members, of which
            `by_size` is the mean, float64[orders, groups, sizes, targets].
    """

    distribution: Distribution
    metrics: Sequence[Metric]
    units: np.ndarray
    zeros: np.ndarray
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
    by_order: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    class_names: Sequence[str] = ()
    hyper: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    member_weights: np.ndarray | None = None

    @property
    def num_groups(self) -> int:
        """Number of groups of members."""
        return len(self.units)

    @property
    def num_targets(self) -> int:
        """Number of rows of an example or position, one for each target."""
        return self.distribution.num_targets or 1

    @property
    def broken_members(self) -> list[int]:
        """Ids of the members with NaN among their predictions."""
        broken = np.isnan(self.members[self.distribution.error_statistic]).any(axis=1)
        return self.member_ids[broken].tolist()

    @property
    def is_pooled(self) -> np.ndarray:
        """Whether each member belongs to the ensemble, bool[members]."""
        return ~np.isin(self.member_ids, self.left_out)

    @property
    def pooled_members(self) -> dict[str, np.ndarray]:
        """Statistics of the pooled members."""
        is_pooled = self.is_pooled
        return {name: rows[is_pooled] for name, rows in self.members.items()}

    @property
    def is_sound(self) -> bool:
        """Whether no pooled prediction is NaN."""
        return not np.isnan(self.groups[self.distribution.error_statistic]).any()

    def require_sound(self) -> "Evaluation":
        """Returns this evaluation; raises a `BrokenMembersError` if a pooled prediction is NaN."""
        broken = [i for i in self.broken_members if i not in self.left_out]
        if broken:
            raise BrokenMembersError(broken)
        return self

    def scores(self, *, intervals: bool = False) -> Scores:
        """Returns the scores, with 95 % bootstrap intervals unless there are too many rows."""
        groups = self._scores(self.groups, self.group_classwise)
        members = self._scores(self.members, self.member_classwise)
        return Scores(
            groups,
            self._with_ids(members),
            self.left_out,
            self._intervals(groups, members) if intervals and self._num_draws else None,
            tuple(m for m in self.metrics if m.name not in CATALOGUE and m.name in groups[0]),
            by_class(self) if self.num_groups == 1 else [],
            {name: values.tolist() for name, values in self.hyper.items()},
            None if self.member_weights is None else self.member_weights.tolist(),
            self._more_members() if intervals else None,
            by_target(self) if self.num_groups == 1 else [],
        )

    def _more_members(self) -> JsonDict | None:
        """Returns the gains from more members; see `gain_of_more`."""
        if not self.sizes:
            return None
        if self.member_weights is not None:
            return {}
        found = {}
        for name, (scores, drawn) in self._scores_by_size.items():
            metric = next(metric for metric in self.metrics if metric.name == name)

            def score(means: np.ndarray, unit: np.ndarray, metric: Metric = metric) -> Score:
                statistics = {metric.statistics[0]: means}
                return metric.score(Rows(statistics, unit=unit, num_targets=self.num_targets))

            units = self.units.reshape(self.num_groups, 1, -1)
            of_means = np.vectorize(score, signature="(targets),(units)->()")
            by_order = of_means(self.by_order[name], units).mean(axis=1)
            found[name] = gain_of_more(self.sizes, scores, drawn, by_order, metric.direction)
        return {name: gain for name, gain in found.items() if gain is not None}

    def _intervals(
        self, groups: Sequence[dict[str, Score]], members: Sequence[dict[str, Score]]
    ) -> JsonDict:
        drawn_groups = self._scores(self.groups, self.group_classwise, are_drawn=True)
        drawn_members = self._scores(self.members, self.member_classwise, are_drawn=True)
        pooled = np.flatnonzero(self.is_pooled).tolist()
        drawn_mean, mean = (
            mean_scores([each[m] for m in pooled]) for each in (drawn_members, members)
        )
        intervals = partial(intervals_of, self.metrics)
        return {
            "ensemble": intervals(mean_scores(drawn_groups), mean_scores(groups)),
            "mean_member": intervals(drawn_mean, mean),
            "members": self._with_ids(map(intervals, drawn_members, members)),
        }

    def _with_ids(self, of_members: Iterable[JsonDict]) -> list[JsonDict]:
        ids = self.member_ids.tolist()
        return [{"member_id": i, **values} for i, values in zip(ids, of_members, strict=True)]

    def score_against_members(self) -> JsonDict:
        """Returns the scores of 1, 2, … random members, with intervals or NaN for many rows."""
        curve: JsonDict = {"num_members": [int(size) for size in self.sizes]}
        for name, (means, drawn) in self._scores_by_size.items():
            ends = [interval(each) for each in drawn] or [(np.nan, np.nan)] * len(means)
            low, high = zip(*ends, strict=True)
            curve[name] = {"mean": means, "low": list(low), "high": list(high)}
        return curve

    @cached_property
    def _scores_by_size(self) -> dict[str, tuple[list[float], list[Score]]]:
        """Scores of each size, and their resamples unless there are too many rows, by metric."""
        nothing, found = [None] * self.num_groups, {}
        for name, of_sizes in self.by_size.items():
            means = [float(self._over_groups(name, rows, nothing)) for rows in of_sizes]
            resampled = of_sizes if self._num_draws else ()
            drawn = [self._over_groups(name, rows, self._draws) for rows in resampled]
            found[name] = means, drawn
        return found

    def _over_groups(
        self, name: str, rows: np.ndarray, draws: Sequence[np.ndarray | None]
    ) -> Score:
        """Returns the mean over the groups of a metric of `by_size`, in resamples if given."""
        metric = next(metric for metric in self.metrics if metric.name == name)
        of_groups = [
            metric.score(
                Rows(
                    {metric.statistics[0]: row},
                    unit=unit,
                    weights=self.weights,
                    draws=of_group,
                    num_targets=self.num_targets,
                )
            )
            for row, unit, of_group in zip(rows, self.units, draws, strict=True)
        ]
        return np.mean(of_groups, axis=0)

    @property
    def _num_draws(self) -> int:
        return num_draws(self.labels.shape[1])

    @cached_property
    def _draws(self) -> list[np.ndarray]:
        """Number of times each row is drawn, float32[draws, rows] for each group."""
        return [draws_of(self.example_of_row, group) for group in range(self.num_groups)]

    def _scores(
        self,
        statistics: Mapping[str, np.ndarray],
        classwise: np.ndarray,
        *,
        are_drawn: bool = False,
    ) -> list[dict[str, Score]]:
        """Returns the scores of the predictors of some statistics, in resamples if `are_drawn`."""
        scores = []
        for position, sums in enumerate(classwise):
            draws = self._draws[position % self.num_groups] if are_drawn else None
            scores.append(scores_of(self.metrics, self.rows_of(statistics, position, sums, draws)))
        return scores

    def rows_of(
        self,
        statistics: Mapping[str, np.ndarray],
        position: int,
        classwise: np.ndarray | None = None,
        draws: np.ndarray | None = None,
    ) -> Rows:
        """Returns the rows of the predictor at a position of some statistics."""
        values = {name: rows[position] for name, rows in statistics.items()}
        group = position % self.num_groups
        return Rows(
            values, classwise, self.units[group], self.weights, draws, group, self.num_targets
        )


def num_draws(num_rows: int) -> int:
    """Returns the number of resamples for a number of rows, or 0 if it would be too small."""
    draws = min(_DRAWS, _MOST_DRAWN // num_rows)
    return draws if draws >= _FEWEST_DRAWS else 0


def draws_of(example_of_row: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns the counts of rows, [draws, rows]. Rows of an example are drawn together."""
    examples, position = np.unique(example_of_row, return_inverse=True)
    draws = bootstrap_weights(len(examples), num_draws(len(example_of_row)), seed)
    return draws if len(examples) == len(position) else draws[:, position]


def intervals_of(
    metrics: Sequence[Metric], draws: Mapping[str, Score], scores: Mapping[str, Score]
) -> dict[str, tuple[float, float]]:
    """Returns the 95 % interval of each score, from its resamples, float64[draws]."""
    unbiased = {metric.name for metric in metrics if metric.interval == "unbiased"}
    found = {}
    for name, values in draws.items():
        low, high = interval(values)
        if name in unbiased:
            # The noise of a resample raises a sum of distances, so this bias is subtracted.
            bias = float(np.mean(values) - scores[name])
            low, high = (float(np.maximum(0, end - bias)) for end in (low, high))  # NaN stays.
        found[name] = (low, high)
    return found


def mean_scores(scores: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """Returns the mean of each score over several predictors, also in each resample."""
    return {name: np.mean([each[name] for each in scores], axis=0) for name in scores[0]}


def scores_of_means(
    member_ids: Sequence[int], means: Mapping[str, np.ndarray], hyper: Mapping[str, np.ndarray]
) -> Scores:
    """Returns scores of members from a loss function's means, [members]; the ensemble has none."""
    members = [
        {"member_id": int(member_id)}
        | {name: float(values[position]) for name, values in means.items()}
        for position, member_id in enumerate(member_ids)
    ]
    return Scores([{}], members, hyper={name: each.tolist() for name, each in hyper.items()})
