"""Scores on the screen."""

from collections.abc import Collection, Mapping, Sequence

from rich.table import Table

from dist_ens.report.files import SUMMARY

_MEMBERS_SHOWN = 20
# Of the scores in the summary those in the table on the screen.
_SHOWN = ("accuracy", "nll", "brier", "ece", "rmse", "mae", "crps", "pinball", "coverage")


def told(scores: Mapping[str, float], name: str) -> str:
    """A score in a few digits: of classes four after the point, in a target's own unit four."""
    return f"{scores[name]:{'.4f' if 'accuracy' in scores else '.4g'}}"


def scores_table(
    ensemble: Mapping[str, float],
    mean_member: Mapping[str, float],
    members: Sequence[Mapping[str, float]],
    num_groups: int = 1,
    left_out: Collection[int] = (),
) -> Table:
    """The table at the end of a run: the ensemble, the mean member, and the members.

    Args:
        ensemble: A number for each score, of which some are shown; of several groups the mean of
            theirs.
        mean_member: Likewise.
        members: Likewise of each, with its `member_id`.
        num_groups: Of members, each an ensemble.
        left_out: Ids of members that are not of the ensemble.
    """
    shown = [name for name in _SHOWN if name in ensemble]
    table = Table(title="test split", title_justify="left")
    table.add_column("")
    for name in shown:
        table.add_column(name, justify="right")

    def row(label: str, scores: Mapping[str, float], style: str | None = None) -> None:
        table.add_row(label, *(told(scores, name) for name in shown), style=style)

    size = (len(members) - len(left_out)) // num_groups
    mean_of = f"mean of {num_groups} groups, " if num_groups > 1 else ""
    row(f"{mean_of}ensemble of {size}", ensemble, "bold")
    row("mean member", mean_member)
    table.add_section()
    for member in members[:_MEMBERS_SHOWN]:
        out = ", left out" if member["member_id"] in left_out else ""
        row(f"member {int(member['member_id'])}{out}", member, "dim")
    if len(members) > _MEMBERS_SHOWN:
        table.add_row(f"… {len(members) - _MEMBERS_SHOWN} more in {SUMMARY}", style="dim")
    return table
