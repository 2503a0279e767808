"""The lineage of a member: where it comes from, and what happened to it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, JsonDict

# Beginning of the event of a failed update.
FAILED = "failed: "


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to a member at a step: a clause such as "copied from runs/a"."""

    step: int
    what: str


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The lineage of a member, which stands beside its arrays in a checkpoint.

    Attributes:
        seed: Seed of the run that trained it; None if it was imported, or a loop of your own
            trained it.
        trained_id: Id that it had in that run. None if it is `member_id`.
        run: Folder of that run, or path that it was imported from.
        dropped_step: Step at which the policy `drop` gave the member up.

    >>> Lineage(4, seed=1).renamed(20).original_id
    4
    """

    member_id: int
    seed: int | None = None
    trained_id: int | None = None
    run: str | None = None
    events: tuple[Event, ...] = ()
    dropped_step: int | None = None

    @property
    def original_id(self) -> int:
        """Id of its training, on which its random numbers and order of the examples depend."""
        return self.member_id if self.trained_id is None else self.trained_id

    def is_of_other_run(self, seed: int | None) -> bool:
        """Returns whether the member was trained with another seed or id than it has in a run."""
        return (self.seed, self.original_id) != (seed, self.member_id)

    def renamed(self, member_id: int) -> Self:
        """Returns the lineage of the same member with another id."""
        return dataclasses.replace(self, member_id=member_id, trained_id=self.original_id)

    def after(self, event: Event) -> Self:
        """Returns the lineage with one more event."""
        return dataclasses.replace(self, events=(*self.events, event))

    def to_dict(self) -> JsonDict:
        """Returns the fields by name, in types that JSON can hold."""
        return {**dataclasses.asdict(self), "trained_id": self.original_id}

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> Self:
        """Returns the lineage that `to_dict` wrote, also after a round trip through JSON."""
        events = tuple(Event(**event) for event in values["events"])
        return cls(**{**values, "events": events})


def positions_of(member_ids: Sequence[int], members: Sequence[Lineage]) -> list[int]:
    """Returns the positions of members by their ids."""
    known = {member.member_id: position for position, member in enumerate(members)}
    asked = {*member_ids}
    if not asked or len(asked) < len(member_ids) or not asked <= known.keys():
        raise UserError(
            f"The run has the members {ids_text(known)}, and {str(list(member_ids))[:200]} were "
            "asked for. Give some of its members, each once."
        )
    return [known[member_id] for member_id in member_ids]


def ids_text(member_ids: Iterable[int]) -> str:
    """Returns ids as a text, in which three or more ids in a row are a range.

    >>> ids_text([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9, 10'
    """
    runs: list[list[int]] = []
    for member_id in member_ids:
        if runs and member_id == runs[-1][-1] + 1:
            runs[-1].append(member_id)
        else:
            runs.append([member_id])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)
