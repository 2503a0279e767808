"""An array in a file, described by its header and read when it is asked for."""

import contextlib
import dataclasses
import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from dist_ens.array_files.opening import require_memory
from dist_ens.errors import UserError, first_line
from dist_ens.narrowing import narrowed
from dist_ens.paths import shortened

LARGEST_PACKING = 1032
"""Largest number of bytes that one byte of gzip or zip's deflate can hold, rounded up.

Source: zlib technical details, https://zlib.net/zlib_tech.html.
"""
_CHUNK_BYTES = 2**20
_LONGEST_REASON = 200  # characters; zipfile quotes what it read as a name
_MOST_AXES = 64  # of a NumPy array
_LARGEST_BYTES = 2**62  # so that no sum of two overflows


class Readable(Protocol):
    """A file of bytes, unpacked as it is read or not."""

    def read(self, size: int, /) -> bytes:
        """Returns the next bytes, at most `size`; none at the end of the file."""
        ...


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file, of which only the header has been read.

    Attributes:
        where: What an error message calls the array.
        shape: Lengths of the axes.
        dtype: NumPy type of the values.
        open_body: Opens the file where the values begin.
        fortran_order: Whether the first axis varies fastest in the file. Default: the last does.
    """

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    open_body: Callable[[], AbstractContextManager[Readable]]
    fortran_order: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_AXES:
            raise UserError(
                f"{self.where} declares {len(self.shape)} axes, and an array has at most "
                f"{_MOST_AXES}. The file is damaged: fetch or write it again."
            )
        # NumPy multiplies the lengths other than zero, even where one is zero.
        if math.prod(filter(None, self.shape)) * self.dtype.itemsize > _LARGEST_BYTES:
            raise UserError(
                f"{self.where} declares the shape {shortened(str(list(self.shape)))}, which is too "
                "large for any array. The file is damaged: fetch or write it again."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require_numbers(self) -> None:
        """Raises a `UserError` if the values are not booleans, integers or floats."""
        if self.dtype.kind == "O":
            raise UserError(
                f"{self.where} holds Python objects, as NumPy makes of rows of unequal length. "
                "Make all rows equally long, convert them with numpy.asarray(rows, "
                "dtype='float32'), and save the file again."
            )
        if self.dtype.kind not in "biuf":
            raise UserError(
                f"{self.where} has the type {self.dtype}, which holds no real numbers. Convert it "
                "with astype, and save the file again."
            )

    def read(self) -> np.ndarray:
        """Reads the values.

        Returns:
            The array, in the type of the file.

        Raises:
            UserError: If the values are no numbers, are more or fewer than the header declares, are
                damaged, or do not fit in the memory that is free.
        """
        self.require_numbers()
        require_memory(self.num_bytes, self.where)
        is_bool = self.dtype.kind == "b"
        lengths = self.shape[::-1] if self.fortran_order else self.shape
        try:
            array = np.empty(lengths, np.uint8 if is_bool else self.dtype)
        except MemoryError as error:
            raise UserError(
                f"{self.where} needs {self.num_bytes:,} bytes, which the system does not give. "
                "Use a smaller file, or a machine with more memory."
            ) from error
        with damage_told(self.where), self.open_body() as file:
            self._fill(array.reshape(-1).view(np.uint8), file)
        if is_bool:  # a byte other than 0 and 1 would be True here and something else there
            array = narrowed(array, bool, self.where)
        return array.T if self.fortran_order else array

    def _fill(self, body: np.ndarray, file: Readable) -> None:
        """Reads a file to its end, as many bytes as an array has."""
        at = 0
        while at < body.size:
            part = file.read(min(_CHUNK_BYTES, body.size - at))
            if not part:
                break
            body[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if at < body.size or file.read(1):
            there = f"only {at:,}" if at < body.size else "more"
            raise UserError(
                f"{self.where} declares {body.size:,} bytes of values, and the file holds {there}. "
                "It is truncated or damaged: fetch or write it again."
            )


@contextlib.contextmanager
def damage_told(where: str) -> Iterator[None]:
    """Raises a `UserError` for what gzip and zip files raise when they are damaged.

    Args:
        where: What an error message calls the file.
    """
    try:
        yield
    except UserError:
        raise
    except (
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        struct.error,
        EOFError,
        OverflowError,
        RuntimeError,  # zipfile raises it, and NotImplementedError, for what it cannot unpack
        ValueError,
    ) as error:
        why = first_line(error) if str(error).strip() else "It ends too early."
        why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]}…"
        raise UserError(
            f"{where} is damaged or in another format: {why} Correct the path, or fetch or write "
            "the file again."
        ) from error
