"""Reading of a checkpoint. Every host reads the parts that its own devices hold."""

import json
import pathlib
from collections.abc import Mapping

import jax
import tensorstore as ts

from dist_ens.checkpoint.writing import CHECKSUM, checksum_of, database_spec
from dist_ens.json_text import JsonDict
from dist_ens.layout import read_onto_devices

# Drivers by the name of the file that describes an array. The first version of dist_ens wrote
# `zarr`, which has no checksums.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}
# A new context sees the files as they are now. The cache holds the index, which every chunk needs.
# The number of parallel reads is that of Orbax, chosen for network disks.
_CONTEXT = {
    "cache_pool#index": {"total_bytes_limit": 100_000_000},
    "file_io_concurrency": {"limit": 128},
}


def read_run(path: pathlib.Path) -> JsonDict:
    """Returns the record in a file.

    Raises:
        ValueError: If the file does not match its checksum, or holds no JSON.
        OSError: If the file cannot be read.
    """
    run = json.loads(path.read_text(encoding="utf-8"))
    written = run.pop(CHECKSUM, None)  # The first version wrote no checksum.
    if written not in (None, checksum_of(run)):
        raise ValueError(f"{path} does not match its checksum")
    return run


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


def read_arrays(
    opened: Mapping[str, ts.TensorStore], abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads opened arrays onto devices.

    Args:
        opened: Arrays from `open_arrays`, by name.
        abstract: Shape, type and sharding of each array, by name.

    Raises:
        ValueError: If a chunk is missing, or does not match its checksum.
    """
    return read_onto_devices(abstract, lambda name, index: opened[name][index].read())
