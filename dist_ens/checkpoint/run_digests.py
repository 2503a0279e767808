"""Digests of the files of a run that are no checkpoints, such as its summary and its metrics.

The file `.digests/NAME` beside the file NAME has a line for each content that NAME may have: its
number of bytes and its CRC-32. The digest of a new content is added before the content is written,
so that the file has a digest whenever a run is interrupted.
"""

import pathlib
import zlib

from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import UNFINISHED, replace_file

DIGESTS = ".digests"
_GROWS = ".jsonl"  # End of the name of a file that may be longer than its digest says.


def write_run_file(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces the content of a file of a run as a whole, and writes its digest."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    now = bytes_in(path) if path.is_file() else b""
    kept = [digest for digest in _digests_of(path) if _is_of(now, path, *digest)]
    write_digest(path, (len(content), zlib.crc32(content)), *kept)
    replace_file(path, content)


def write_digest(path: pathlib.Path, *digests: tuple[int, int]) -> None:
    """Writes the digests of contents that a file may have, each its number of bytes and CRC-32."""
    folder = path.parent / DIGESTS
    folder.mkdir(exist_ok=True)
    replace_file(folder / path.name, "".join(f"{n} {crc32:08x}\n" for n, crc32 in digests))


def changed_files(folder: pathlib.Path) -> list[str]:
    """Returns a clause for each file of a run that is missing or differs from what was written."""
    names = sorted(path.name for path in (folder / DIGESTS).glob("*"))
    faults = [fault_of(folder / name) for name in names if not name.endswith(f".{UNFINISHED}")]
    return [fault for fault in faults if fault is not None]


def fault_of(path: pathlib.Path) -> str | None:
    """Returns a clause if a file of a run is missing or has changed; None if not, or not known."""
    digests = _digests_of(path)
    if not digests:
        return None
    try:
        content = bytes_in(path)
    except FileNotFoundError:
        return f"the file {path.name} is missing"
    except OSError as error:
        return f"the file {path.name} cannot be read: {error.strerror}"
    if any(_is_of(content, path, *digest) for digest in digests):
        return None
    return f"the file {path.name} has changed since it was written"


def _is_of(content: bytes, path: pathlib.Path, num_bytes: int, crc32: int) -> bool:
    """Returns whether a digest is that of a content, or of its beginning if the file grows."""
    part = content[:num_bytes] if path.name.endswith(_GROWS) else content
    return len(part) == num_bytes and zlib.crc32(part) == crc32


def _digests_of(path: pathlib.Path) -> list[tuple[int, int]]:
    """Returns the digests of a file, each with its number of bytes; empty if it has none."""
    try:
        lines = bytes_in(path.parent / DIGESTS / path.name).splitlines()
        return [(int(count), int(crc32, 16)) for count, crc32 in map(bytes.split, lines)]
    except (OSError, ValueError):
        return []
