"""A checkpoint's arrays, read by every host for its own devices."""

import pathlib
from collections.abc import Mapping

import jax
import tensorstore as ts

from dist_ens.checkpoint.writing import database
from dist_ens.layout import read_onto_devices

# Of the file that describes an array: `zarr` is what dist_ens wrote at first, and has no checksums.
_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}


def open_arrays(path: pathlib.Path) -> dict[str, ts.TensorStore]:
    """The arrays in a folder, by name; what they hold is not read yet.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If a file is damaged.
    """
    context = ts.Context()  # not the writer's: of what is read nothing is kept
    keys = ts.KvStore.open(database(path), context=context).result().list().result()
    opened = {}
    for key in map(bytes.decode, keys):
        name, _, file = key.rpartition("/")
        if file in _DRIVERS:
            opened[name] = ts.open(
                {
                    "driver": _DRIVERS[file],
                    "kvstore": {**database(path), "path": f"{name}/"},
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
