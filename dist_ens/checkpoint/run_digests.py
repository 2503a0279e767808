"""Digests of the files of a run that are no checkpoints, such as its summary and its metrics.

The file `.digests/NAME` has the digest of the file NAME: its number of bytes and its CRC-32. While
NAME is replaced, it has a line for each of both contents, so that an interrupted run is sound, too.
"""

import zlib

from dist_ens.ground.file_writing import UNFINISHED
from dist_ens.storage import Place

DIGESTS = ".digests"


def write_run_file(run: Place, name: str, content: str | bytes) -> None:
    """Replaces the content of a file of a run as a whole, and writes its digest."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    before, after = _digest(run.read_tagged(name)[0]), _digest(content)
    is_known = before in _digests_of(run, name)
    run.write(f"{DIGESTS}/{name}", after + before if is_known else after)
    run.write(name, content)
    if is_known:
        run.write(f"{DIGESTS}/{name}", after)


def changed_files(run: Place) -> list[str]:
    """Returns a clause for each file of a run that is missing or differs from what was written."""
    names = sorted(name.removeprefix(f"{DIGESTS}/") for name in run.names(DIGESTS))
    faults = [fault_of(run, name) for name in names if not name.endswith(f".{UNFINISHED}")]
    return [fault for fault in faults if fault is not None]


def fault_of(run: Place, name: str) -> str | None:
    """Returns a clause if a file of a run is missing or has changed; None if not, or not known."""
    try:
        digests = _digests_of(run, name)
        if not digests or _digest(run.read(name)) in digests:
            return None
    except FileNotFoundError:
        # A run that is training deletes the digest first.
        return f"the file {name} is missing" if _digests_of(run, name) else None
    except OSError as error:
        return f"the file {name} cannot be read: {error.strerror}"
    return f"the file {name} has changed since it was written"


def _digest(content: bytes) -> bytes:
    """Returns the digest of a content, as a line."""
    return b"%d %08x\n" % (len(content), zlib.crc32(content))


def _digests_of(run: Place, name: str) -> list[bytes]:
    """Returns the digests that a file may have; empty if it has none."""
    return run.read_tagged(f"{DIGESTS}/{name}")[0].splitlines(keepends=True)
