"""Files of a checkpoint that belong to one host, such as the position of its data iterator.

The file `host_files/NAME.PROCESS` has a header of 8 bytes, then the content. The header holds the
CRC-32 of everything after it, and the number of hosts that wrote the checkpoint (two little-endian
unsigned 32-bit integers).
"""

import pathlib
import re
import struct
import zlib
from collections.abc import Iterable, Mapping

import jax

from dist_ens.commands import quoted
from dist_ens.errors import RunError, UserError, counted
from dist_ens.file_reading import bytes_in
from dist_ens.paths import shortened

_FOLDER = "host_files"
_NUMBER = struct.Struct("<I")
_NAME = re.compile("[a-z][a-z_]{0,49}")


def check_names(names: Iterable[str]) -> None:
    """Raises a `UserError` if a name of a host file cannot be part of a file name."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"The name of a host file is {shortened(name)}. Use at most 50 lowercase letters "
                "and underscores, beginning with a letter."
            )


def host_file_contents(host_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files of this host, by their paths inside a checkpoint.

    Args:
        host_files: Bytes by name.
    """
    files = {}
    for name, content in host_files.items():
        counted = _NUMBER.pack(jax.process_count()) + content
        path = f"{_FOLDER}/{name}.{jax.process_index()}"
        files[path] = _NUMBER.pack(zlib.crc32(counted)) + counted
    return files


def read_host_file(
    checkpoint: pathlib.Path, name: str, listed: Iterable[str], *, is_shared: bool = False
) -> bytes | None:
    """Returns the bytes that this host saved under a name; None if it saved none.

    Args:
        checkpoint: Folder of the checkpoint, which must exist.
        name: Name that the bytes were saved under.
        listed: Paths of the files of the checkpoint.
        is_shared: Whether every host saved bytes that fit any host. Where another number of hosts
            wrote them, those of process 0 are returned.

    Raises:
        RunError: If another number of hosts wrote the file, and it is not shared.
        ValueError: If the file is damaged.
        OSError: If the file or the checkpoint cannot be read.
    """
    checkpoint.stat()  # It raises an error if the checkpoint was deleted meanwhile.
    files = [path for path in listed if re.fullmatch(rf"{_FOLDER}/{name}\.\d+", path)]
    if not files:
        return None
    mine = f"{_FOLDER}/{name}.{jax.process_index()}"
    num_hosts, content = _read(checkpoint / (mine if mine in files else files[0]))
    if num_hosts != jax.process_count():
        if is_shared:
            return _read(checkpoint / f"{_FOLDER}/{name}.0")[1]
        raise RunError(
            f"{quoted(checkpoint)} was saved by {counted(num_hosts, 'host')}, each with its own "
            f"{name!r}, and this run has {counted(jax.process_count(), 'host')}. Resume on as "
            "many hosts as before."
        )
    return content if mine in files else None


def host_files_in(checkpoint: pathlib.Path) -> list[str]:
    """Returns the paths of the host files in a checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
    """
    return sorted(f"{_FOLDER}/{path.name}" for path in (checkpoint / _FOLDER).glob("*"))


def check_host_file(path: pathlib.Path) -> None:
    """Raises a `ValueError` if a host file does not match its checksum.

    Raises:
        OSError: If the file cannot be read.
    """
    _read(path)


def _read(path: pathlib.Path) -> tuple[int, bytes]:
    """Returns the number of hosts that wrote a file, and its content."""
    data = bytes_in(path)
    size = _NUMBER.size
    if len(data) < 2 * size or _NUMBER.unpack(data[:size])[0] != zlib.crc32(data[size:]):
        raise ValueError(f"{path} does not match its checksum")
    return _NUMBER.unpack(data[size : 2 * size])[0], data[2 * size :]
