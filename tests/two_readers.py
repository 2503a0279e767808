"""One of two hosts with four devices each, which restore a state of 64 members on several meshes.

python tests/two_readers.py COORDINATOR PROCESS_ID FOLDER

It writes the bytes that it has read for each mesh to FOLDER/read_PROCESS_ID.json.
"""

import json
import os
import pathlib
import sys

import numpy as np

import fast_xla

MESHES = [(8, 1), (4, 2), (1, 8)]
RANDOM = np.random.default_rng(0)
STATE = {
    "kernel": RANDOM.normal(size=(64, 100, 200)).astype(np.float32),
    "bias": RANDOM.normal(size=(64, 100)).astype(np.float32),
    "step": np.full(64, 1, np.int32),
}
NUM_BYTES = sum(leaf.nbytes for leaf in STATE.values())


def bytes_read():
    """Bytes that TensorStore has read from files in this process, by its own count."""
    import tensorstore as ts

    # The list is empty before the first read.
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


def read_on(rows, columns, folder, model_axis=1):
    """Restores the state on a mesh of the first devices, and returns the bytes that were read."""
    import jax

    from dist_ens.layout import MEMBERS, Layout
    from saving import reader

    devices = jax.devices()[: rows * columns * model_axis]
    layout = Layout.make(64, ensemble_axis=rows, model_axis=model_axis, devices=devices)
    divided = {"kernel": jax.P("ensemble", None, "model"), "bias": jax.P("ensemble", "model")}
    specs = divided if model_axis > 1 else {}
    shapes = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=layout.sharding(specs.get(name, MEMBERS))
        )
        for name, leaf in STATE.items()
    }
    before = bytes_read()
    restored = reader(folder, 1).state(shapes)
    read = bytes_read() - before
    for name, leaf in restored.items():
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, STATE[name][shard.index])
    return read


def main(coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = fast_xla.flags(4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dist_ens.processes import cluster

    cluster.start(coordinator, 2, int(process_id))
    folder = pathlib.Path(folder)
    read = [read_on(*mesh, folder) for mesh in MESHES]
    (folder / f"read_{process_id}.json").write_text(json.dumps(read))


if __name__ == "__main__":
    main(*sys.argv[1:])
