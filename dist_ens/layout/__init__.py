"""The mesh, and every sharding made from it.

No other package names the mesh axes, builds a `PartitionSpec` or puts an array on a device. The
axes are `("ensemble", "data")`, in this order, over the devices in the order of `jax.devices()`. A
row of the mesh holds some of the members, and a column holds one part of every batch. For members
that are larger than a device there is a third axis, `"model"`: its devices share a member's arrays.
"""

from dist_ens.layout.collectives import (
    all_members,
    data_index,
    redistribution_program,
    sum_over_columns,
    without_axes,
)
from dist_ens.layout.dispatch import connect_hosts, in_turn, settled
from dist_ens.layout.mesh import Layout
from dist_ens.layout.model_axis import gathered, is_kept
from dist_ens.layout.offload import Piece, Reading, pieces_off_devices, read_onto_devices
from dist_ens.layout.placing import (
    check_lengths,
    check_rows,
    copied,
    copied_like,
    copied_off_devices,
    copy_of_numpy,
    device_bytes,
    global_shapes,
    put_everywhere,
    put_numbers,
    to_host,
)
from dist_ens.layout.rows import holdings
from dist_ens.layout.specs import (
    AXES,
    BATCH,
    BATCHES,
    DATA,
    ENSEMBLE,
    MEMBER_BATCH,
    MEMBER_BATCHES,
    MEMBER_METRICS,
    MEMBERS,
    MODEL,
    REPLICATED,
    axis_of,
    broadcast,
    is_spec,
    specs_of_batch,
)
from dist_ens.layout.waves import Waves

__all__ = [
    "AXES",
    "BATCH",
    "BATCHES",
    "DATA",
    "ENSEMBLE",
    "MEMBERS",
    "MEMBER_BATCH",
    "MEMBER_BATCHES",
    "MEMBER_METRICS",
    "MODEL",
    "REPLICATED",
    "Layout",
    "Piece",
    "Reading",
    "Waves",
    "all_members",
    "axis_of",
    "broadcast",
    "check_lengths",
    "check_rows",
    "connect_hosts",
    "copied",
    "copied_like",
    "copied_off_devices",
    "copy_of_numpy",
    "data_index",
    "redistribution_program",
    "device_bytes",
    "gathered",
    "global_shapes",
    "is_kept",
    "holdings",
    "in_turn",
    "is_spec",
    "pieces_off_devices",
    "put_everywhere",
    "put_numbers",
    "read_onto_devices",
    "settled",
    "specs_of_batch",
    "sum_over_columns",
    "to_host",
    "without_axes",
]
