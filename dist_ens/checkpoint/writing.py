"""Atomic writing of a checkpoint, of which every host writes its own part.

Each host writes the parts of its arrays into its own database, and computes their digests from the
same memory. Process 0 writes into the database of the whole checkpoint, adds references to the
other databases when they are complete, and writes the manifest last. With its manifest a checkpoint
is complete and stored. Before anything else, process 0 writes a file that says that the checkpoint
is unfinished. What has that file and no manifest is deleted later. If one host fails, all hosts
fail, and none waits for it. Process 0 says through the coordination service of `jax.distributed`
that the checkpoint is complete, since a host may see the files of a network disk later than process
0 does.

In a bucket, a process that was stopped for long may go on after another has taken over its run. So
each save there has a folder of its own, and of two manifests of a step only the first is written.
"""

import base64
import contextlib
import dataclasses
import errno
import itertools
import json
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
    MARKS,
    UNFINISHED,
    FileEntry,
    LeafEntry,
    Manifest,
    entries_of,
    files_by_step,
    is_finished,
)
from dist_ens.checkpoint.record import seed_of
from dist_ens.checkpoint.snapshot import Leaf, Snapshot
from dist_ens.processes import cluster
from dist_ens.storage import ABSENT, Place

FOLDER, STATE, HOST_FILES = "checkpoints", "state", "host_files"
_OF_HOST = "ocdbt.process_"
_WRITTEN_BY = "written_by_host_"
ID_LEAF = "member_id"  # Leaf that holds the ids of the members.
_IDS = "ids of members"  # It has spaces, so that no leaf has this name.
_COMPLETE = "dist_ens/complete"  # Folder of the coordination service; see `_say_complete`.
_UNFINISHED = b"This checkpoint is not complete, or is to be deleted.\n"
_PATIENCE_SECS = 600  # Time limit for a host that writes its part slowly.
# A process writes one checkpoint at a time. An interrupted run may have left a thread that still
# writes its last one.
_WRITING = threading.RLock()  # A callback may look at the run in the thread that saves.
# Numbers by name and by position of the member in the state, such as digests by leaf.
_ByMember = dict[str, dict[int, int]]


def wait_for_writing() -> None:
    """Waits for a checkpoint that an interrupted run of this process is still writing."""
    with _WRITING:
        pass


def write_checkpoint(
    run: Place, snapshot: Snapshot, token: str, *, renew: Callable[[], None] = lambda: None
) -> bool:
    """Writes a checkpoint and waits until it is stored. Every host must call this.

    It returns whether the checkpoint was to be written, as the snapshot's `before` says. No other
    save of this run has the token, which is the same on every host. `renew` raises an `OSError`
    where the run is not that of this process any more. An `OSError` of one host is raised on all.
    """
    name = f"{snapshot.step}-{token}"
    checkpoint = run / FOLDER / str(snapshot.step)
    data = checkpoint if run.is_local else checkpoint / token
    with (
        _WRITING,
        _ended_on_all(f"all hosts know of {name}"),  # Until then, process 0 must not end.
        _complete_on_all(name),
        _ended_on_all(f"{name} is whole"),
    ):
        with _ended_on_all(f"the parts of {name}"):
            with _ended_on_all(f"the place of {name}"):
                renew()
                files_before = snapshot.before()
                if files_before is None:  # Only a single host may say so.
                    return False
                if cluster.is_main():
                    _make_place(run / FOLDER, checkpoint)
            host_files = {**snapshot.host_files, **files_before}
            digests = _write_part(data, snapshot.leaves, host_files)
        if cluster.is_main():
            files = _take_up_others(data, digests, host_files)
            manifest = _manifest_of(run, snapshot, digests, files)
            if data is not checkpoint:
                manifest = dataclasses.replace(manifest, prefix=token)
                renew()
            _finish(checkpoint, manifest)
            _say_complete(name)
    return True


def give_up_checkpoint(checkpoint: Place) -> None:
    """Marks a checkpoint for deletion. `remove_unfinished` deletes it later.

    Files of the next save then reuse the memory that the deletion frees. To request it again took
    twice as long as the rest of a save.
    """
    checkpoint.write(UNFINISHED, _UNFINISHED)
    checkpoint.remove(MANIFEST)


def remove_unfinished(checkpoints: Place) -> None:
    """Deletes the checkpoints that are marked for deletion, or were not written completely.

    What cannot be deleted only takes room.
    """
    with contextlib.suppress(OSError):  # Somebody may have removed the folder itself.
        for step, names in files_by_step(checkpoints).items():
            with contextlib.suppress(OSError):
                if not is_finished(names, is_local=checkpoints.is_local):
                    (checkpoints / str(step)).remove_all(last=UNFINISHED)
                else:
                    for name in MARKS & names:
                        (checkpoints / str(step)).remove(name)


