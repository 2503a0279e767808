"""Folders of runs, on a disk that the machine sees or in a bucket of object storage.

`place_of` turns what a person gave into a `Place`, by which everything below it is read, written,
listed and deleted. A bucket has no rename, no append and no lock, so nothing needs one.
"""

from dist_ens.storage.address import Folder, file_at, is_address, place_of
from dist_ens.storage.bucket import RETRIES, Bucket
from dist_ens.storage.disk import Disk
from dist_ens.storage.disk_lock import DiskLock
from dist_ens.storage.lease import Lease
from dist_ens.storage.place import ABSENT, Place, not_readable

__all__ = [
    "ABSENT",
    "RETRIES",
    "Bucket",
    "Disk",
    "Folder",
    "Place",
    "file_at",
    "is_address",
    "lock_of",
    "not_readable",
    "place_of",
]


def lock_of(place: Place, owner: str, token: str) -> DiskLock | Lease:
    """Returns the lock of a folder, which nobody has acquired yet.

    `owner` is told to others. By `token`, which is the same on all hosts, they see who has it.
    """
    if isinstance(place, Disk):
        return DiskLock(place, owner, token)
    return Lease(place, owner, token)
