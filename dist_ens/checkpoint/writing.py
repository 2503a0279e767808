"""Atomic writing of a checkpoint, of which every host writes its own part.

Each host writes the parts of its arrays into its own database (OCDBT of TensorStore), and computes
their digests from the same memory. Process 0 writes into the database of the whole checkpoint, adds
references to the other databases when they are complete, and writes the manifest. All of this
happens in a folder with a temporary name, which process 0 renames at the end. A checkpoint with its
final name is therefore complete and on disk. If one host fails, all hosts fail, and none waits for
it. Process 0 says through the coordination service of `jax.distributed` that the checkpoint is
complete, since a host may see the folders of a network disk later than process 0 does.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np
import tensorstore as ts

from dist_ens import cluster
from dist_ens.checkpoint.digests import ByMember, member_digests
from dist_ens.checkpoint.host_files import host_file_contents
from dist_ens.checkpoint.lineage import Lineage
from dist_ens.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    LeafEntry,
    Manifest,
    entries_of,
    files_as_json,
    files_from_json,
    files_in,
)
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import Piece
from dist_ens.paths import utf8_path

# A folder that is not finished, or no checkpoint any more. Orbax ignores a name with this end, too.
_UNFINISHED = re.compile(r"[0-9]+\.dist_ens-[0-9a-f]+-[0-9]+\.orbax-checkpoint-tmp")
STATE = "state"
_OF_HOST = "ocdbt.process_"
_WRITTEN_BY = "written_by_host_"
ID_LEAF = "member_id"  # Leaf that holds the ids of the members.
_IDS = "ids of members"  # It has spaces, so that no leaf has this name.
_COMPLETE = "dist_ens/complete"  # Folder of the coordination service; see `_say_complete`.
_PATIENCE_SECS = 600  # Time limit for a host that writes its part slowly.
_WITH_A_CHECKSUM = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Without a common context, each array would have a separate database and transaction.
_CONTEXT = ts.Context()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a state.

    Attributes:
        shape: Shape of the whole array.
        dtype: Type of its elements.
        pieces: Parts of the array that this host writes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[Piece]


def unfinished_name(step: int, token: str) -> str:
    """Returns a name for the folder of a checkpoint that is not finished.

    Args:
        step: Step of the checkpoint.
        token: Token of a save; see `write_checkpoint`.

    >>> unfinished_name(500, "0a1b2c3d-4")
    '500.dist_ens-0a1b2c3d-4.orbax-checkpoint-tmp'
    """
    return f"{step}.dist_ens-{token}.orbax-checkpoint-tmp"


def write_checkpoint(
    folder: pathlib.Path,
    step: int,
    state: Mapping[str, Leaf],
    record: Mapping[str, Json],
    host_files: Mapping[str, bytes],
    *,
    scores: Mapping[str, float],
    token: str,
    lineage_of: Callable[[int], Lineage] = Lineage,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Writes the checkpoint of a step and waits until it is on disk. Every host must call this.

    Args:
        folder: Folder of the checkpoints, which must exist.
        step: Number of updates that the state has seen, which names the checkpoint.
        state: Leaves of the state, by name.
        record: Description of the run, in types that JSON can hold.
        host_files: Bytes that belong to this host, by name.
        scores: Scores of the ensemble at this step, by name.
        token: Hexadecimal digits, a dash and a number, which no other save in this folder has. They
            are the same on every host.
        lineage_of: Function that returns the lineage of the member with an id.
        before: Function that is called before anything is written.

    Raises:
        OSError: If another host could not write its part. An error of this host is raised
            unchanged.
    """
    name = unfinished_name(step, token)
    whole, unfinished = folder / str(step), folder / name
    arrays, here = unfinished / STATE, jax.process_index()
    with (
        _ended_on_all(f"all hosts know of {name}"),  # Until then, process 0 must not end.
        _complete_on_all(name),
        _ended_on_all(f"{name} is whole"),
    ):
        with _ended_on_all(f"the parts of {name}"):
            before()
            if cluster.is_main():
                remove_unfinished(folder, apart_from=name)
            # The fastest host makes them. If the parent is gone, the folder of the run was removed.
            folder.mkdir(exist_ok=True)
            unfinished.mkdir(exist_ok=True)
            arrays.mkdir(exist_ok=True)
            written = host_file_contents(host_files)
            for path, content in written.items():
                (unfinished / path).parent.mkdir(exist_ok=True)
                _write(unfinished / path, content)
            digests = _digests_of(state)
            if cluster.is_main():
                _write_json(arrays / "_METADATA", _description(state))
                _write_arrays(arrays, state)
            else:
                of_host = f"{STATE}/{_OF_HOST}{here}"
                _write_arrays(unfinished / of_host, state)
                # A host that holds the same members as an earlier one writes no arrays.
                has_arrays = (unfinished / of_host).is_dir()
                own_arrays = files_in(unfinished, of_host) if has_arrays else ()
                own = entries_of(unfinished, (*written, *own_arrays))
                part = {"digests": digests.to_dict(), "files": files_as_json(own)}
                _write_json(unfinished / f"{_WRITTEN_BY}{here}", part)
        if cluster.is_main():
            others = _parts_of_others(unfinished, digests)
            _take_up_others(arrays)
            of_others = tuple(f"{STATE}/{_OF_HOST}{host}/" for host in range(jax.process_count()))
            own_files = [
                path for path in files_in(unfinished, STATE) if not path.startswith(of_others)
            ]
            files = others | entries_of(unfinished, (*written, *own_files))
            manifest = _manifest_of(step, record, scores, state, digests, files, lineage_of)
            _write(unfinished / MANIFEST, manifest.to_bytes())
            _sync(arrays)
            _finish(unfinished, whole)
            _say_complete(name)


