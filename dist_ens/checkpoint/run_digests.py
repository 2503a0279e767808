"""Digests of the files of a run that are no checkpoints, such as its summary and its metrics.

The file `.digests/NAME` beside the file NAME has a line for each content that NAME may have: its
number of bytes and its CRC-32. The digest of a new content is added before the content is written,
so that the file has a digest whenever a run is interrupted.
"""

import contextlib
import zlib

from dist_ens.ground.file_writing import UNFINISHED
from dist_ens.storage import Place

DIGESTS = ".digests"


def write_run_file(run: Place, name: str, content: str | bytes) -> None:
    """Replaces the content of a file of a run as a whole, and writes its digest."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    now, kept = _digest(run.read_tagged(name)[0]), []
    with contextlib.suppress(OSError, ValueError):
        kept = [digest for digest in _digests_of(run, name) if digest == now]
    lines = [f"{n} {crc32:08x}\n" for n, crc32 in (_digest(content), *kept)]
    run.write(f"{DIGESTS}/{name}", "".join(lines).encode())
    run.write(name, content)


def changed_files(run: Place) -> list[str]:
    """Returns a clause for each file of a run that is missing or differs from what was written."""
    names = sorted(name.removeprefix(f"{DIGESTS}/") for name in run.names(DIGESTS))
    faults = [fault_of(run, name) for name in names if not name.endswith(f".{UNFINISHED}")]
    return [fault for fault in faults if fault is not None]


def fault_of(run: Place, name: str) -> str | None:
    """Returns a clause if a file of a run is missing or has changed; None if not, or not known."""
    try:
        if not (digests := _digests_of(run, name)):
            return None
        content = run.read(name)
    except FileNotFoundError:
        return f"the file {name} is missing"
    except OSError as error:
        return f"the file {name} cannot be read: {error.strerror}"
    except ValueError:
        return f"the digest of the file {name} has changed"
    if _digest(content) in digests:
        return None
    return f"the file {name} has changed since it was written"


def _digest(content: bytes) -> tuple[int, int]:
    return len(content), zlib.crc32(content)


def _digests_of(run: Place, name: str) -> list[tuple[int, int]]:
    """Returns the digests of a file, each with its number of bytes; empty if it has none."""
    lines = run.read_tagged(f"{DIGESTS}/{name}")[0].splitlines()
    return [(int(count), int(crc32, 16)) for count, crc32 in map(bytes.split, lines)]
