"""Reading of a checkpoint. Every host reads the parts that its own devices hold."""

import json
import math
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorstore as ts

from dist_ens.checkpoint.causes import is_of_disk
from dist_ens.checkpoint.digests import member_digests
from dist_ens.checkpoint.host_files import host_files_in, read_host_file
from dist_ens.checkpoint.lineage import Lineage
from dist_ens.checkpoint.manifest import MANIFEST, Manifest, files_in
from dist_ens.checkpoint.writing import ID_LEAF, STATE, database_spec
from dist_ens.file_reading import bytes_in, require_readable
from dist_ens.json_text import JsonDict
from dist_ens.layout import Reading
from dist_ens.paths import utf8_path

# Drivers by the name of the file that describes an array. The first version of dist_ens wrote
# `zarr`, which has no checksums.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}
# A new context sees the files as they are now. The cache holds the index, which every chunk needs.
# The number of parallel reads is that of Orbax, chosen for network disks.
_CONTEXT = {
    "cache_pool#index": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}
# Most bytes of a value that the database keeps in its compressed index, and not in a file as it is.
_LARGEST_INLINE = 1024
# Largest number of bytes to which zstd, which compressed the arrays of the driver `zarr`, expands
# one byte: four bytes stand for a block of 128 KiB (RFC 8878, section 3.1.1.2).
_LARGEST_PACKING = 2**15
# Record of a checkpoint that an older version wrote, and the key of its checksum.
_OLD_RECORD, _OLD_CHECKSUM = "run/metadata", "crc32"


class SavedArray:
    """A leaf of a saved state, or some members of it. Its values are not read yet.

    Args:
        name: Name of the leaf.
        array: Opened array of all members of the checkpoint.
        dtype: Type of the values. The array holds their bytes if TensorStore has no such type.
        manifest: Manifest of the checkpoint; None for one of the first format.
        positions: Positions of the members in `array`. Default: all.

    Attributes:
        shape: Shape of the leaf, members first.
    """

    def __init__(
        self,
        name: str,
        array: ts.TensorStore,
        dtype: np.dtype,
        manifest: Manifest | None,
        positions: Sequence[int] | None = None,
    ) -> None:
        self.name, self.array, self.dtype, self.manifest = name, array, dtype, manifest
        self.positions = range(array.shape[0]) if positions is None else positions
        self.shape = (len(self.positions), *array.shape[1:])

    def read(self, index: tuple[slice, ...]) -> Reading:
        """Begins to read a part. Only the bytes of its members are read.

        Args:
            index: Index of the part. It holds whole members.

        Returns:
            The part. Its `result` raises a `ValueError` if a member's values are missing, differ
            from those that were saved, or cannot be read.
        """
        return _Part(self, index)

    def read_whole(self) -> np.ndarray:
        """Returns all values of its members; see `read`."""
        return self.read(tuple(slice(None) for _ in self.shape)).result()


class _Part:
    """A part of a saved array that is being read; see `SavedArray.read`."""

    def __init__(self, array: SavedArray, index: tuple[slice, ...]) -> None:
        self._whole = array
        self._positions = positions = array.positions[index[0]]
        if isinstance(positions, range):
            first: slice | np.ndarray = slice(positions.start, positions.stop)
        else:
            first = np.asarray(positions)
        self._reading = array.array[(first, *index[1:])].read()
        self._checked: np.ndarray | None = None

    def result(self) -> np.ndarray:
        """Waits for the part, compares its digests, and returns it."""
        name, manifest = self._whole.name, self._whole.manifest
        if manifest is None:
            return self._reading.result()
        if self._checked is None:  # Several devices may hold the same part.
            try:
                part = self._reading.result()
                saved = manifest.leaves[name].digests
                is_sound = member_digests(part) == [saved[place] for place in self._positions]
            except ValueError as error:  # The checksum of a chunk, or the chunk, has changed.
                if is_of_disk(error):
                    raise
                is_sound = False
            if not is_sound:
                damaged = damaged_members(self._whole.array, name, manifest, self._positions)
                raise ValueError(
                    f"leaf {name} has changed in the members {damaged}"
                    if damaged
                    else f"leaf {name} was read twice with different values"
                )
            self._checked = part.view(self._whole.dtype)
        return self._checked


