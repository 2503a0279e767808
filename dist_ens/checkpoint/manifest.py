"""The manifest of a checkpoint: what the step is, and what every file and every array must hold.

The file `manifest.json` has two lines. The first is the manifest as JSON:

- `format`: version of the format, 2.
- `step`: number of updates that the state has seen, also the name of the folder.
- `run`: record of the run that the state belongs to.
- `num_hosts`: number of hosts that wrote the checkpoint.
- `scores`: scores of the ensemble at this step, by name; empty if it was not scored there.
- `members`: lineage of each member, in the order of the state; see `Lineage`.
- `leaves`: for each leaf its `dtype`, its `shape` and the `crc32` of each member's values, in the
  order of the members.
- `files`: for each other file its `num_bytes` and its `crc32`, by its path.
- `prefix`: folder of the other files in that of the checkpoint; empty on a disk.

The second line is `{"sha256": "..."}`, the hash of the bytes of the first.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Self

from dist_ens.checkpoint.lineage import Lineage
from dist_ens.ground import file_writing
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError
from dist_ens.ground.json_text import Json
from dist_ens.storage import Place

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # File of a checkpoint that is being written, or is to be deleted.
# A process may have been killed before that file had its name.
MARKS = {UNFINISHED, f"{UNFINISHED}.{file_writing.UNFINISHED}"}
FORMAT = 2
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
    prefix: str = ""

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
            "prefix": self.prefix,
        }
        line = json.dumps(values).encode()
        return line + b"\n" + _second_line(line)

    @classmethod
    def read(cls, checkpoint: Place) -> Self:
        """Reads the manifest in the folder of a checkpoint, which is named after its step.

        A damaged manifest is a `ValueError`, one of a newer version a `RunError`.
        """
        checkpoint.size(MANIFEST)  # No link is followed.
        line, _, rest = checkpoint.read(MANIFEST).partition(b"\n")
        if rest != _second_line(line):
            raise ValueError(f"{MANIFEST} does not match its hash")
        values = json.loads(line)  # The record may hold numbers that are not finite.
        if values["format"] != FORMAT:
            raise RunError(
                f"{quoted(checkpoint.address)} has the format {values['format']}, and this version "
                f"of dist_ens reads the format {FORMAT}. Install the version that wrote it."
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
            prefix=values["prefix"],
        )

    def data_in(self, checkpoint: Place) -> Place:
        """Returns the folder of the files of a checkpoint."""
        return checkpoint / self.prefix if self.prefix else checkpoint

    def fault_of_file(
        self, data: Place, name: str, there: Collection[str], *, hashes_data: bool
    ) -> str | None:
        """Returns a clause if a file is missing or has changed, and None otherwise.

        A file of the arrays is hashed only if asked for. Otherwise its size is compared.
        """
        if name not in there:
            return f"the file {name} is missing"
        entry, size = self.files[name], data.size(name)
        if size not in (None, entry.num_bytes):
            return f"the file {name} has {size} bytes, and had {entry.num_bytes}"
        holds_arrays = "d" in name.split("/")[:-1]  # OCDBT has them in folders named `d`.
        if (hashes_data or not holds_arrays) and data.digest(name) != entry:
            return f"the file {name} has changed"
        return None


def seal_of(checkpoint: Place) -> bytes:
    """Returns the last line of a manifest, which tells checkpoints apart; empty if not readable."""
    try:
        return checkpoint.read(MANIFEST).rstrip().rpartition(b"\n")[2]
    except OSError:
        return b""


def files_by_step(checkpoints: Place) -> dict[int, set[str]]:
    """Returns the names of the files of each step in a folder, also of unfinished ones."""
    found: dict[int, set[str]] = {}
    for name in checkpoints.names():
        step, _, file = name.partition("/")
        if file and _STEP_NAME.fullmatch(step):
            found.setdefault(int(step), set()).add(file)
    return found


def is_finished(names: Collection[str], *, is_local: bool) -> bool:
    """Returns whether a step with these files is a checkpoint, which may be damaged.

    In a bucket, a process that was overtaken may leave files of a step that nobody has finished.
    """
    return MANIFEST in names or (is_local and MARKS.isdisjoint(names))


def steps_in(checkpoints: Place) -> list[int]:
    """Returns the steps of the finished checkpoints in a folder, the oldest first."""
    files = files_by_step(checkpoints)
    is_local = checkpoints.is_local
    return sorted(step for step, names in files.items() if is_finished(names, is_local=is_local))


def entries_of(folder: Place, names: Iterable[str]) -> dict[str, FileEntry]:
    """Returns the entries of files, by their names in a folder. Every file is read."""
    return {name: FileEntry(*folder.digest(name)) for name in sorted(names)}


def _second_line(first: bytes) -> bytes:
    """Returns the second line of the file, given the bytes of the first."""
    return json.dumps({"sha256": hashlib.sha256(first).hexdigest()}).encode() + b"\n"
