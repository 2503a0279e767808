"""Members of saved runs, read and written by their ids, without the program that trained them."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from dist_ens.checkpoint.lineage import Event, Lineage, positions_of
from dist_ens.checkpoint.manifest import steps_in
from dist_ens.checkpoint.newest import moving_on, saved_step
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.checkpoint.snapshot import Leaf, Snapshot
from dist_ens.checkpoint.writing import FOLDER, ID_LEAF, remove_unfinished, write_checkpoint
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, code_of_write
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import finished_leaves
from dist_ens.layout import Piece
from dist_ens.storage import Folder, Place


@dataclasses.dataclass(frozen=True)
class SavedMembers:
    """Members of a saved run in memory: leaves [members, ...] by name, where keys are integers.

    `host_files` are those of a `Snapshot` that is made of them.
    """

    step: int
    record: JsonDict
    lineages: tuple[Lineage, ...]
    leaves: Mapping[str, np.ndarray]
    host_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def member_ids(self) -> list[int]:
        """Ids of the members, in the order of the leaves."""
        return [member.member_id for member in self.lineages]

    def renamed(self, member_ids: Sequence[int]) -> "SavedMembers":
        """Returns the same members with other ids."""
        ids = np.asarray(member_ids, self.leaves[ID_LEAF].dtype)
        pairs = zip(self.lineages, member_ids, strict=True)
        return dataclasses.replace(
            self,
            lineages=tuple(member.renamed(member_id) for member, member_id in pairs),
            leaves={**self.leaves, ID_LEAF: ids},
        )

    def joined(self, *others: "SavedMembers") -> "SavedMembers":
        """Returns these members and then others, with the step and the record of these.

        If the updates of some of them only were checked, the others have no failures.
        """
        groups = (self, *others)
        likes = {name: like for group in groups for name, like in group.leaves.items()}

        def leaf(group: SavedMembers, name: str) -> np.ndarray:
            if name in group.leaves or not name.startswith("failures."):
                return group.leaves[name]
            return np.zeros((len(group.lineages), *likes[name].shape[1:]), likes[name].dtype)

        return dataclasses.replace(
            self,
            lineages=tuple(lineage for group in groups for lineage in group.lineages),
            leaves={n: np.concatenate([leaf(group, n) for group in groups]) for n in likes},
        )

    def after(self, what: str) -> "SavedMembers":
        """Returns the members with one more event in their lineages, given as a clause."""
        event = Event(self.step, what)
        return dataclasses.replace(
            self, lineages=tuple(member.after(event) for member in self.lineages)
        )


def read_members(
    folder: Folder,
    step: int | None = None,
    member_ids: Sequence[int] | None = None,
) -> SavedMembers:
    """Reads members of a saved run, by default all at the newest step. Every byte is checked."""
    return moving_on(step, lambda: members_at(saved_step(folder, step), member_ids))


def read_lineages(folder: Folder, step: int | None = None) -> tuple[int, tuple[Lineage, ...]]:
    """Returns the step of a checkpoint and the lineage of each member; see `read_members`."""
    saved = moving_on(step, lambda: saved_step(folder, step))
    return saved.step, saved.members


def members_at(saved: SavedStep, member_ids: Sequence[int] | None = None) -> SavedMembers:
    """Reads members in a checkpoint; see `read_members`."""
    lineages = saved.members
    if member_ids is not None:
        lineages = tuple(lineages[position] for position in positions_of(member_ids, lineages))
    return SavedMembers(saved.step, saved.run, lineages, finished_leaves(saved.leaves(member_ids)))


def write_members(
    run: Place, members: SavedMembers, *, before: Callable[[], None] = lambda: None
) -> None:
    """Writes members as the only checkpoint of a new run, after the files that `before` writes."""
    snapshot = Snapshot(
        members.step,
        {
            name: Leaf(leaf.shape, leaf.dtype, [Piece((slice(None),) * leaf.ndim, leaf)])
            for name, leaf in members.leaves.items()
        },
        members.record,
        lineages={member.member_id: member for member in members.lineages},
        host_files=members.host_files,
    )
    try:
        (run / FOLDER).make()
        before()
        write_checkpoint(run, snapshot, os.urandom(4).hex())
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError.
        remove_unfinished(run / FOLDER)
        raise RunError(
            f"The members could not be written to {quoted(run)}: {error}. Remove the cause, and "
            "run the same command again.",
            exit_code=code_of_write(error),
        ) from error


def require_new_folder(run: Place, may_hold: Collection[str]) -> None:
    """Raises a `UserError` unless a folder can take a new run.

    It can if it is empty or absent, or if `write_members` was interrupted in it.
    """
    others = {name.partition("/")[0] for name in run.names()} - {FOLDER, *may_hold}
    if others or steps_in(run / FOLDER):
        raise UserError(
            f"{quoted(run)} is not empty, and members are written into new folders only. Give "
            "another folder."
        )
    run.require_writable(is_new=True)