def give_up_checkpoint(path: pathlib.Path, token: str) -> None:
    """Marks a checkpoint for deletion. `remove_unfinished` deletes it later.

    The best moment to delete it is just before the next save, whose files then reuse the memory
    that the deletion frees. A virtual machine returns free memory to its host. Requesting it again
    took twice as long as the rest of a save.

    Args:
        path: Folder of the checkpoint.
        token: Token of the save after which it is marked; see `write_checkpoint`.
    """
    path.rename(path.with_name(unfinished_name(int(path.name), token)))
    _sync(path.parent)


def remove_unfinished(folder: pathlib.Path, *, apart_from: str | None = None) -> None:
    """Deletes the checkpoints that are marked for deletion, or were not written completely.

    Only folders with the names that this package gives them are deleted. A symbolic link is left
    alone. What cannot be deleted only takes room, so that it is no error.

    Args:
        folder: Folder of the checkpoints.
        apart_from: Name of a folder that other hosts may be writing already. None for none.
    """
    with contextlib.suppress(OSError):  # Somebody may have removed the folder itself.
        for path in folder.iterdir():
            if is_unfinished(path) and path.name != apart_from:
                shutil.rmtree(path, ignore_errors=True)


def is_unfinished(path: pathlib.Path) -> bool:
    """Returns whether a path is that of a checkpoint that `remove_unfinished` deletes."""
    is_ours = _UNFINISHED.fullmatch(path.name) is not None
    return is_ours and path.is_dir() and not path.is_symlink()


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a damaged checkpoint, so that it is no checkpoint any more, and returns its new path.

    Args:
        path: Folder of the checkpoint. Nothing in it is changed.
    """
    names = itertools.chain(
        (f"{path.name}.damaged",), (f"{path.name}.damaged-{n}" for n in itertools.count(2))
    )
    free = next(new for new in map(path.with_name, names) if not os.path.lexists(new))
    path.rename(free)
    _sync(path.parent)
    return free


def _finish(unfinished: pathlib.Path, whole: pathlib.Path) -> None:
    """Gives a complete checkpoint its final name, or leaves it unfinished."""
    _sync(unfinished)
    unfinished.rename(whole)
    try:
        _sync(whole.parent)
    except OSError:  # All hosts must agree that this is no checkpoint.
        whole.rename(unfinished)
        raise


def _say_complete(name: str) -> None:
    """Says to the other hosts that a checkpoint is complete. Process 0 calls this.

    Args:
        name: Name of its unfinished folder, which no other save has.
    """
    if jax.process_count() > 1:
        # Every host has read the word on an earlier save when it begins with this one.
        cluster.client().key_value_delete(_COMPLETE)
        cluster.client().key_value_set(f"{_COMPLETE}/{name}", "complete")


@contextlib.contextmanager
def _complete_on_all(name: str) -> Iterator[None]:
    """Raises an `OSError` at its end unless process 0 has said that a checkpoint is complete."""
    yield
    if jax.process_count() > 1:
        said = cluster.client().key_value_dir_get(_COMPLETE)
        if f"{_COMPLETE}/{name}" not in [key for key, _ in said]:
            raise OSError("the checkpoint is not complete: another host could not write its part")


def _digests_of(state: Mapping[str, Leaf]) -> ByMember:
    """Returns the digests of this host's pieces by leaf, and the members' ids as `_IDS`."""
    found = ByMember()
    for name, leaf in state.items():
        for piece in leaf.pieces:
            values, first = np.asarray(piece.array), piece.index[0].start or 0
            found.add(name, first, member_digests(values))
            if name == ID_LEAF:
                found.add(_IDS, first, values.tolist())
    return found


def _manifest_of(
    step: int,
    record: Mapping[str, Json],
    scores: Mapping[str, float],
    state: Mapping[str, Leaf],
    found: ByMember,
    files: Mapping[str, FileEntry],
    lineage_of: Callable[[int], Lineage],
) -> Manifest:
    """Returns the manifest of a checkpoint.

    Args:
        step: Step of the checkpoint.
        record: Description of the run.
        scores: Scores of the ensemble at this step, by name.
        state: Leaves of the state, by name.
        found: Digests by leaf, and ids, of all members.
        files: Entries of all files.
        lineage_of: Function that returns the lineage of the member with an id.
    """
    num_members = next(iter(state.values())).shape[0]
    return Manifest(
        step,
        record,
        scores,
        tuple(map(lineage_of, found.of(_IDS) or range(num_members))),
        {
            name: LeafEntry(np.dtype(leaf.dtype).name, leaf.shape, found.of(name))
            for name, leaf in state.items()
        },
        files,
    )


def _write_arrays(path: pathlib.Path, state: Mapping[str, Leaf]) -> None:
    """Writes this host's pieces as Zarr arrays, in one transaction of a database in a folder."""
    transaction = ts.Transaction()
    opened = {
        name: ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**_new_database_spec(path), "path": f"{name}/"},
                # Compression would save 7 % of trained weights and take half the time of a save.
                "metadata": {"codecs": [_by_member(leaf.shape)]},
                "store_data_equal_to_fill_value": True,  # Then a missing chunk is damage.
            },
            create=True,
            dtype=ts.dtype(stored_dtype(leaf.dtype)),
            shape=leaf.shape,
            chunk_layout=ts.ChunkLayout(write_chunk_shape=_not_empty(leaf.pieces[0].array.shape)),
            context=_CONTEXT,
            transaction=transaction,
        )
        for name, leaf in state.items()
        if leaf.pieces
    }
    pieces = [(opened[name], piece) for name, leaf in state.items() for piece in leaf.pieces]
    for written in [
        array.result()[piece.index].write(
            np.asarray(piece.array).view(array.result().dtype.numpy_dtype),
            can_reference_source_data_indefinitely=True,  # Nothing changes it, so no copy is made.
        )
        for array, piece in pieces
    ]:
        written.result()
    transaction.commit_async().result()


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type in which values are stored: their own, or bytes if TensorStore lacks it.

    Each type that it lacks, such as uint4, has one byte for an element in NumPy.

    Args:
        dtype: Type of the values.
    """
    try:
        ts.dtype(dtype)
    except (TypeError, ValueError):
        return np.dtype(np.uint8)
    return np.dtype(dtype)


def _not_empty(shape: Iterable[int]) -> list[int]:
    """Returns a shape in which axes of length 0 have length 1, as Zarr requires of a part."""
    return [max(length, 1) for length in shape]


def _by_member(shape: tuple[int, ...]) -> JsonDict:
    """Returns the codec of Zarr by which a part of an array is stored member by member.

    Each member's values can then be read alone, with their own checksum.
    """
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *_not_empty(shape[1:])],
            "codecs": _WITH_A_CHECKSUM,
            "index_codecs": _WITH_A_CHECKSUM,
        },
    }


def _parts_of_others(unfinished: pathlib.Path, digests: ByMember) -> dict[str, FileEntry]:
    """Returns the entries of the other hosts' files, and adds the digests of their pieces.

    Raises:
        OSError: If a host has not said that its part is complete.
    """
    marks = {host: unfinished / f"{_WRITTEN_BY}{host}" for host in range(1, jax.process_count())}
    failed = [host for host, mark in marks.items() if not mark.exists()]
    if failed:
        raise OSError(
            f"the part of host {', '.join(map(str, failed))} is missing: that host could not write "
            "it, or has another folder of the same name"
        )
    files: dict[str, FileEntry] = {}
    for mark in marks.values():
        part = json.loads(mark.read_bytes())
        digests.merge(part["digests"])
        files |= files_from_json(part["files"])
        mark.unlink()
    return files


def _take_up_others(path: pathlib.Path) -> None:
    """Adds references to the other hosts' databases in a folder to the database of the whole."""
    others = list(path.glob(f"{_OF_HOST}*"))
    if not others:
        return
    transaction = ts.Transaction(atomic=True)

    def opened(folder: pathlib.Path) -> ts.KvStore:
        return ts.KvStore.open(_new_database_spec(folder), context=_CONTEXT).result()

    whole = opened(path).with_transaction(transaction)
    for taken in [opened(other).experimental_copy_range_to(whole) for other in others]:
        taken.result()
    transaction.commit_async().result()