class SavedStep(Protocol):
    """A checkpoint whose record has been read.

    Attributes:
        run: Record of the run that the state belongs to.
        added: Paths of files that do not belong to the checkpoint. They are not read.
    """

    run: JsonDict
    added: list[str]

    @property
    def members(self) -> tuple[Lineage, ...]:
        """Lineage of each member, in the order of the state."""
        ...

    def open_arrays(self, positions: Sequence[int] | None = None) -> dict[str, SavedArray]:
        """Opens the arrays, and returns them by name. Their values are not read yet.

        Args:
            positions: Positions of the members to return. Default: all.

        Raises:
            ValueError: If the arrays differ from those that were saved.
            OSError: If a file cannot be read.
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
    if not is_of_first_format(path):
        raise ValueError(f"it has no {MANIFEST}")
    return _OldStep(path)


def is_of_first_format(path: pathlib.Path) -> bool:
    """Returns whether a checkpoint has the first format, which has no manifest.

    Raises:
        OSError: If the folder cannot be read.
    """
    return not (path / MANIFEST).exists() and (path / _OLD_RECORD).exists()


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
        self.members = self._manifest.members

    def open_arrays(self, positions: Sequence[int] | None = None) -> dict[str, SavedArray]:
        opened = open_arrays(self._path / STATE)
        check_arrays(opened, self._manifest)
        entries = self._manifest.leaves
        return {
            name: SavedArray(name, array, np.dtype(entries[name].dtype), self._manifest, positions)
            for name, array in opened.items()
        }

    def host_file(self, name: str, *, is_shared: bool) -> bytes | None:
        return read_host_file(self._path, name, self._manifest.files, is_shared=is_shared)


class _OldStep:
    """A checkpoint of the first format, which has no manifest; see `SavedStep`.

    Its record and its host files have checksums, and so has each chunk of an array. It does not say
    which step it is. The first version of dist_ens wrote no checksums at all.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        linked = next((name for name in files_in(path) if (path / name).is_symlink()), None)
        if linked is not None:
            raise ValueError(f"{linked} is a symbolic link")
        self.run = json.loads(bytes_in(path / _OLD_RECORD))
        self.added: list[str] = []
        written = self.run.pop(_OLD_CHECKSUM, None)
        if written is None and _has_checksums(path):
            raise ValueError(f"{_OLD_RECORD} has no checksum")
        if written not in (None, zlib.crc32(json.dumps(self.run).encode())):
            raise ValueError(f"{_OLD_RECORD} does not match its checksum")

    @property
    def members(self) -> tuple[Lineage, ...]:
        ids = open_arrays(self._path / STATE)[ID_LEAF].read().result()
        return tuple(map(Lineage, ids.tolist()))

    def open_arrays(self, positions: Sequence[int] | None = None) -> dict[str, SavedArray]:
        opened = open_arrays(self._path / STATE)
        return {
            name: SavedArray(name, array, array.dtype.numpy_dtype, None, positions)
            for name, array in opened.items()
        }

    def host_file(self, name: str, *, is_shared: bool) -> bytes | None:
        files = host_files_in(self._path)
        return read_host_file(self._path, name, files, is_shared=is_shared)


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

    Raises:
        ValueError: If the system cannot read the files.
    """
    damaged = []
    for place in positions:
        try:
            found = member_digests(array[place : place + 1].read().result())
        except ValueError as error:
            if is_of_disk(error):
                raise
            found = []
        if found != [manifest.leaves[name].digests[place]]:
            damaged.append(manifest.member_ids[place])
    return damaged


def check_arrays(opened: Mapping[str, ts.TensorStore], manifest: Manifest) -> None:
    """Raises a `ValueError` if the opened arrays are not those that a manifest lists."""
    num_members = len(manifest.member_ids)
    for name in sorted(opened.keys() | manifest.leaves.keys()):
        array, leaf = opened.get(name), manifest.leaves.get(name)
        if (
            array is None
            or leaf is None
            or array.shape != leaf.shape
            or array.dtype.name not in _stored_as(np.dtype(leaf.dtype))
        ):
            raise ValueError(f"the array of leaf {name} is not the one that was saved")
        if not array.shape[:1] == (len(leaf.digests),) == (num_members,):
            raise ValueError(f"leaf {name} has another number of members than {MANIFEST}")


def _stored_as(dtype: np.dtype) -> set[str]:
    """Returns the names of the types in which values may be stored; see `stored_dtype`.

    It depends on the TensorStore that has written them whether they are stored as bytes.
    """
    is_of_numpy = dtype.isbuiltin == 1
    return {dtype.name} if is_of_numpy or dtype.itemsize > 1 else {dtype.name, "uint8"}


def open_arrays(path: pathlib.Path, *, is_foreign: bool = False) -> dict[str, ts.TensorStore]:
    """Opens the arrays in a folder, and returns them by name. Their content is not read yet.

    Args:
        path: Folder of the arrays.
        is_foreign: Whether another program has written them with Orbax. It may have written them
            without a database, compressed them, and left out parts that are all zero.

    Raises:
        FileNotFoundError: If the folder has no arrays.
        ValueError: If a file is damaged, or the arrays are larger than their files.
    """
    for file in files_in(path):  # TensorStore would wait for the other end of a pipe.
        require_readable(path / file)
    context, place = ts.Context(_CONTEXT), ""
    database = {**database_spec(path), "cache_pool": "cache_pool#index"}
    if is_foreign and not (path / "manifest.ocdbt").exists():
        database, place = {"driver": "file"}, f"{utf8_path(path)}/"
    keys = ts.KvStore.open({**database, "path": place}, context=context).result().list().result()
    opened = {}
    for key in map(bytes.decode, keys):
        name, _, file = key.rpartition("/")
        if file in _DRIVERS:
            opened[name] = ts.open(
                {
                    "driver": _DRIVERS[file],
                    "kvstore": {**database, "path": f"{place}{name}/"},
                    # In a checkpoint of this package a missing chunk is damage.
                    "fill_missing_data_reads": is_foreign,
                },
                open=True,
                read=True,
                context=context,
            )
    if not opened:
        raise FileNotFoundError(f"no arrays in {path}")
    arrays = {name: array.result() for name, array in opened.items()}
    _require_sizes(path, arrays, len(keys), is_foreign=is_foreign)
    return arrays


def _require_sizes(
    path: pathlib.Path,
    arrays: Mapping[str, ts.TensorStore],
    num_keys: int,
    *,
    is_foreign: bool,
) -> None:
    """Checks that arrays are no larger than their files allow, before memory is allocated for them.

    TensorStore ends the process if it cannot allocate what a damaged description asks for.

    Args:
        path: Folder of the arrays.
        arrays: Opened arrays by name.
        num_keys: Number of keys in the database, at least one for each part of an array.
        is_foreign: Whether another program may have compressed them; see `open_arrays`.

    Raises:
        ValueError: If an array declares a part that is larger than the whole, or all arrays more
            bytes than the files can hold.
    """
    declared = 0
    for name, array in arrays.items():
        part = array.chunk_layout.write_chunk_template.shape
        if any(length > max(of_all, 1) for length, of_all in zip(part, array.shape, strict=True)):
            raise ValueError(
                f"leaf {name} declares parts of the shape {list(part)}, and its whole shape is "
                f"{list(array.shape)}"
            )
        is_packed = is_foreign or array.spec().to_json()["driver"] == "zarr"
        num_bytes = math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
        declared += num_bytes // _LARGEST_PACKING if is_packed else num_bytes
    in_files = sum((path / file).lstat().st_size for file in files_in(path))
    if declared > in_files + num_keys * _LARGEST_INLINE:
        raise ValueError(
            f"its arrays declare {declared:,} bytes, and their files have {in_files:,}"
        )


def _has_checksums(path: pathlib.Path) -> bool:
    """Returns whether the arrays of a checkpoint of the first format have checksums."""
    return json.loads(bytes_in(path / STATE / "_METADATA")).get("use_zarr3", False)
