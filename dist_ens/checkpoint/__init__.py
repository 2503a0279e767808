"""Checkpoints of a run: saving and resuming.

`Checkpoints` holds the folder of a run and the times at which it is saved. `OpenCheckpoints` is
that folder while a run has locked it. `Snapshot` is what one save writes, and `SavedStep` what is
read back.

A checkpoint is the folder `WORKDIR/checkpoints/STEP`. It holds

- `state`: a flat dict from the name of a leaf (`params.layer_0.w`) to its array `[members, ...]`. A
  PRNG key is saved as its key data, which are integers. The mesh is not saved.
- `manifest.json`: the step, the record of the run, the ids of the members, and digests of each
  member's part of each leaf and of each file. See `manifest`.
- `host_files`: bytes of process P, such as the position of its data iterator, in `NAME.P`.

Orbax reads the files of `state`: `StandardCheckpointer().restore` returns NumPy arrays on any
number of devices. This package uses TensorStore directly, because Orbax's own code takes 0.1 s of
the cores that train. Each member's part of an array is a chunk with a checksum (CRC-32C, a codec of
Zarr), which every reader compares. So a member can be read alone.
"""

from dist_ens.checkpoint.checkpoints import Checkpoints
from dist_ens.checkpoint.lineage import Lineage, ids_text, positions_of
from dist_ens.checkpoint.members import (
    SavedMembers,
    members_at,
    read_lineages,
    read_members,
    require_new_folder,
    write_members,
)
from dist_ens.checkpoint.newest import (
    RESULT_FILE,
    moving_on,
    saved_step,
    saved_steps,
    state_digest,
)
from dist_ens.checkpoint.opened import OpenCheckpoints
from dist_ens.checkpoint.record import (
    StepRecord,
    differing_versions,
    listed,
    notes_on_resuming,
    require_config_record,
)
from dist_ens.checkpoint.snapshot import Leaf, Snapshot, leaves_off_devices
from dist_ens.checkpoint.writing import FOLDER

__all__ = [
    "FOLDER",
    "RESULT_FILE",
    "Checkpoints",
    "Leaf",
    "Lineage",
    "OpenCheckpoints",
    "SavedMembers",
    "Snapshot",
    "StepRecord",
    "differing_versions",
    "ids_text",
    "leaves_off_devices",
    "listed",
    "members_at",
    "moving_on",
    "notes_on_resuming",
    "positions_of",
    "read_lineages",
    "read_members",
    "require_config_record",
    "require_new_folder",
    "saved_step",
    "saved_steps",
    "state_digest",
    "write_members",
]
