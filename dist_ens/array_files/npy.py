"""The .npy format: one array, stored as a header and its values."""

import ast
import contextlib
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from dist_ens.array_files.opening import opened_file
from dist_ens.array_files.stored import Readable, StoredArray
from dist_ens.errors import UserError
from dist_ens.paths import shortened

OpenAt = Callable[[int], AbstractContextManager[Readable]]
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000  # In bytes. NumPy has the same bound.
_PLAIN_TYPE = re.compile(r"[<>|=]?[?biufcmMOSUV]\d{0,9}(\[\w{1,9}\])?")


def read_npy(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Reads the array of an .npy file.

    Args:
        path: Path of the file, as a person gave it. `~` is expanded.
        name: Name of the path in error messages, such as `--input`.

    Returns:
        Array of booleans, integers or floats, in the type and shape of the file.

    Raises:
        UserError: If the file cannot be read or is not a regular .npy file of numbers. Also if its
            length is not what its header declares, or the array does not fit in the free memory.
    """
    with opened_file(path, name) as file:
        where = f"{name} {shortened(str(path))}"

        @contextlib.contextmanager
        def body(begin: int) -> Iterator[Readable]:
            file.seek(begin)
            yield file

        return read_header(file, where, os.fstat(file.fileno()).st_size, body).read()


def read_header(file: Readable, where: str, num_bytes: int, open_body: OpenAt) -> StoredArray:
    """Reads the header of an .npy file, and compares it with the file's length.

    Args:
        file: Open file, at its first byte.
        where: Name of the array in error messages.
        num_bytes: Length of the file in bytes, header included.
        open_body: Function that opens the file at a byte, `(begin) -> context manager`.

    Returns:
        Array whose values have not been read yet.

    Raises:
        UserError: If the header is not valid, or declares another length than the file has.
    """
    start = file.read(8)
    if start[:6] != _MAGIC or len(start) < 8 or start[6] not in (1, 2, 3):
        raise UserError(
            f"{where} is not an .npy file, which begins with \\x93NUMPY and its version. Write it "
            "with numpy.save."
        )
    form = "<H" if start[6] == 1 else "<I"
    counted = file.read(struct.calcsize(form))
    length = struct.unpack(form, counted)[0] if len(counted) == struct.calcsize(form) else None
    if length is None or length > _LONGEST_HEADER:
        raise UserError(
            f"{where} has a header of {'unknown length' if length is None else f'{length:,} bytes'}"
            f"; at most {_LONGEST_HEADER:,} bytes are read. Write the file again with numpy.save."
        )
    text = file.read(length)
    shape, fortran_order, dtype = _parsed(text.decode("latin1"), where)
    begin = len(start) + len(counted) + length
    stored = StoredArray(where, shape, dtype, lambda: open_body(begin), fortran_order)
    if dtype.kind != "O" and stored.num_bytes != num_bytes - begin:
        raise UserError(
            f"{where} declares {dtype}{list(shape)}, {stored.num_bytes:,} bytes, and the file "
            f"holds {num_bytes - begin:,}. It is truncated or damaged: write it again."
        )
    return stored


def _parsed(header: str, where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns the shape, the order and the type of an array from the text of its header."""
    try:
        # Odd code in a hostile header makes Python warn.
        with warnings.catch_warnings(action="ignore"):
            fields = ast.literal_eval(re.sub(r"(\d)L\b", r"\1", header))  # Python 2 wrote 5 as 5L.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        fields = None  # The error below covers this header too.
    if isinstance(fields, dict) and fields.keys() == {"descr", "fortran_order", "shape"}:
        shape, order, dtype = fields["shape"], fields["fortran_order"], _dtype(fields["descr"])
        lengths_hold = isinstance(shape, tuple) and all(
            type(length) is int and 0 <= length < 2**63 for length in shape
        )
        if lengths_hold and isinstance(order, bool) and dtype is not None:
            return shape, order, dtype
    raise UserError(
        f"{where} has a header that does not describe one array of a plain type: "
        f"{shortened(header.strip())}. Write the file again with numpy.save."
    )


def _dtype(described: object) -> np.dtype | None:
    """Returns the NumPy type that a header names; None if it is structured or unknown."""
    if not isinstance(described, str) or not _PLAIN_TYPE.fullmatch(described):
        return None
    with contextlib.suppress(TypeError, ValueError):
        return np.dtype(described)
    return None
