"""Folders of runs, on a disk that the machine sees or in a bucket of object storage.

`place_of` turns what a person gave into a `Place`, by which everything below it is read, written,
listed and deleted. A bucket has no rename, no append and no lock, so nothing needs one: a file is
written whole, and `write_new` and `write_if` decide between writers.
"""

from dist_ens.storage.address import Folder, file_at, place_of
from dist_ens.storage.bucket import RETRIES, Bucket
from dist_ens.storage.disk import Disk
from dist_ens.storage.lease import Lease, token_in
from dist_ens.storage.place import ABSENT, Place

__all__ = [
    "ABSENT",
    "RETRIES",
    "Bucket",
    "Disk",
    "Folder",
    "Lease",
    "Place",
    "file_at",
    "place_of",
    "token_in",
]
