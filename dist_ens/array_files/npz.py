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
# The methods of zip that numpy.savez uses, and the most bytes that one packed byte can hold. The
# others are refused: zipfile unpacks a chunk of them whole, whatever it grows to.
_METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: LARGEST_PACKING}


@contextlib.contextmanager
def opened_npz(path: pathlib.Path, keys: Sequence[str], name: str) -> Iterator[list[StoredArray]]:
    """Opens an .npz file for the time of a block, and reads the headers of some of its arrays.

    Args:
        path: Path of the file.
        keys: Names of the arrays.
        name: What an error message calls the path, such as `npz:FILE`.

    Yields:
        The arrays, in the order of `keys`, not read yet.

    Raises:
        UserError: If the file cannot be read, lacks an array, or declares more than it holds; or if
            an array is encrypted, or packed in a way that `numpy.savez` does not use.
    """
    where = f"{name} {shortened(str(path))}"
    with opened_file(path, name) as file:
        with damage_told(where):
            archive = zipfile.ZipFile(file)
        with archive:
            length = os.fstat(file.fileno()).st_size
            entries = _found(archive, keys, where)
            yield [_stored(archive, length, entry, where) for entry in entries]


def _found(archive: zipfile.ZipFile, keys: Sequence[str], where: str) -> list[zipfile.ZipInfo]:
    """Returns the entry of each array."""
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
    """Returns an array of an archive from its header, after a check of what its entry claims."""
    where = f"{where}, {entry.filename.removesuffix('.npy')}"
    if entry.flag_bits & _ENCRYPTED:
        raise UserError(f"{where} is encrypted. Save it again with numpy.savez.")
    if entry.compress_type not in _METHODS:
        raise UserError(
            f"{where} is packed by method {entry.compress_type} of zip, and NumPy packs by 0 and "
            "8. Save it again with numpy.savez_compressed."
        )
    most = entry.compress_size * _METHODS[entry.compress_type]
    if entry.compress_size > file_bytes or entry.file_size > most:
        raise UserError(
            f"{where} declares {entry.file_size:,} bytes packed in {entry.compress_size:,}, and "
            f"the file has {file_bytes:,}. It is truncated or damaged: write it again."
        )

    @contextlib.contextmanager
    def body(begin: int) -> Iterator[Readable]:
        with archive.open(entry) as file:
            file.read(begin)
            yield file

    with damage_told(where), archive.open(entry) as file:
        return read_header(file, where, entry.file_size, body)
