"""The mesh and every sharding made from it.

The only room that names the mesh axes, builds a `PartitionSpec` or puts an array on a device. The
axes are `("ensemble", "data")`, in this order, over the devices in the order of `jax.devices()`:
a row of the mesh holds some of the members, a column one part of every batch.
"""

from dist_ens.layout.columns import leaves_that_differ
from dist_ens.layout.mesh import (
    BATCH,
    BATCHES,
    DATA,
    ENSEMBLE,
    MEMBER_BATCH,
    MEMBER_BATCHES,
    MEMBER_METRICS,
    MEMBERS,
    REPLICATED,
    Layout,
    all_members,
    copied,
    data_index,
    data_mean,
    data_size,
    data_sum,
    device_bytes,
    make_layout,
    to_host,
)
from dist_ens.layout.offload import Piece, pieces_off_devices, read_onto_devices
from dist_ens.layout.redistribute import dealing_program
from dist_ens.layout.waves import Waves

__all__ = [
    "BATCH",
    "BATCHES",
    "DATA",
    "ENSEMBLE",
    "MEMBERS",
    "MEMBER_BATCH",
    "MEMBER_BATCHES",
    "MEMBER_METRICS",
    "REPLICATED",
    "Layout",
    "Piece",
    "Waves",
    "all_members",
    "copied",
    "data_index",
    "data_mean",
    "data_size",
    "data_sum",
    "dealing_program",
    "device_bytes",
    "leaves_that_differ",
    "make_layout",
    "pieces_off_devices",
    "read_onto_devices",
    "to_host",
]