def database_spec(folder: pathlib.Path) -> JsonDict:
    """Returns TensorStore's specification of the database in a folder."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{utf8_path(folder)}/"}}


def _new_database_spec(folder: pathlib.Path) -> JsonDict:
    """Returns TensorStore's specification for writing the database in a folder."""
    # The index then holds the descriptions of the arrays, and its pages have checksums.
    return {**database_spec(folder), "config": {"max_inline_value_bytes": 1024}}


def _description(names: Iterable[str]) -> JsonDict:
    """Returns the content of the file that Orbax reads before a flat dict of arrays."""
    entry = {"value_type": "jax.Array", "skip_deserialize": False}
    return {
        "tree_metadata": {
            str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": entry}
            for name in names
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _write_json(path: pathlib.Path, value: Json) -> None:
    _write(path, json.dumps(value).encode())


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    path.write_bytes(content)
    _sync(path)
    _sync(path.parent)


def _sync(path: pathlib.Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ended_on_all(name: str) -> Iterator[None]:
    """Waits at its end until its body has ended on every host, with or without an error.

    The devices are not involved, so training continues.
    """

    def wait() -> None:
        import orbax.checkpoint as ocp  # The import takes a quarter of a second.

        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * _PATIENCE_SECS)

    try:
        yield
    except jax.errors.JaxRuntimeError:  # Another host did not reach a barrier, and never will.
        raise
    except BaseException:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # The first error is reported.
            wait()
        raise
    wait()
