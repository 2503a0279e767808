"""Scores of an ensemble and of its members."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ens.metrics import Metric

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """Scores over a data set, each a number by its name. They print as a table.

    Attributes:
        groups: Scores of the pooled prediction of each group of members, on the group's own
            examples. An ensemble is one group; several come from a table with several splits.
        members: Scores of each member, with its `member_id`.
        left_out: Ids of the members that are not pooled.
        intervals: Bootstrap intervals of 95 %, `(low, high)` in place of each score: `ensemble` and
            `mean_member`, dicts by name, and `members`, a list of dicts with `member_id`. None if
            they were not asked for, or there are too many rows to resample.
        metrics: Metrics outside the catalogue.
    """

    groups: list[dict[str, float]]
    members: list[dict[str, float]]
    left_out: Sequence[int] = ()
    intervals: dict[str, Any] | None = None
    metrics: tuple[Metric, ...] = ()

    @property
    def ensemble(self) -> dict[str, float]:
        """Scores of the ensemble; of several groups their means. Empty if it was not scored."""
        return self._over_groups(np.mean)

    @property
    def mean_member(self) -> dict[str, float]:
        """Mean over the ensemble's members of each score that a member has."""
        members = [each for each in self.members if each["member_id"] not in self.left_out]
        names = [name for name in members[0] if name != "member_id"]
        return {name: float(np.mean([member[name] for member in members])) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Returns what files hold.

        Returns:
            `test` and `members`; of several groups `test_std`; intervals under `test_interval`,
            `mean_member_interval` and `members_interval`; and under `metrics` the descriptions of
            those outside the catalogue.
        """
        scores: dict[str, Any] = {"test": self.ensemble}
        if len(self.groups) > 1:
            scores["test_std"] = self._over_groups(np.std)
        scores["members"] = self.members
        if self.intervals is not None:
            scores["test_interval"] = self.intervals["ensemble"]
            scores["mean_member_interval"] = self.intervals["mean_member"]
            scores["members_interval"] = self.intervals["members"]
        if self.metrics:
            scores["metrics"] = {metric.name: metric.describe() for metric in self.metrics}
        return scores

    def table(self) -> "Table":
        """Returns the table of the screen, of a run whose `summary.json` has all members."""
        from dist_ens.metrics.table import scores_table  # Its rich is slow to import.

        return scores_table(
            self.ensemble,
            self.mean_member,
            self.members,
            len(self.groups),
            self.left_out,
            metrics=self.metrics,
        )

    def __repr__(self) -> str:
        """Returns the scores as a table of plain text, with at most 20 members."""
        from dist_ens.metrics.table import as_text, scores_table

        return as_text(
            scores_table(
                self.ensemble,
                self.mean_member,
                self.members,
                len(self.groups),
                self.left_out,
                metrics=self.metrics,
                title=None,
                others="in .members",
            )
        )

    def _over_groups(self, reduce: Any) -> dict[str, float]:
        names = self.groups[0]
        return {name: float(reduce([scores[name] for scores in self.groups])) for name in names}


def scores_of_means(
    member_ids: Sequence[int], sums: Mapping[str, np.ndarray], count: float
) -> Scores:
    """Returns the scores of members whose loss is a function, without an objective.

    Args:
        member_ids: Ids of the members.
        sums: Sums over the batches of the loss and of each auxiliary scalar, each times the number
            of examples of its batch, or their weight; float64[members] by name.
        count: Number of all examples, or their weight; positive.

    Returns:
        The means of each member and their mean. `ensemble` is empty: the members' outputs are not
        pooled, so nothing can be said of the ensemble.
    """
    members = [
        {"member_id": int(member_id)}
        | {name: float(values[position]) / count for name, values in sums.items()}
        for position, member_id in enumerate(member_ids)
    ]
    return Scores([{}], members)
