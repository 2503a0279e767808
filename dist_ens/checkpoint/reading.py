"""Reading of a checkpoint. Every host reads the parts that its own devices hold."""

import base64
import errno
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from dist_ens.checkpoint.arrays import SavedArray, open_arrays
from dist_ens.checkpoint.leaves import check_leaves, named_leaves, state_of
from dist_ens.checkpoint.lineage import positions_of
from dist_ens.checkpoint.manifest import Manifest, is_finished, steps_in
from dist_ens.checkpoint.writing import HOST_FILES, STATE
from dist_ens.ground.causes import NO_DAMAGE, explained
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, ReplacedError, RunError, UserError, counted
from dist_ens.ground.types import Tree
from dist_ens.layout import read_onto_devices
from dist_ens.storage import Place

T = TypeVar("T")


class SavedStep:
    """A checkpoint whose record has been read, and whose files have been compared with it.

    The arrays are not read yet. All its methods raise a `RunError` if the checkpoint is damaged,
    with the exit code `DAMAGED`, or was deleted meanwhile.
    """

    def __init__(self, checkpoint: Place) -> None:
        self._place = checkpoint
        self._manifest = self._reported(lambda: _compared(checkpoint))
        self._data = self._manifest.data_in(checkpoint)
        self.step, self.members = self._manifest.step, self._manifest.members
        self.run = dict(self._manifest.run)

    def state(self, abstract: Tree, *others: Tree, member_ids: Sequence[int] | None = None) -> Tree:
        """Returns the state with the shardings of `abstract`. Each part of it is read once.

        If another of the structures has the names of the saved leaves, that one is used. Of some
        members, in the order of their ids, only their bytes are read.
        """
        positions = self._positions(member_ids)

        def read() -> Tree:
            arrays = open_saved(self._data, self._manifest, positions)
            fitting = [each for each in others if named_leaves(each).keys() == arrays.keys()]
            like = fitting[-1] if fitting else abstract
            named = named_leaves(like)
            check_leaves(str(self._place), arrays, named)
            onto = read_onto_devices(named, lambda name, index: arrays[name].read(index))
            return state_of(onto, like)

        return self._reported(read)

    def leaves(
        self, member_ids: Sequence[int] | None = None, under: str = ""
    ) -> dict[str, np.ndarray]:
        """Returns the leaves of the state by name, in this process's memory; see `state`.

        Only those whose names begin with `under` are read. The rest of their names is returned.
        """
        positions = self._positions(member_ids)

        def read() -> dict[str, np.ndarray]:
            arrays = open_saved(self._data, self._manifest, positions).items()
            found = {name: array for name, array in arrays if name.startswith(under)}
            return {name.removeprefix(under): array.read_whole() for name, array in found.items()}

        return self._reported(read)

    def host_file(self, name: str, *, is_shared: bool = False) -> bytes | None:
        """Returns the bytes that this host saved under a name; None if it saved none.

        If they are shared, and another number of hosts wrote them, those of process 0 are returned.
        """
        host, num_hosts = jax.process_index(), self._manifest.num_hosts
        path = f"{HOST_FILES}/{name}"
        if path not in self._manifest.files:
            return None
        if num_hosts != jax.process_count():
            if not is_shared:
                raise RunError(
                    f"{quoted(str(self._place))} was saved by {counted(num_hosts, 'host')}, each "
                    f"with its own {name!r}, and this run has "
                    f"{counted(jax.process_count(), 'host')}. Resume on as many hosts as before."
                )
            host = 0

        def read() -> bytes | None:
            content = self._data.read(path)
            if zlib.crc32(content) != self._manifest.files[path].crc32:
                raise ValueError(f"the file {path} has changed")
            text = json.loads(content).get(str(host))
            return None if text is None else base64.b64decode(text)

        return self._reported(read)

    def _positions(self, member_ids: Sequence[int] | None) -> list[int] | None:
        """Returns the positions of members; None for all of them in order."""
        if member_ids is None or [*member_ids] == [each.member_id for each in self.members]:
            return None
        return positions_of(member_ids, self.members)

    def _reported(self, read: Callable[[], T]) -> T:
        """Returns what a function reads, and raises its errors as those of this checkpoint.

        An input/output error may pass. It counts as damage only if a second read fails, too.
        """
        try:
            try:
                return read()
            except (OSError, ValueError) as error:
                if explained(error).code != errno.EIO:
                    raise
                return read()
        except (UserError, RunError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # TensorStore has no special error type for damage.
            raise error_of_reading(self._place, error) from error


def error_of_reading(checkpoint: Place, error: Exception) -> RunError:
    """Returns an error of reading a checkpoint as one that says whether the content is damaged."""
    why, path = explained(error), checkpoint.address
    if is_gone(checkpoint):
        return ReplacedError(
            f"The checkpoint {quoted(path)} does not exist any more: a run that is training has "
            "replaced it. Run the same command again."
        )
    if why.code in NO_DAMAGE:
        return RunError(
            f"The checkpoint {quoted(path)} cannot be read: {why.what}. {why.remedy}, then run the "
            "same command again."
        )
    older = [step for step in steps_in(checkpoint.parent) if step < int(checkpoint.name)]
    remedy = (
        f"Give step={older[-1]} (--step={older[-1]} on the command line) to use the step before "
        "it; training does so by itself."
        if older
        else "It is the only one: restore its files, or move it away to train anew."
    )
    return RunError(
        f"The checkpoint {quoted(path)} is damaged: {why.what}. {remedy}",
        exit_code=ExitCode.DAMAGED,
    )


def _compared(checkpoint: Place) -> Manifest:
    """Returns the manifest of a checkpoint after a comparison of its files with it.

    Of the files of the arrays only the sizes are compared. The arrays have digests of their own.
    """
    manifest = Manifest.read(checkpoint)
    data = manifest.data_in(checkpoint)
    there = {*data.names()}
    for name in sorted(manifest.files):
        fault = manifest.fault_of_file(data, name, there, hashes_data=False)
        if fault is not None:
            raise ValueError(fault)
    return manifest


def open_saved(
    data: Place, manifest: Manifest, positions: Sequence[int] | None = None
) -> Mapping[str, SavedArray]:
    """Opens the arrays of a checkpoint, or some members of them, and returns them by name."""
    opened, ids = open_arrays(data / STATE), [member.member_id for member in manifest.members]
    entries = manifest.leaves
    for name in sorted(opened.keys() | entries.keys()):
        array, entry = opened.get(name), entries.get(name)
        if array is None or entry is None or array.shape != entry.shape:
            raise ValueError(f"the array of leaf {name} is not the one that was saved")
    return {
        name: SavedArray(name, array, entries[name], ids, positions)
        for name, array in opened.items()
    }


def is_gone(checkpoint: Place) -> bool:
    """Returns whether a run has deleted a checkpoint, as far as the system can tell."""
    try:
        names = checkpoint.names()
    except OSError:  # The disk cannot be read now.
        return False
    return not names or not is_finished(names, is_local=checkpoint.is_local)
