"""A checkpoint's files, written whole or not at all, by every host its own part.

Each host writes its arrays' parts into a database of its own (TensorStore's OCDBT), the first into
that of the whole, which takes the others' up when they are done. All of it happens in a folder of
another name, which the first host gives its own at the end: a checkpoint that is there is complete,
and on disk. Where one host fails, all of them do, and none waits for it.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from dist_ens import cluster
from dist_ens.layout import Piece

_UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax, too, takes for no checkpoint
STATE, RUN = "state", "run"
CHECKSUM = "crc32"
_OF_HOST = "ocdbt.process_"
_WRITTEN_BY = "written_by_host_"
_PATIENCE_SECS = 600  # for a host that is slow to write its part
_WITH_A_CHECKSUM = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
# Without one in common each array would be a database, and a transaction, by itself.
_CONTEXT = ts.Context()
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a state.

    Attributes:
        shape: Of the whole.
        dtype: Its type.
        pieces: What of it this host writes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[Piece]


def write_checkpoint(
    folder: pathlib.Path,
    step: int,
    state: Mapping[str, Leaf],
    run: Mapping[str, Any],
) -> None:
    """Writes the checkpoint of a step; every host must call this, and returns when it is on disk.

    Args:
        folder: In which it will stand, named by its step.
        step: Updates that the state has seen.
        state: Its leaves, by name.
        run: What JSON can hold.

    Raises:
        OSError: If another host could not write its part. What this one's own raised is raised as
            it is.
    """
    whole, unfinished = folder / str(step), folder / f"{step}{_UNFINISHED}"
    arrays, here = unfinished / STATE, jax.process_index()
    number = next(_NUMBERS)  # hosts save equally often, and may call the folder differently
    with _ended_on_all(f"checkpoint {number}"):
        with _ended_on_all(f"parts of checkpoint {number}"):
            arrays.mkdir(parents=True, exist_ok=True)  # by whoever is the fastest
            if cluster.is_main():
                (unfinished / RUN).mkdir()
                _write(unfinished / RUN / "metadata", {**run, CHECKSUM: checksum_of(run)})
                _write(arrays / "_METADATA", _description(state))
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
        raise OSError("the whole is not here: another host could not write its part")


def give_up_checkpoint(path: pathlib.Path) -> None:
    """Makes a checkpoint none, which `remove_unfinished` removes.

    That is done best just before the next is written, which then finds the memory of its files in
    the system's hands: a virtual machine gives what is long free back to its host, and asking for
    it again took twice as long as all the rest of a save.
    """
    path.rename(path.with_name(path.name + _UNFINISHED))
    _sync(path.parent)


def remove_unfinished(folder: pathlib.Path, *, apart_from: int | None = None) -> None:
    """Removes what was given up, or was not written or removed to its end.

    Args:
        folder: Of the checkpoints.
        apart_from: The step that other hosts may have begun to write.
    """
    for path in folder.glob(f"*{_UNFINISHED}"):
        if path.name != f"{apart_from}{_UNFINISHED}":
            shutil.rmtree(path, ignore_errors=True)  # what stays is in the way of its own step only


def _write_arrays(path: pathlib.Path, state: Mapping[str, Leaf]) -> None:
    """Writes this host's pieces into a database in a folder, as Zarr arrays in one transaction."""
    transaction = ts.Transaction()
    opened = {
        name: ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**_new_database_spec(path), "path": f"{name}/"},
                # Trained weights shrink by 7 %, and trying takes half of a save's time.
                "metadata": {"codecs": _WITH_A_CHECKSUM},
                "store_data_equal_to_fill_value": True,  # so that what is absent is damage
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
            can_reference_source_data_indefinitely=True,  # it stays as it is: it need not be copied
        )
        for array, piece in pieces
    ]:
        written.result()
    transaction.commit_async().result()


def _check_others_have_written(unfinished: pathlib.Path) -> None:
    marks = {host: unfinished / f"{_WRITTEN_BY}{host}" for host in range(1, jax.process_count())}
    failed = [host for host, mark in marks.items() if not mark.exists()]
    if failed:
        raise OSError(
            f"the part of host {', '.join(map(str, failed))} is not here: it could not be written, "
            "or that host has another folder of this name"
        )
    for mark in marks.values():
        mark.unlink()


def _take_up_others(path: pathlib.Path) -> None:
    """Lets a host's database, in a folder, refer to all that the other hosts' there hold."""
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


def database_spec(folder: pathlib.Path) -> dict[str, Any]:
    """TensorStore's specification of the database in a folder."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def checksum_of(run: Mapping[str, Any]) -> int:
    """Of what JSON can hold, the same before it is written and when it is read."""
    return zlib.crc32(json.dumps(run).encode())


def _new_database_spec(folder: pathlib.Path) -> dict[str, Any]:
    # What describes an array stands in the index then, of which every page has its checksum.
    return {**database_spec(folder), "config": {"max_inline_value_bytes": 1024}}


def _description(names: Mapping[str, Any]) -> dict[str, Any]:
    """What Orbax wants to know of a flat dict of arrays."""
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


def _write(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
    _sync(path)
    _sync(path.parent)


def _sync(path: pathlib.Path) -> None:
    """Returns when a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ended_on_all(name: str) -> Iterator[None]:
    """Ends when what is inside has ended on every host, well or not.

    No device takes part, so that training goes on.
    """

    def wait() -> None:
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * _PATIENCE_SECS)

    try:
        yield
    except jax.errors.JaxRuntimeError:  # of a host that did not come, and will not come now
        raise
    except BaseException:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told is what came first
            wait()
        raise
    wait()
