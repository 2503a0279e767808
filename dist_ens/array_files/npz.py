"""The .npz format: a zip archive of .npy files."""

import contextlib
import os
import pathlib
import zipfile
from collections.abc import Iterator, Sequence

from dist_ens.array_files.npy import read_header
from dist_ens.array_files.opening import opened_file
from dist_ens.array_files.stored import LARGEST_PACKING, Readable, StoredArray, damage_told
from dist_ens.errors import UserError
from dist_ens.paths import shortened

_ENCRYPTED = 0x1
# The compression methods of numpy.savez, and the most bytes to which each expands one byte. Other
# methods are refused, because zipfile expands a whole chunk of them without a limit.
_METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: LARGEST_PACKING}


@contextlib.contextmanager
def opened_npz(path: pathlib.Path, keys: Sequence[str], name: str) -> Iterator[list[StoredArray]]:
    """Opens an .npz file as a context manager, and reads the headers of some of its arrays.

    Args:
        path: Path of the file.
        keys: Names of the arrays.
        name: Name of the path in error messages, such as `npz:FILE`.

    Yields:
        Arrays in the order of `keys`, whose values have not been read yet.

    Raises:
        UserError: If the file cannot be read, lacks an array, or declares more than it holds. Also
            if an array is encrypted, or compressed by a method that `numpy.savez` does not use.
    """
    where = f"{name} {shortened(str(path))}"
    with opened_file(path, name) as file:
        with damage_told(where):
            archive = zipfile.ZipFile(file)
        with archive:
            length = os.fstat(file.fileno()).st_size
            entries = _found(archive, keys, where)
            yield [_stored(archive, length, entry, where) for entry in entries]


def names_in_npz(path: pathlib.Path, name: str) -> list[str]:
    """Returns the names of the arrays in an .npz file.

    Args:
        path: Path of the file.
        name: Name of the path in error messages.

    Raises:
        UserError: If the file cannot be read.
    """
    where = f"{name} {shortened(str(path))}"
    with (
        opened_file(path, name) as file,
        damage_told(where),
        zipfile.ZipFile(file) as archive,
    ):
        return [entry.filename.removesuffix(".npy") for entry in archive.infolist()]


def _found(archive: zipfile.ZipFile, keys: Sequence[str], where: str) -> list[zipfile.ZipInfo]:
    """Returns the zip entry of each array. Raises a `UserError` if one is missing or repeated."""
    entries: dict[str, list[zipfile.ZipInfo]] = {}
    for entry in archive.infolist():
        entries.setdefault(entry.filename.removesuffix(".npy"), []).append(entry)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise UserError(
            f"{where} lacks {', '.join(missing)}. It has {shortened(', '.join(entries))}. Save it "
            f"again with {', '.join(keys)}."
        )
    for key in keys:
        if len(entries[key]) > 1:
            raise UserError(
                f"{where} has {len(entries[key])} arrays with the name {key}. Save it again with "
                "one."
            )
    return [entries[key][0] for key in keys]


def _stored(
    archive: zipfile.ZipFile, file_bytes: int, entry: zipfile.ZipInfo, where: str
) -> StoredArray:
    """Reads the header of an array in an archive, after a check of the sizes in its zip entry."""
    where = f"{where}, {entry.filename.removesuffix('.npy')}"
    if entry.flag_bits & _ENCRYPTED:
        raise UserError(f"{where} is encrypted. Save it again with numpy.savez.")
    if entry.compress_type not in _METHODS:
        raise UserError(
            f"{where} is compressed by zip method {entry.compress_type}, and NumPy uses methods 0 "
            "and 8. Save it again with numpy.savez_compressed."
        )
    most = entry.compress_size * _METHODS[entry.compress_type]
    if entry.compress_size > file_bytes or entry.file_size > most:
        raise UserError(
            f"{where} declares {entry.file_size:,} bytes, compressed to {entry.compress_size:,}, "
            f"and the file has {file_bytes:,}. It is truncated or damaged: write it again."
        )

    @contextlib.contextmanager
    def body(begin: int) -> Iterator[Readable]:
        with archive.open(entry) as file:
            file.read(begin)
            yield file

    with damage_told(where), archive.open(entry) as file:
        return read_header(file, where, entry.file_size, body)
