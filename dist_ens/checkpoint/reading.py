"""Reading of a checkpoint. Every host reads the parts that its own devices hold."""

import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
import tensorstore as ts

from dist_ens.checkpoint.digests import member_digests
from dist_ens.checkpoint.host_files import read_host_file
from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.checkpoint.writing import STATE, database_spec
from dist_ens.json_text import JsonDict
from dist_ens.layout import Reading, read_onto_devices

# Drivers by the name of the file that describes an array. The first version of dist_ens wrote
# `zarr`, which has no checksums.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}
# A new context sees the files as they are now. The cache holds the index, which every chunk needs.
# The number of parallel reads is that of Orbax, chosen for network disks.
_CONTEXT = {
    "cache_pool#index": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}
# Record of a checkpoint that an older version wrote, and the key of its checksum.
_OLD_RECORD, _OLD_CHECKSUM = "run/metadata", "crc32"


class SavedStep(Protocol):
    """A checkpoint whose record has been read.

    Attributes:
        run: Record of the run that the state belongs to.
        added: Paths of files that do not belong to the checkpoint. They are not read.
    """

    run: JsonDict
    added: list[str]

    def open_arrays(self) -> dict[str, ts.TensorStore]:
        """Opens the arrays, and returns them by name.

        Raises:
            ValueError: If the arrays differ from those that were saved.
            OSError: If a file cannot be read.
        """
        ...

    def read_arrays(
        self,
        opened: Mapping[str, ts.TensorStore],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Reads opened arrays onto devices, each part once.

        Args:
            opened: Arrays from `open_arrays`, by name.
            abstract: Shape, type and sharding of each array, by name.

        Raises:
            ValueError: If a part is missing, or differs from what was saved.
        """
        ...

    def host_file(self, name: str, *, is_shared: bool) -> bytes | None:
        """Returns the bytes that this host saved under a name; see `read_host_file`."""
        ...


def open_step(path: pathlib.Path) -> SavedStep:
    """Reads the record of a checkpoint, and checks its files.

    The arrays are not read yet.

    Args:
        path: Folder of the checkpoint, which is named after its step.

    Raises:
        ValueError: If a file is damaged or missing, or the record is that of another step.
        OSError: If a file cannot be read.
    """
    if (path / MANIFEST).exists():
        return _Step(path)
    if not (path / _OLD_RECORD).exists():
        raise ValueError(f"it has no {MANIFEST}")
    return _OldStep(path)


class _Step:
    """A checkpoint with a manifest; see `SavedStep`."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._manifest = Manifest.read(path)
        self.run = dict(self._manifest.run)
        changed = next(self._manifest.changed_files(path, hashes_data=False), None)
        if changed is not None:
            raise ValueError(changed)
        self.added = self._manifest.added_files(path)

    def open_arrays(self) -> dict[str, ts.TensorStore]:
        opened = open_arrays(self._path / STATE)
        check_arrays(opened, self._manifest)
        return opened

    def read_arrays(
        self,
        opened: Mapping[str, ts.TensorStore],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        def read(name: str, index: tuple[slice, ...]) -> Reading:
            return _CheckedPart(name, self._manifest, opened[name], index)

        return read_onto_devices(abstract, read)

    def host_file(self, name: str, *, is_shared: bool) -> bytes | None:
        return read_host_file(self._path, name, self._manifest.files, is_shared=is_shared)


class _OldStep:
    """A checkpoint of the first format, which has no manifest; see `SavedStep`.

    Its record and its host files have checksums, and so has each chunk of an array. It does not say
    which step it is. The first version of dist_ens wrote no checksums at all.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.run = json.loads((path / _OLD_RECORD).read_bytes())
        self.added: list[str] = []
        written = self.run.pop(_OLD_CHECKSUM, None)
        if written is None and _has_checksums(path):
            raise ValueError(f"{_OLD_RECORD} has no checksum")
        if written not in (None, zlib.crc32(json.dumps(self.run).encode())):
            raise ValueError(f"{_OLD_RECORD} does not match its checksum")

    def open_arrays(self) -> dict[str, ts.TensorStore]:
        return open_arrays(self._path / STATE)

    def read_arrays(
        self,
        opened: Mapping[str, ts.TensorStore],
        abstract: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        return read_onto_devices(abstract, lambda name, index: opened[name][index].read())

    def host_file(self, name: str, *, is_shared: bool) -> bytes | None:
        folder = self._path / "host_files"
        files = [f"host_files/{path.name}" for path in folder.glob("*")]
        return read_host_file(self._path, name, files, is_shared=is_shared)


class _CheckedPart:
    """A part of an array that is being read, and whose digests are compared when it is there.

    Args:
        name: Name of the leaf.
        manifest: Manifest of the checkpoint.
        array: Opened array.
        index: Index of the part. It holds whole members.

    Raises:
        ValueError: When `result` is called, if a member's values differ from those that were saved.
    """

    def __init__(
        self, name: str, manifest: Manifest, array: ts.TensorStore, index: tuple[slice, ...]
    ) -> None:
        self._name, self._manifest, self._array = name, manifest, array
        self._positions = range(array.shape[0])[index[0]]
        self._reading = array[index].read()
        self._checked: np.ndarray | None = None

    def result(self) -> np.ndarray:
        """Waits for the part, compares its digests, and returns it."""
        if self._checked is None:  # Several devices may hold the same part.
            try:
                part = self._reading.result()
                saved = self._manifest.leaves[self._name].digests
                is_sound = member_digests(part) == [saved[place] for place in self._positions]
            except ValueError:  # The checksum of a chunk, or the chunk itself, has changed.
                is_sound = False
            if not is_sound:
                damaged = damaged_members(self._array, self._name, self._manifest, self._positions)
                raise ValueError(
                    f"leaf {self._name} has changed in the members {damaged}"
                    if damaged
                    else f"leaf {self._name} was read twice with different values"
                )
            self._checked = part
        return self._checked


def damaged_members(
    array: ts.TensorStore, name: str, manifest: Manifest, positions: Sequence[int]
) -> list[int]:
    """Returns the ids of the members whose values differ from those that were saved.

    Each member is read alone, because TensorStore does not say which part of an array it cannot
    read.

    Args:
        array: Opened array.
        name: Name of the leaf.
        manifest: Manifest of the checkpoint.
        positions: Positions of the members to read.
    """
    damaged = []
    for place in positions:
        try:
            found = member_digests(array[place : place + 1].read().result())
        except ValueError:
            found = []
        if found != [manifest.leaves[name].digests[place]]:
            damaged.append(manifest.member_ids[place])
    return damaged


def check_arrays(opened: Mapping[str, ts.TensorStore], manifest: Manifest) -> None:
    """Raises a `ValueError` if the opened arrays are not those that a manifest lists."""
    there = {name: (array.dtype.name, array.shape) for name, array in opened.items()}
    listed = {name: (leaf.dtype, leaf.shape) for name, leaf in manifest.leaves.items()}
    for name in sorted(there.keys() | listed.keys()):
        if there.get(name) != listed.get(name):
            raise ValueError(f"the array of leaf {name} is not the one that was saved")


def open_arrays(path: pathlib.Path) -> dict[str, ts.TensorStore]:
    """Opens the arrays in a folder, and returns them by name. Their content is not read yet.

    Raises:
        FileNotFoundError: If the folder has no arrays.
        ValueError: If a file is damaged.
    """
    context = ts.Context(_CONTEXT)
    database = {**database_spec(path), "cache_pool": "cache_pool#index"}
    keys = ts.KvStore.open(database, context=context).result().list().result()
    opened = {}
    for key in map(bytes.decode, keys):
        name, _, file = key.rpartition("/")
        if file in _DRIVERS:
            opened[name] = ts.open(
                {
                    "driver": _DRIVERS[file],
                    "kvstore": {**database, "path": f"{name}/"},
                    "fill_missing_data_reads": False,  # A missing chunk is damage, not zeros.
                },
                open=True,
                read=True,
                context=context,
            )
    if not opened:
        raise FileNotFoundError(f"no arrays in {path}")
    return {name: array.result() for name, array in opened.items()}


def _has_checksums(path: pathlib.Path) -> bool:
    """Returns whether the arrays of a checkpoint of the first format have checksums."""
    return json.loads((path / STATE / "_METADATA").read_bytes()).get("use_zarr3", False)
