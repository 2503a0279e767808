"""State and experiment, saved and restored as one.

A checkpoint stands in `WORKDIR/checkpoints/STEP` and holds two items: `state`, a flat dict from the
name of a leaf (`params.layer_0.w`) to its array `[members, ...]`, so that no class of the user's is
needed to read it; and `run`, plain data that says what the state belongs to. A random key is the
numbers that it consists of, and where an array lay is not kept.

The files are those of Orbax, which reads them: `StandardCheckpointer().restore` gives NumPy arrays,
whatever devices there are. They are written and read by TensorStore, which is what Orbax does it
with: Orbax's own way to it takes 0.1 s of the cores that train, however small the state is, and for
a hundred networks of a table that is a hundred steps. Every part of an array has its checksum
(CRC-32C, a codec of Zarr's), which whoever reads it compares.
"""

from dist_ens.checkpoint.checkpoints import FOLDER, Checkpoints

__all__ = ["FOLDER", "Checkpoints"]
