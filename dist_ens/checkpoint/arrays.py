"""The arrays of a checkpoint: Zarr arrays in a database (OCDBT) of TensorStore, which Orbax reads.

Each member's part of an array is a chunk with a checksum of its own, so that it is read alone.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorstore as ts

from dist_ens.checkpoint.manifest import LeafEntry
from dist_ens.checkpoint.snapshot import Leaf
from dist_ens.ground.causes import is_of_disk
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Array
from dist_ens.layout import Reading
from dist_ens.storage import RETRIES, Place

_WITH_A_CHECKSUM = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Without a common context, each array would have a separate database and transaction.
_WRITING = ts.Context(RETRIES)
# A new context sees the files as they are now. The cache holds the index, which every chunk needs.
# The number of parallel reads is that of Orbax, chosen for network disks.
_READING = {
    **RETRIES,
    "cache_pool#index": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}
# Drivers by the name of the file that describes an array. Orbax may write `zarr`.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}


def member_digests(part: Array) -> list[int]:
    """Returns the CRC-32 of each member's values in C order, given an array [members, ...].

    It finds every change of up to 32 bits in a row, and misses any other change once in 2^32 times.
    It is the fastest digest of Python's library.
    """
    rows = np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8)
    return [zlib.crc32(row.data) for row in rows]


def write_arrays(place: Place, leaves: Mapping[str, Leaf]) -> None:
    """Writes this host's pieces as Zarr arrays, in one transaction of a database in a folder."""
    transaction, spec = ts.Transaction(), _new_database_spec(place)
    opened = {
        name: ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**spec, "path": f"{name}/"},
                # Compression would save 7 % of trained weights and take half the time of a save.
                "metadata": {"codecs": [_by_member(leaf.shape)]},
                "store_data_equal_to_fill_value": True,  # Then a missing chunk is damage.
            },
            create=True,
            dtype=ts.dtype(_stored_dtype(leaf.dtype)),
            shape=leaf.shape,
            chunk_layout=ts.ChunkLayout(write_chunk_shape=_not_empty(leaf.pieces[0].array.shape)),
            context=_WRITING,
            transaction=transaction,
        )
        for name, leaf in leaves.items()
        if leaf.pieces
    }
    pieces = [(opened[name], piece) for name, leaf in leaves.items() for piece in leaf.pieces]
    for written in [
        array.result()[piece.index].write(
            np.asarray(piece.array).view(array.result().dtype.numpy_dtype),
            can_reference_source_data_indefinitely=True,  # Nothing changes it, so no copy is made.
        )
        for array, piece in pieces
    ]:
        written.result()
    transaction.commit_async().result()


def add_databases(place: Place, others: Sequence[Place]) -> None:
    """Adds references to the databases in other folders to the one in a folder."""
    transaction = ts.Transaction(atomic=True)

    def opened(folder: Place) -> ts.KvStore:
        return ts.KvStore.open(_new_database_spec(folder), context=_WRITING).result()

    whole = opened(place).with_transaction(transaction)
    for added in [opened(other).experimental_copy_range_to(whole) for other in others]:
        added.result()
    transaction.commit_async().result()


def orbax_description(names: Iterable[str]) -> JsonDict:
    """Returns the content of the file `_METADATA` that Orbax reads before a flat dict of arrays."""
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


def open_arrays(folder: Place, *, is_foreign: bool = False) -> dict[str, ts.TensorStore]:
    """Opens the arrays in a folder, and returns them by name. Their content is not read yet.

    Another program may have written them with Orbax without a database, and left out zeros.
    """
    context, place = ts.Context(_READING), ""
    database = {**database_spec(folder), "cache_pool": "cache_pool#index"}
    if is_foreign and "manifest.ocdbt" not in folder.names():
        database, place = database["base"], database["base"]["path"]
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
                    # Nothing in a finished checkpoint changes, so no request asks whether it has.
                    "recheck_cached_metadata": False,
                    "recheck_cached_data": False,
                },
                open=True,
                read=True,
                context=context,
            )
    if not opened:
        raise FileNotFoundError(f"no arrays in {folder}")
    return {name: array.result() for name, array in opened.items()}