def set_aside(checkpoint: Place) -> Place:
    """Renames a damaged checkpoint, in which nothing is changed, and returns its new place."""
    ends = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    places = (checkpoint.parent / f"{checkpoint.name}.damaged{end}" for end in ends)
    free = next(place for place in places if not place.names())
    checkpoint.move_to(free)
    return free


def _make_place(checkpoints: Place, checkpoint: Place) -> None:
    """Deletes what is unfinished, and says of a new checkpoint that it is."""
    remove_unfinished(checkpoints)
    if checkpoint.names():  # The folder may have been replaced by that of another run.
        raise OSError(errno.EEXIST, f"there is a folder of step {checkpoint.name} already")
    checkpoint.write(UNFINISHED, _UNFINISHED)


def _write_part(
    data: Place, leaves: Mapping[str, Leaf], host_files: Mapping[str, bytes]
) -> _ByMember:
    """Writes this host's arrays, and returns their digests.

    Another host than process 0 writes into a file for it the digests, the entries of its files and
    its own bytes.
    """
    here = jax.process_index()
    digests = _digests_of(leaves)
    if cluster.is_main():
        write_arrays(data / STATE, leaves)
        data.write(f"{STATE}/_METADATA", json.dumps(orbax_description(leaves)).encode())
        return digests
    own = f"{STATE}/{_OF_HOST}{here}"
    write_arrays(data / own, leaves)
    # A host that holds the same members as an earlier one writes no arrays.
    entries = entries_of(data, data.names(own))
    files = {name: entry._asdict() for name, entry in entries.items()}
    mark = {"digests": digests, "files": files, "host_files": _encoded(host_files)}
    data.write(f"{_WRITTEN_BY}{here}", json.dumps(mark).encode())
    return digests


def _encoded(host_files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns bytes by name as texts of JSON."""
    return {name: base64.b64encode(content).decode() for name, content in host_files.items()}


def _take_up_others(
    data: Place, digests: _ByMember, host_files: Mapping[str, bytes]
) -> dict[str, FileEntry]:
    """Adds the parts of the other hosts to that of process 0, and returns the entries of all files.

    Bytes of the hosts under one name are in one file.
    """
    files: dict[str, FileEntry] = {}
    by_host = {name: {"0": text} for name, text in _encoded(host_files).items()}
    for host in range(1, jax.process_count()):
        mark, tag = data.read_tagged(f"{_WRITTEN_BY}{host}")
        if tag == ABSENT:
            raise OSError(
                f"the part of host {host} is missing: that host could not write it, or has another "
                "folder of the same name"
            )
        part = json.loads(mark)
        for name, numbers in part["digests"].items():
            digests.setdefault(name, {}).update({int(place): n for place, n in numbers.items()})
        files |= {path: FileEntry(**entry) for path, entry in part["files"].items()}
        for name, text in part["host_files"].items():
            by_host.setdefault(name, {})[str(host)] = text
        data.remove(f"{_WRITTEN_BY}{host}")
    for name, texts in by_host.items():
        data.write(f"{HOST_FILES}/{name}", json.dumps(texts).encode())
    there = data.names(STATE)
    databases = sorted({name.split("/")[1] for name in there if f"/{_OF_HOST}" in name})
    if databases:
        add_databases(data / STATE, [data / STATE / name for name in databases])
        for name in databases:  # The whole database refers to the files of their arrays.
            roots = f"{STATE}/{name}/manifest.ocdbt"
            data.remove(roots)
            del files[roots]
        there = data.names(STATE)
    return files | entries_of(data, {*there, *data.names(HOST_FILES)} - files.keys())


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
    run: Place, snapshot: Snapshot, digests: _ByMember, files: Mapping[str, FileEntry]
) -> Manifest:
    """Returns the manifest of a checkpoint, given the digests and files of all hosts."""
    num_members = next(iter(snapshot.leaves.values())).shape[0]
    ids = [digests[_IDS][place] for place in range(num_members)] if _IDS in digests else None
    seed = seed_of(snapshot.record)
    return Manifest(
        snapshot.step,
        snapshot.record,
        jax.process_count(),
        snapshot.scores,
        tuple(
            snapshot.lineages.get(each, Lineage(each, seed=seed, run=run.address))
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


def _finish(checkpoint: Place, manifest: Manifest) -> None:
    """Writes the manifest of a checkpoint, or leaves the checkpoint unfinished."""
    try:
        is_first = checkpoint.write_if(MANIFEST, manifest.to_bytes(), ABSENT) is not None
    except OSError:  # All hosts must agree that this is no checkpoint.
        with contextlib.suppress(OSError):
            checkpoint.remove(MANIFEST)
        raise
    if not is_first:
        raise OSError(errno.EEXIST, "another run has saved this step meanwhile")
    with contextlib.suppress(OSError):  # The next save tries it again.
        checkpoint.remove(UNFINISHED)


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
