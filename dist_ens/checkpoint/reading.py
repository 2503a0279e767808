"""A checkpoint, read by every host for its own devices."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import tensorstore as ts

from dist_ens.checkpoint.writing import CHECKSUM, checksum_of, database_spec
from dist_ens.layout import read_onto_devices

# Of the file that describes an array: `zarr` is what dist_ens wrote at first, and has no checksums.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}
# One of its own, which sees the files as they are now. What says where the parts lie is kept: it is
# asked for at every one of them. As many are read at once as Orbax does, for disks that are far.
_CONTEXT = {
    "cache_pool#places": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}


def read_run(path: pathlib.Path) -> dict[str, Any]:
    """What the state in a checkpoint belongs to, from its file.

    Raises:
        ValueError: If it is not what was written.
        OSError: If it cannot be read.
    """
    run = json.loads(path.read_text(encoding="utf-8"))
    written = run.pop(CHECKSUM, None)  # at first there was none
    if written not in (None, checksum_of(run)):
        raise ValueError(f"{path} has another checksum than was written")
    return run


def open_arrays(path: pathlib.Path) -> dict[str, ts.TensorStore]:
    """The arrays in a folder, by name; what they hold is not read yet.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If a file is damaged.
    """
    context = ts.Context(_CONTEXT)
    database = {**database_spec(path), "cache_pool": "cache_pool#places"}
    keys = ts.KvStore.open(database, context=context).result().list().result()
    opened = {}
    for key in map(bytes.decode, keys):
        name, _, file = key.rpartition("/")
        if file in _DRIVERS:
            opened[name] = ts.open(
                {
                    "driver": _DRIVERS[file],
                    "kvstore": {**database, "path": f"{name}/"},
                    "fill_missing_data_reads": False,  # what is absent is damage, not zeros
                },
                open=True,
                read=True,
                context=context,
            )
    if not opened:
        raise FileNotFoundError(f"no arrays in {path}")
    return {name: array.result() for name, array in opened.items()}


def read_arrays(
    opened: Mapping[str, ts.TensorStore], abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """What opened arrays hold, on the devices that `abstract` names.

    Args:
        opened: As `open_arrays` gives them.
        abstract: Their shapes, types and shardings, by name.

    Raises:
        ValueError: If a part is absent, or not what was written.
    """
    return read_onto_devices(abstract, lambda name, index: opened[name][index].read())