class SavedArray:
    """A leaf of a saved state, or some members of it. Its values are not read yet.

    The array holds bytes where TensorStore lacks the leaf's type. Other programs write no `entry`.
    """

    def __init__(
        self,
        name: str,
        array: ts.TensorStore,
        entry: LeafEntry | None = None,
        member_ids: Sequence[int] = (),
        positions: Sequence[int] | None = None,
    ) -> None:
        places = range(len(member_ids)) if positions is None else positions
        self._name, self._array = name, array if positions is None else array[[*positions]]
        self._digests = None if entry is None else [entry.crc32[place] for place in places]
        self._ids = [member_ids[place] for place in places]
        self.shape = self._array.shape
        self.dtype = array.dtype.numpy_dtype if entry is None else np.dtype(entry.dtype)

    def read(self, index: tuple[slice, ...]) -> Reading:
        """Begins to read a part of whole members. Only their bytes are read.

        Its `result` raises a `ValueError` if values differ from those that were saved.
        """
        return _Part(self, self._array[index].read(), index[0])

    def read_whole(self) -> np.ndarray:
        """Returns all values of its members; see `read`."""
        return self.read(tuple(slice(None) for _ in self.shape)).result()

    def values_of(self, reading: Reading, members: slice) -> np.ndarray:
        """Waits for the values of some members, compares their digests, and returns them."""
        if self._digests is None:
            return reading.result()
        values = self._sound(reading, members)
        if values is None:
            damaged = self.damaged_members(members)
            raise ValueError(f"leaf {self._name} has changed in the members {damaged}")
        return values.view(self.dtype)

    def damaged_members(self, members: slice = slice(None)) -> list[int]:
        """Returns the ids of those of some members whose values differ from those that were saved.

        Each is read alone, because TensorStore does not say which part of an array it cannot read.
        """
        if self._sound(self._array[members].read(), members) is not None:
            return []
        places = range(*members.indices(len(self._ids)))
        ones = [(place, slice(place, place + 1)) for place in places]
        return [
            self._ids[place]
            for place, one in ones
            if self._sound(self._array[one].read(), one) is None
        ]

    def _sound(self, reading: Reading, members: slice) -> np.ndarray | None:
        """Returns the values of some members; None if they differ from those that were saved."""
        try:
            values = reading.result()
            is_sound = member_digests(values) == (self._digests or [])[members]
        except ValueError as error:  # The checksum of a chunk, or the chunk, has changed.
            if is_of_disk(error):
                raise
            return None
        return values if is_sound else None


class _Part:
    """A part of a saved array that is being read; see `SavedArray.read`."""

    def __init__(self, array: SavedArray, reading: Reading, members: slice) -> None:
        self._array, self._reading, self._members = array, reading, members
        self._values: np.ndarray | None = None

    def result(self) -> np.ndarray:
        if self._values is None:  # Several devices may hold the same part.
            self._values = self._array.values_of(self._reading, self._members)
        return self._values


def database_spec(folder: Place) -> JsonDict:
    """Returns TensorStore's specification of the database in a folder."""
    return {"driver": "ocdbt", "base": folder.spec()}


def _new_database_spec(folder: Place) -> JsonDict:
    """Returns TensorStore's specification for writing the database in a folder."""
    # The index then holds the descriptions of the arrays, and its pages have checksums.
    return {**database_spec(folder), "config": {"max_inline_value_bytes": 1024}}


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type in which values are stored: bytes for types that TensorStore lacks."""
    try:
        ts.dtype(dtype)
    except (TypeError, ValueError):
        return np.dtype(np.uint8)
    return np.dtype(dtype)


def _not_empty(shape: Iterable[int]) -> list[int]:
    """Returns a shape in which axes of length 0 have length 1, as Zarr requires of a part."""
    return [max(length, 1) for length in shape]


def _by_member(shape: tuple[int, ...]) -> JsonDict:
    """Returns the codec of Zarr by which a part of an array is stored member by member."""
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *_not_empty(shape[1:])],
            "codecs": _WITH_A_CHECKSUM,
            "index_codecs": _WITH_A_CHECKSUM,
        },
    }
