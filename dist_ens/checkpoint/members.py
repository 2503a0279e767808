"""Members of saved runs, read and written by their ids, without the program that trained them."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from dist_ens.checkpoint.lineage import Event, Lineage, positions_of
from dist_ens.checkpoint.newest import moving_on
from dist_ens.checkpoint.record import seed_of
from dist_ens.checkpoint.store import FOLDER, CheckpointStore
from dist_ens.checkpoint.writing import (
    ID_LEAF,
    Leaf,
    is_unfinished,
    remove_unfinished,
    write_checkpoint,
)
from dist_ens.commands import quoted
from dist_ens.errors import RunError, UserError, code_of_write
from dist_ens.json_text import JsonDict
from dist_ens.layout import Piece

_FAILURES = "failures."  # Start of the names of the leaves that record failed updates.


@dataclasses.dataclass(frozen=True)
class SavedMembers:
    """Members of a saved run, in the memory of this process.

    Attributes:
        step: Number of updates that they have seen.
        record: Record of their run, in types that JSON can hold.
        lineages: Lineage of each member.
        leaves: Leaves of the state by name, [members, ...]. A PRNG key is its key data.
    """

    step: int
    record: JsonDict
    lineages: tuple[Lineage, ...]
    leaves: Mapping[str, np.ndarray]

    @property
    def member_ids(self) -> list[int]:
        """Ids of the members, in the order of the leaves."""
        return [member.member_id for member in self.lineages]

    def select(self, member_ids: Sequence[int]) -> "SavedMembers":
        """Returns some of the members, in the order of the given ids.

        Raises:
            UserError: If an id is not there, is given twice, or none is given.
        """
        positions = positions_of(member_ids, self.lineages)
        return dataclasses.replace(
            self,
            lineages=tuple(self.lineages[position] for position in positions),
            leaves={name: leaf[positions] for name, leaf in self.leaves.items()},
        )

    def renamed(self, member_ids: Sequence[int]) -> "SavedMembers":
        """Returns the same members with other ids."""
        ids = np.asarray(member_ids, self.leaves[ID_LEAF].dtype)
        pairs = zip(self.lineages, member_ids, strict=True)
        return dataclasses.replace(
            self,
            lineages=tuple(member.renamed(member_id) for member, member_id in pairs),
            leaves={**self.leaves, ID_LEAF: ids},
        )

    def joined(self, other: "SavedMembers") -> "SavedMembers":
        """Returns these members and then others, with the step and the record of these.

        If only one of them has a record of failed updates, as their policies for failures differ,
        the others get an empty one.

        Raises:
            UserError: If a leaf has another shape or type in the other members.
        """
        ours, theirs = (
            _with_records(self.leaves, other.leaves),
            _with_records(other.leaves, self.leaves),
        )
        for name in sorted(ours.keys() | theirs.keys()):
            here, there = _type_of(ours.get(name)), _type_of(theirs.get(name))
            if here != there:
                raise UserError(
                    f"The members cannot be joined: leaf {name} is {here} in one run and {there} "
                    "in the other. Join members of one architecture and one optimizer."
                )
        return dataclasses.replace(
            self,
            lineages=(*self.lineages, *other.lineages),
            leaves={name: np.concatenate([leaf, theirs[name]]) for name, leaf in ours.items()},
        )

    def after(self, what: str) -> "SavedMembers":
        """Returns the members with one more event in their lineages.

        Args:
            what: Clause that says what happened to them, such as "selected from runs/a".
        """
        event = Event(self.step, what)
        return dataclasses.replace(
            self, lineages=tuple(member.after(event) for member in self.lineages)
        )


def read_members(
    folder: str | os.PathLike[str],
    step: int | None = None,
    member_ids: Sequence[int] | None = None,
) -> SavedMembers:
    """Reads members of a saved run. Only their bytes are read, and every byte is checked.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint. Default: the newest.
        member_ids: Ids of the members, in the order of the result. Default: all.

    Raises:
        UserError: If there is no checkpoint, none of that step, or an id is not in it.
        RunError: If the checkpoint is damaged.
    """
    return moving_on(step, lambda: members_at(*saved_step(folder, step), member_ids))


def read_lineages(
    folder: str | os.PathLike[str], step: int | None = None
) -> tuple[int, tuple[Lineage, ...]]:
    """Returns the step of a checkpoint and the lineage of each member; see `read_members`."""

    def read() -> tuple[int, tuple[Lineage, ...]]:
        store, at = saved_step(folder, step)
        return at, lineages_at(store, at)

    return moving_on(step, read)


def members_at(
    store: CheckpointStore, step: int, member_ids: Sequence[int] | None = None
) -> SavedMembers:
    """Reads members in a checkpoint; see `read_members`."""
    record, lineages = store.restore_run(step), lineages_at(store, step)
    if member_ids is not None:
        lineages = tuple(lineages[position] for position in positions_of(member_ids, lineages))
    return SavedMembers(step, record, lineages, store.restore_leaves(step, member_ids))


def lineages_at(store: CheckpointStore, step: int) -> tuple[Lineage, ...]:
    """Returns the lineage of each member in a checkpoint; see `Lineage.begun_in`."""
    run, seed = str(store.workdir.resolve()), seed_of(store.restore_run(step))
    return tuple(each.begun_in(run, seed) for each in store.members(step))


def saved_step(
    folder: str | os.PathLike[str], step: int | None = None
) -> tuple[CheckpointStore, int]:
    """Returns the checkpoints of a run, and a step of them; see `CheckpointStore.result_step`.

    Raises:
        UserError: If there is no checkpoint, or none of that step.
    """
    store = CheckpointStore(folder, read_only=True)
    if store.latest_step() is None:
        raise UserError(
            f"There is no checkpoint in {quoted(folder)}. Give the folder of a run, which has a "
            f"folder {FOLDER}/."
        )
    if step is None:
        for sentence in store.unread_steps():
            logging.warning(sentence)
        step = store.result_step()
    store.require_step(step)
    return store, step


def write_members(
    folder: pathlib.Path, members: SavedMembers, *, before: Callable[[], None] = lambda: None
) -> None:
    """Writes members as the only checkpoint of a new run.

    Args:
        folder: Folder of the new run; see `require_new_folder`.
        members: Members, with the record of the new run.
        before: Function that writes other files of the run, before the checkpoint is written. An
            `OSError` of it counts as one of writing.

    Raises:
        RunError: If the system cannot write the checkpoint.
    """
    known = {member.member_id: member for member in members.lineages}
    try:
        checkpoints = folder.resolve() / FOLDER
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_checkpoint(
            checkpoints,
            members.step,
            {
                name: Leaf(leaf.shape, leaf.dtype, [Piece((slice(None),) * leaf.ndim, leaf)])
                for name, leaf in members.leaves.items()
            },
            members.record,
            {},
            scores={},
            token=f"{os.urandom(4).hex()}-1",
            lineage_of=known.__getitem__,
            before=before,
        )
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError.
        remove_unfinished(folder.resolve() / FOLDER)
        raise RunError(
            f"The members could not be written to {quoted(folder)}: {error}. Remove the cause, and "
            "run the same command again.",
            exit_code=code_of_write(error),
        ) from error


def require_new_folder(
    folder: pathlib.Path, *, may_hold: Collection[str] = (), files: Collection[str] = ()
) -> None:
    """Raises a `UserError` unless a folder can take a new run.

    It can if it is empty or does not exist yet, or if `write_members` was interrupted in it.

    Args:
        folder: Folder of the new run.
        may_hold: Names of other entries that it may have.
        files: Names of the files that the `before` of `write_members` writes.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(
            f"{quoted(folder)} is a file or a link, and not a folder. Give another folder."
        )
    others = {path.name for path in folder.iterdir()} - {*may_hold} if folder.is_dir() else set()
    if others and not (others <= {FOLDER, *files} and _is_begun(folder / FOLDER)):
        raise UserError(
            f"{quoted(folder)} is not empty, and members are written into new folders only. Give "
            "another folder."
        )


def _is_begun(checkpoints: pathlib.Path) -> bool:
    """Returns whether a folder of checkpoints has unfinished ones at most.

    A run that trains has a lock beside it, so that its folder is not taken for such a one.
    """
    is_folder = checkpoints.is_dir() and not checkpoints.is_symlink()
    return is_folder and all(map(is_unfinished, checkpoints.iterdir()))


def _with_records(
    leaves: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the leaves of members, with the record of failed updates that other members have.

    The record of a member without a failed update is zero in all its leaves.
    """
    num_members = len(leaves[ID_LEAF])
    empty = {
        name: np.zeros((num_members, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in others.items()
        if name.startswith(_FAILURES)
    }
    return {**empty, **leaves}


def _type_of(leaf: np.ndarray | None) -> str:
    """Returns the type and shape of a leaf of one member, such as `float32[3, 2]`."""
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape[1:])}"
