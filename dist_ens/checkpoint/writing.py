"""Atomic writing of a checkpoint, of which every host writes its own part.

Each host writes the parts of its arrays into its own database, and computes their digests from the
same memory. Process 0 writes into the database of the whole checkpoint, adds references to the
other databases when they are complete, and writes the manifest. All of this happens in a folder
with a temporary name, which process 0 renames at the end. A checkpoint with its final name is
therefore complete and on disk. If one host fails, all hosts fail, and none waits for it. Process 0
says through the coordination service of `jax.distributed` that the checkpoint is complete, since a
host may see the folders of a network disk later than process 0 does.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from dist_ens.checkpoint.arrays import (
    add_databases,
    member_digests,
    orbax_description,
    write_arrays,
)
from dist_ens.checkpoint.lineage import Lineage
from dist_ens.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    LeafEntry,
    Manifest,
    entries_of,
    files_in,
)
from dist_ens.checkpoint.record import seed_of
from dist_ens.checkpoint.snapshot import Leaf, Snapshot
from dist_ens.ground.json_text import Json
from dist_ens.processes import cluster

# A folder that is not finished, or no checkpoint any more. Orbax ignores a name with this end, too.
_UNFINISHED = re.compile(r"[0-9]+\.dist_ens-[0-9a-f]+-[0-9]+\.orbax-checkpoint-tmp")
FOLDER, STATE, HOST_FILES = "checkpoints", "state", "host_files"
_OF_HOST = "ocdbt.process_"
_WRITTEN_BY = "written_by_host_"
ID_LEAF = "member_id"  # Leaf that holds the ids of the members.
_IDS = "ids of members"  # It has spaces, so that no leaf has this name.
_COMPLETE = "dist_ens/complete"  # Folder of the coordination service; see `_say_complete`.
_PATIENCE_SECS = 600  # Time limit for a host that writes its part slowly.
# A process writes one checkpoint at a time. An interrupted run may have left a thread that still
# writes its last one.
_WRITING = threading.RLock()  # A callback may look at the run in the thread that saves.
# Numbers by name and by position of the member in the state, such as digests by leaf.
_ByMember = dict[str, dict[int, int]]


def unfinished_name(step: int, token: str) -> str:
    """Returns a name for the folder of a checkpoint that is not finished."""
    return f"{step}.dist_ens-{token}.orbax-checkpoint-tmp"


def wait_for_writing() -> None:
    """Waits for a checkpoint that an interrupted run of this process is still writing."""
    with _WRITING:
        pass


def write_checkpoint(
    folder: pathlib.Path,
    snapshot: Snapshot,
    token: str,
    *,
    first: Callable[[], None] = lambda: None,
) -> bool:
    """Writes a checkpoint and waits until it is on disk. Every host must call this.

    It returns whether the checkpoint was to be written, as the snapshot's `before` says. No other
    save in this folder has the token, which is the same on every host. `first` is called before. An
    `OSError` of it, or of another host, is raised on every host.
    """
    name = unfinished_name(snapshot.step, token)
    unfinished = folder / name
    with (
        _WRITING,
        _ended_on_all(f"all hosts know of {name}"),  # Until then, process 0 must not end.
        _complete_on_all(name),
        _ended_on_all(f"{name} is whole"),
    ):
        with _ended_on_all(f"the parts of {name}"):
            first()
            files_before = snapshot.before()
            if files_before is None:  # Only a single host may say so.
                return False
            host_files = {**snapshot.host_files, **files_before}
            if cluster.is_main():
                remove_unfinished(folder, apart_from=name)
            # The fastest host makes them. If the parent is gone, the folder of the run was removed.
            for made in (folder, unfinished, unfinished / STATE):
                made.mkdir(exist_ok=True)
            digests, files = _write_part(unfinished, snapshot.leaves, host_files)
        if cluster.is_main():
            files |= _take_up_others(unfinished, digests)
            manifest = _manifest_of(folder, snapshot, digests, files)
            _write(unfinished / MANIFEST, manifest.to_bytes())
            _sync(unfinished / STATE)
            _finish(unfinished, folder / str(snapshot.step))
            _say_complete(name)
    return True


def give_up_checkpoint(path: pathlib.Path, token: str) -> None:
    """Marks a checkpoint for deletion. `remove_unfinished` deletes it later.

    Files of the next save then reuse the memory that the deletion frees. To request it again took
    twice as long as the rest of a save. The token is that of the save which has just ended.
    """
    path.rename(path.with_name(unfinished_name(int(path.name), token)))
    _sync(path.parent)


def remove_unfinished(folder: pathlib.Path, *, apart_from: str | None = None) -> None:
    """Deletes the checkpoints that are marked for deletion, or were not written completely.

    Other hosts may be writing into `apart_from` already. What cannot be deleted only takes room.
    """
    with contextlib.suppress(OSError):  # Somebody may have removed the folder itself.
        for path in folder.iterdir():
            is_ours = _UNFINISHED.fullmatch(path.name) and path.name != apart_from
            if is_ours and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a damaged checkpoint, in which nothing is changed, and returns its new path."""
    ends = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{end}") for end in ends)
    free = next(new for new in names if not os.path.lexists(new))
    path.rename(free)
    _sync(path.parent)
    return free


