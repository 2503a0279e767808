"""Arrays in files, described by their headers and read on demand."""

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
"""Largest number of bytes to which deflate, as in gzip and zip, expands one byte; rounded up.

Source: zlib technical details, https://zlib.net/zlib_tech.html.
"""
_CHUNK_BYTES = 2**20
_LONGEST_REASON = 200  # In characters. zipfile quotes whatever it read as a name.
_CODE_POINTS = 0x110000  # Number of code points of Unicode.
_MOST_AXES = 64  # The limit of NumPy.
_LARGEST_BYTES = 2**62  # The sum of two such numbers fits in int64.


class Readable(Protocol):
    """A binary file, which may be decompressed while it is read."""

    def read(self, size: int, /) -> bytes:
        """Returns the next bytes, at most `size` of them; no bytes at the end of the file."""
        ...


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file, of which only the header has been read.

    Attributes:
        where: Name of the array in error messages.
        shape: Lengths of the axes.
        dtype: NumPy type of the values.
        open_body: Function that opens the file at the first value.
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
        # NumPy refuses a shape whose lengths other than 0 have too large a product.
        if math.prod(filter(None, self.shape)) * self.dtype.itemsize > _LARGEST_BYTES:
            raise UserError(
                f"{self.where} declares the shape {shortened(str(list(self.shape)))}, which is too "
                "large for any array. The file is damaged: fetch or write it again."
            )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require_numbers(self, *, or_text: bool = False) -> None:
        """Raises a `UserError` if the values are not booleans, integers or floats.

        Args:
            or_text: Whether text is allowed too.
        """
        if or_text and self.dtype.kind == "O":
            raise UserError(
                f"{self.where} holds Python objects, which are not read. Save text with "
                "astype(str), and numbers with astype(float)."
            )
        if self.dtype.kind == "O":
            raise UserError(
                f"{self.where} holds Python objects, as NumPy makes of rows of unequal length. "
                "Make all rows equally long, convert them with numpy.asarray(rows, "
                "dtype='float32'), and save the file again."
            )
        if self.dtype.kind not in ("biufSU" if or_text else "biuf"):
            raise UserError(
                f"{self.where} has the type {self.dtype}, which holds no real numbers. Convert it "
                "with astype, and save the file again."
            )

    def read(self, *, or_text: bool = False) -> np.ndarray:
        """Reads the values.

        Args:
            or_text: Whether text is allowed too.

        Returns:
            Array in the type of the file.

        Raises:
            UserError: If the values are not numbers, are damaged, do not fit in the free memory,
                or are not as many as the header declares.
        """
        self.require_numbers(or_text=or_text)
        require_memory(self.num_bytes, self.where)
        is_bool = self.dtype.kind == "b"
        lengths = self.shape[::-1] if self.fortran_order else self.shape
        try:
            array = np.empty(lengths, np.uint8 if is_bool else self.dtype)
        except MemoryError as error:
            raise UserError(
                f"{self.where} needs {self.num_bytes:,} bytes of memory, which the system "
                "refused. Use a smaller file, or a machine with more memory."
            ) from error
        with damage_told(self.where), self.open_body() as file:
            self._fill(array.reshape(-1).view(np.uint8), file)
        if is_bool:  # NumPy and JAX would read a byte other than 0 and 1 differently.
            array = narrowed(array, bool, self.where)
        if self.dtype.kind == "U":
            self._require_characters(array)
        return array.T if self.fortran_order else array

    def _require_characters(self, array: np.ndarray) -> None:
        """Raises a `UserError` if an array of text holds numbers that are no characters."""
        order = np.dtype(np.uint32).newbyteorder(self.dtype.byteorder)
        codes = np.frombuffer(array.tobytes(), order)
        if codes.size and codes.max() >= _CODE_POINTS:
            raise UserError(
                f"{self.where} has the number {codes.max():,} in place of a character. The file is "
                "damaged: fetch or write it again."
            )

    def _fill(self, body: np.ndarray, file: Readable) -> None:
        """Fills an array of bytes from a file, and checks that the file ends there."""
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
    """Turns the errors that damaged gzip and zip files raise into a `UserError`.

    Args:
        where: Name of the file in error messages.
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
        RuntimeError,  # zipfile raises it, and NotImplementedError, if it cannot decompress a file.
        ValueError,
    ) as error:
        why = first_line(error) if str(error).strip() else "It ends too early."
        why = why if len(why) <= _LONGEST_REASON else f"{why[:_LONGEST_REASON]}…"
        raise UserError(
            f"{where} is damaged or in another format: {why} Correct the path, or fetch or write "
            "the file again."
        ) from error
