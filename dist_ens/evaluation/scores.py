"""Scores of an ensemble and of its members."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.ground.json_text import JsonDict
from dist_ens.metrics import Metric

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """The scores of an ensemble and its members on a data set, which print as a table.

    Attributes:
        groups: Scores by name of the pooled prediction of each group of members, on the examples of
            the group. An ensemble is one group. A table with several splits has several groups.
        members: Scores of each member, with its `member_id`.
        left_out: Ids of the members that are not pooled.
        intervals: 95 % bootstrap intervals, `(low, high)` in place of each score: `ensemble` and
            `mean_member`, dicts by name, and `members`, a list of dicts with `member_id`. None if
            they were not requested, or there are too many rows to resample.
        metrics: Metrics outside the catalogue.
        by_class: Scores of the ensemble on the examples of each class, with the name of the `class`
            and its number of `examples`. Empty if the classes have no names.
    """

    groups: list[dict[str, float]]
    members: list[dict[str, float]]
    left_out: Sequence[int] = ()
    intervals: JsonDict | None = None
    metrics: tuple[Metric, ...] = ()
    by_class: Sequence[JsonDict] = ()

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
        if self.intervals is not None:
            scores["test_interval"] = self.intervals["ensemble"]
            scores["mean_member_interval"] = self.intervals["mean_member"]
            scores["members_interval"] = self.intervals["members"]
        if self.by_class:
            scores["by_class"] = list(self.by_class)
        if self.metrics:
            scores["metrics"] = {metric.name: metric.describe() for metric in self.metrics}
        return scores

    def table(self, title: str | None = "test split", others: str = "in summary.json") -> "Table":
        """Returns the table for the terminal, with at most 20 members.

        Args:
            title: Title of the table.
            others: Text that says where the scores of further members are.
        """
        from dist_ens.metrics.table import scores_table  # The library rich is slow to import.

        return scores_table(
            self.ensemble,
            self.mean_member,
            self.members,
            len(self.groups),
            self.left_out,
            metrics=self.metrics,
            by_class=self.by_class,
            title=title,
            others=others,
        )

    def __repr__(self) -> str:
        """Returns the scores as a table of plain text."""
        from dist_ens.metrics.table import as_text

        return as_text(self.table(title=None, others="in .members"))

    def _over_groups(self, reduce: Callable[[list[float]], float]) -> dict[str, float]:
        names = self.groups[0]
        return {name: float(reduce([scores[name] for scores in self.groups])) for name in names}


def scores_of_means(member_ids: Sequence[int], means: Mapping[str, np.ndarray]) -> Scores:
    """Returns the scores of members from the means, [members], of a loss function's values.

    The scores of the ensemble are empty, because the members' outputs are not pooled.
    """
    members = [
        {"member_id": int(member_id)}
        | {name: float(values[position]) for name, values in means.items()}
        for position, member_id in enumerate(member_ids)
    ]
    return Scores([{}], members)