def _write_part(
    unfinished: pathlib.Path, leaves: Mapping[str, Leaf], host_files: Mapping[str, bytes]
) -> tuple[_ByMember, dict[str, FileEntry]]:
    """Writes this host's part, and returns its digests and the entries of its files.

    Another host than process 0 writes both into a file for it.
    """
    here = jax.process_index()
    if host_files:
        (unfinished / HOST_FILES).mkdir(exist_ok=True)
    written = {f"{HOST_FILES}/{name}.{here}": host_files[name] for name in host_files}
    for path, content in written.items():
        _write(unfinished / path, content)
    digests = _digests_of(leaves)
    if cluster.is_main():
        _write_json(unfinished / STATE / "_METADATA", orbax_description(leaves))
        write_arrays(unfinished / STATE, leaves)
        return digests, entries_of(unfinished, written)
    own = f"{STATE}/{_OF_HOST}{here}"
    write_arrays(unfinished / own, leaves)
    # A host that holds the same members as an earlier one writes no arrays.
    arrays = files_in(unfinished, own) if (unfinished / own).is_dir() else ()
    entries = entries_of(unfinished, (*written, *arrays))
    files = {path: entry._asdict() for path, entry in entries.items()}
    _write_json(unfinished / f"{_WRITTEN_BY}{here}", {"digests": digests, "files": files})
    return digests, entries


def _take_up_others(unfinished: pathlib.Path, digests: _ByMember) -> dict[str, FileEntry]:
    """Adds the other hosts' arrays and digests to those of process 0, and returns all entries."""
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
        for name, numbers in part["digests"].items():
            digests.setdefault(name, {}).update({int(place): n for place, n in numbers.items()})
        files |= {path: FileEntry(**entry) for path, entry in part["files"].items()}
        mark.unlink()
    databases = list((unfinished / STATE).glob(f"{_OF_HOST}*"))
    if databases:
        add_databases(unfinished / STATE, databases)
    whole = [path for path in files_in(unfinished, STATE) if path not in files]
    return files | entries_of(unfinished, whole)


def _digests_of(leaves: Mapping[str, Leaf]) -> _ByMember:
    """Returns the digests of this host's pieces by leaf, and the members' ids as `_IDS`."""
    found: _ByMember = {}
    for name, leaf in leaves.items():
        for piece in leaf.pieces:
            values, first = np.asarray(piece.array), piece.index[0].start or 0
            found.setdefault(name, {}).update(enumerate(member_digests(values), start=first))
            if name == ID_LEAF:
                found.setdefault(_IDS, {}).update(enumerate(values.tolist(), start=first))
    return found


def _manifest_of(
    folder: pathlib.Path,
    snapshot: Snapshot,
    digests: _ByMember,
    files: Mapping[str, FileEntry],
) -> Manifest:
    """Returns the manifest of a checkpoint, given the digests and files of all hosts."""
    num_members = next(iter(snapshot.leaves.values())).shape[0]
    ids = [digests[_IDS][place] for place in range(num_members)] if _IDS in digests else None
    seed, run = seed_of(snapshot.record), str(folder.parent)
    return Manifest(
        snapshot.step,
        snapshot.record,
        jax.process_count(),
        snapshot.scores,
        tuple(
            snapshot.lineages.get(each, Lineage(each, seed=seed, run=run))
            for each in (range(num_members) if ids is None else ids)
        ),
        {
            name: LeafEntry(
                np.dtype(leaf.dtype).name,
                leaf.shape,
                tuple(crc32 for _, crc32 in sorted(digests.get(name, {}).items())),
            )
            for name, leaf in snapshot.leaves.items()
        },
        files,
    )


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
    """Says to the other hosts, on process 0, that a checkpoint is complete."""
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


@contextlib.contextmanager
def _ended_on_all(name: str) -> Iterator[None]:
    """Waits at its end, without the devices, until its body has ended on every host."""

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
