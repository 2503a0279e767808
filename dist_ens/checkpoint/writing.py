"""Atomic writing of a checkpoint, of which every host writes its own part.

Each host writes the chunks of its arrays into its own database (OCDBT of TensorStore). Process 0
writes into the database of the whole checkpoint, and adds references to the other databases when
they are complete. All of this happens in a folder with a temporary name, which process 0 renames at
the end. A checkpoint with its final name is therefore complete and on disk. If one host fails, all
hosts fail, and none waits for it.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from dist_ens import cluster
from dist_ens.checkpoint.host_files import host_file_contents
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import Piece

_UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax ignores folders of this name, too.
STATE, RUN = "state", "run"
CHECKSUM = "crc32"
_OF_HOST = "ocdbt.process_"
_WRITTEN_BY = "written_by_host_"
_PATIENCE_SECS = 600  # Time limit for a host that writes its part slowly.
_WITH_A_CHECKSUM = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Without a common context, each array would have a separate database and transaction.
_CONTEXT = ts.Context()
_NUMBERS = itertools.count()


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


def write_checkpoint(
    folder: pathlib.Path,
    step: int,
    state: Mapping[str, Leaf],
    record: Mapping[str, Json],
    host_files: Mapping[str, bytes],
) -> None:
    """Writes the checkpoint of a step and waits until it is on disk. Every host must call this.

    Args:
        folder: Folder of the checkpoints.
        step: Number of updates that the state has seen, which names the checkpoint.
        state: Leaves of the state, by name.
        record: Description of the run, in types that JSON can hold.
        host_files: Bytes that belong to this host, by name.

    Raises:
        OSError: If another host could not write its part. An error of this host is raised
            unchanged.
    """
    whole, unfinished = folder / str(step), folder / f"{step}{_UNFINISHED}"
    arrays, here = unfinished / STATE, jax.process_index()
    # Hosts save equally often, but their paths may differ, so the number names the barriers.
    number = next(_NUMBERS)
    with _ended_on_all(f"checkpoint {number}"):
        with _ended_on_all(f"parts of checkpoint {number}"):
            arrays.mkdir(parents=True, exist_ok=True)  # The fastest host makes it.
            for name, content in host_file_contents(host_files).items():
                (unfinished / name).parent.mkdir(exist_ok=True)
                _write(unfinished / name, content)
            if cluster.is_main():
                (unfinished / RUN).mkdir()
                _write_json(
                    unfinished / RUN / "metadata", {**record, CHECKSUM: checksum_of(record)}
                )
                _write_json(arrays / "_METADATA", _description(state))
                _write_arrays(arrays, state)
            else:
                _write_arrays(arrays / f"{_OF_HOST}{here}", state)
                (unfinished / f"{_WRITTEN_BY}{here}").touch()
        if cluster.is_main():
            _check_others_have_written(unfinished)
            _take_up_others(arrays)
            for path in (arrays, unfinished):
                _sync(path)
            unfinished.rename(whole)
            _sync(folder)
    if not whole.is_dir():
        raise OSError("the checkpoint is not complete: another host could not write its part")


def give_up_checkpoint(path: pathlib.Path) -> None:
    """Marks a checkpoint for deletion. `remove_unfinished` deletes it later.

    The best moment to delete it is just before the next save, whose files then reuse the memory
    that the deletion frees. A virtual machine returns free memory to its host. Requesting it again
    took twice as long as the rest of a save.

    Args:
        path: Folder of the checkpoint.
    """
    path.rename(path.with_name(path.name + _UNFINISHED))
    _sync(path.parent)


def remove_unfinished(folder: pathlib.Path, *, apart_from: int | None = None) -> None:
    """Deletes the checkpoints that are marked for deletion, or were not written completely.

    Args:
        folder: Folder of the checkpoints.
        apart_from: Step that other hosts may be writing already, which is left alone. None for
            none.
    """
    for path in folder.glob(f"*{_UNFINISHED}"):
        if path.name != f"{apart_from}{_UNFINISHED}":
            # A folder that cannot be deleted blocks only its own step.
            shutil.rmtree(path, ignore_errors=True)


def _write_arrays(path: pathlib.Path, state: Mapping[str, Leaf]) -> None:
    """Writes this host's pieces as Zarr arrays, in one transaction of a database in a folder."""
    transaction = ts.Transaction()
    opened = {
        name: ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**_new_database_spec(path), "path": f"{name}/"},
                # Compression would save 7 % of trained weights and take half the time of a save.
                "metadata": {"codecs": _WITH_A_CHECKSUM},
                "store_data_equal_to_fill_value": True,  # Then a missing chunk is damage.
            },
            create=True,
            dtype=ts.dtype(leaf.dtype),
            shape=leaf.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=leaf.pieces[0].array.shape),
            context=_CONTEXT,
            transaction=transaction,
        )
        for name, leaf in state.items()
        if leaf.pieces
    }
    pieces = [(opened[name], piece) for name, leaf in state.items() for piece in leaf.pieces]
    for written in [
        array.result()[piece.index].write(
            np.asarray(piece.array),
            can_reference_source_data_indefinitely=True,  # Nothing changes it, so no copy is made.
        )
        for array, piece in pieces
    ]:
        written.result()
    transaction.commit_async().result()


def _check_others_have_written(unfinished: pathlib.Path) -> None:
    """Raises an `OSError` unless every other host has marked its part as complete."""
    marks = {host: unfinished / f"{_WRITTEN_BY}{host}" for host in range(1, jax.process_count())}
    failed = [host for host, mark in marks.items() if not mark.exists()]
    if failed:
        raise OSError(
            f"the part of host {', '.join(map(str, failed))} is missing: that host could not write "
            "it, or has another folder of the same name"
        )
    for mark in marks.values():
        mark.unlink()


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
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def checksum_of(record: Mapping[str, Json]) -> int:
    """Returns the CRC-32 of a record. It is the same before writing and after reading."""
    return zlib.crc32(json.dumps(record).encode())


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
