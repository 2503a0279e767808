"""The manifest of a checkpoint: what the step is, and what every file and every array must hold.

The file `manifest.json` has two lines. The first is the manifest as JSON:

- `format`: version of the format, 1.
- `step`: number of updates that the state has seen, also the name of the folder.
- `run`: record of the run that the state belongs to.
- `num_hosts`: number of hosts that wrote the checkpoint.
- `scores`: scores of the ensemble at this step, by name; empty if it was not scored there.
- `members`: lineage of each member, in the order of the state; see `Lineage`.
- `leaves`: for each leaf its `dtype`, its `shape` and the `crc32` of each member's values, in the
  order of the members.
- `files`: for each other file its `num_bytes` and its `crc32`, by its path.

The second line is `{"sha256": "..."}`, the hash of the bytes of the first.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from dist_ens.checkpoint.lineage import Lineage
from dist_ens.ground.errors import RunError
from dist_ens.ground.file_reading import bytes_in, opened_to_read
from dist_ens.ground.json_text import Json

MANIFEST = "manifest.json"
FORMAT = 1
_STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")


class LeafEntry(NamedTuple):
    """Entry of a leaf: the whole array's type and shape, and the CRC-32 of each member's values."""

    dtype: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...]


class FileEntry(NamedTuple):
    """Entry of a file: its size, and the CRC-32 of its content."""

    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint, whose fields are the keys of the file."""

    step: int
    run: Mapping[str, Json]
    num_hosts: int
    scores: Mapping[str, float]
    members: tuple[Lineage, ...]
    leaves: Mapping[str, LeafEntry]
    files: Mapping[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        values = {
            "format": FORMAT,
            "step": self.step,
            "run": self.run,
            "num_hosts": self.num_hosts,
            "scores": self.scores,
            "members": [member.to_dict() for member in self.members],
            "leaves": {name: leaf._asdict() for name, leaf in self.leaves.items()},
            "files": {path: file._asdict() for path, file in self.files.items()},
        }
        line = json.dumps(values).encode()
        return line + b"\n" + _second_line(line)

    @classmethod
    def read(cls, checkpoint: pathlib.Path) -> Self:
        """Reads the manifest in the folder of a checkpoint, which is named after its step.

        A damaged manifest is a `ValueError`, one of a newer version a `RunError`.
        """
        path = checkpoint / MANIFEST
        is_regular = stat.S_ISREG(path.lstat().st_mode)
        line, _, rest = bytes_in(path).partition(b"\n") if is_regular else (b"", b"", b"")
        if rest != _second_line(line):
            raise ValueError(f"{MANIFEST} is no regular file, or does not match its hash")
        values = json.loads(line)  # The record may hold numbers that are not finite.
        if values["format"] != FORMAT:
            raise RunError(
                f"A checkpoint has the format {values['format']}, and this version of dist_ens "
                f"reads the format {FORMAT}. Install the version that wrote it."
            )
        if str(values["step"]) != checkpoint.name:
            raise ValueError(f"its {MANIFEST} is that of step {values['step']}")
        return cls(
            step=values["step"],
            run=values["run"],
            num_hosts=values["num_hosts"],
            scores=values["scores"],
            members=tuple(map(Lineage.from_dict, values["members"])),
            leaves={
                name: LeafEntry(leaf["dtype"], tuple(leaf["shape"]), tuple(leaf["crc32"]))
                for name, leaf in values["leaves"].items()
            },
            files={path: FileEntry(**file) for path, file in values["files"].items()},
        )

    def fault_of_file(
        self, checkpoint: pathlib.Path, name: str, there: Collection[str], *, hashes_data: bool
    ) -> str | None:
        """Returns a clause if a file is missing or has changed, and None otherwise.

        A file of the arrays is hashed only if asked for. Otherwise its size is compared.
        """
        if name not in there:
            return f"the file {name} is missing"
        path, entry = checkpoint / name, self.files[name]
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file"
        if status.st_size != entry.num_bytes:
            return f"the file {name} has {status.st_size} bytes, and had {entry.num_bytes}"
        holds_arrays = "d" in name.split("/")[:-1]  # OCDBT has them in folders named `d`.
        if (hashes_data or not holds_arrays) and file_digest(path) != entry.crc32:
            return f"the file {name} has changed"
        return None


def seal_of(checkpoint: pathlib.Path) -> bytes:
    """Returns the last line of a manifest, which tells checkpoints apart; empty if not readable."""
    try:
        return bytes_in(checkpoint / MANIFEST).rstrip().rpartition(b"\n")[2]
    except OSError:
        return b""


def steps_in(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the finished checkpoints in a folder, the oldest first."""
    return sorted(
        int(path.name)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _STEP_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def files_in(folder: pathlib.Path, below: str = "") -> Iterator[str]:
    """Yields the paths of all files in a folder, or in its part `below`. No link is followed."""
    for entry in os.scandir(folder / below):
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_in(folder, path)
        else:
            yield path


def file_digest(path: pathlib.Path) -> int:
    """Returns the CRC-32 of a file, which is read block by block."""
    digest = 0
    with opened_to_read(path) as file:
        while block := file.read(2**20):
            digest = zlib.crc32(block, digest)
    return digest


def entries_of(folder: pathlib.Path, paths: Iterable[str]) -> dict[str, FileEntry]:
    """Returns the entries of files, by their paths in a folder. Every file is read."""
    return {
        path: FileEntry((folder / path).stat().st_size, file_digest(folder / path))
        for path in sorted(paths)
    }


def _second_line(first: bytes) -> bytes:
    """Returns the second line of the file, given the bytes of the first."""
    return json.dumps({"sha256": hashlib.sha256(first).hexdigest()}).encode() + b"\n"
