"""Digests of a checkpoint's contents: of each member's part of each leaf, and of each file.

A digest is a CRC-32 (that of gzip). It finds every change of up to 32 bits in a row, and misses any
other change once in 2^32 times. It is the fastest digest of Python's library.
"""

import pathlib
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from dist_ens.file_reading import opened_to_read
from dist_ens.types import Array

_BLOCK_BYTES = 2**20


def member_digests(part: Array) -> list[int]:
    """Returns the digest of each member's values, which are their bytes in C order.

    Args:
        part: Array [members, ...]. Types longer than a byte are little-endian.

    Returns:
        CRC-32 of each member.

    >>> member_digests(np.zeros((2, 3), np.float32))
    [2077607535, 2077607535]
    """
    rows = np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8)
    return [zlib.crc32(row.data) for row in rows]


def file_digest(path: pathlib.Path) -> int:
    """Returns the digest of a file.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = 0
    with opened_to_read(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest = zlib.crc32(block, digest)
    return digest


class ByMember:
    """Numbers by name and by position of the member in the state, such as digests by leaf."""

    def __init__(self) -> None:
        self._of_names: dict[str, dict[int, int]] = {}

    def add(self, name: str, first: int, numbers: Iterable[int]) -> None:
        """Adds the numbers of consecutive members.

        Args:
            name: Name of the leaf.
            first: Position of the first of these members.
            numbers: Number of each member.
        """
        self._of_names.setdefault(name, {}).update(enumerate(numbers, start=first))

    def merge(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Adds the numbers that `to_dict` of another host returned."""
        for name, numbers in other.items():
            for position, number in numbers.items():
                self.add(name, int(position), [number])

    def of(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of a name, in the order of the members' positions."""
        return tuple(number for _, number in sorted(self._of_names.get(name, {}).items()))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Returns the numbers in types that JSON can hold."""
        return {
            name: {str(position): number for position, number in numbers.items()}
            for name, numbers in self._of_names.items()
        }
