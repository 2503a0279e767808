"""Array files, whose declared sizes are checked before any memory is allocated."""

from dist_ens.array_files.npy import read_npy
from dist_ens.array_files.npz import names_in_npz, opened_npz
from dist_ens.array_files.opening import is_there, opened_file, require_memory
from dist_ens.array_files.stored import LARGEST_PACKING, Readable, StoredArray, damage_told

__all__ = [
    "LARGEST_PACKING",
    "Readable",
    "StoredArray",
    "damage_told",
    "is_there",
    "names_in_npz",
    "opened_file",
    "opened_npz",
    "read_npy",
    "require_memory",
]
