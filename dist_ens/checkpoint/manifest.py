"""The manifest of a checkpoint: what the step is, and what every file and every array must hold.

The file `manifest.json` has two lines. The first is the manifest as JSON:

- `format`: version of the format, 2.
- `step`: number of updates that the state has seen, also the name of the folder.
- `run`: record of the run that the state belongs to.
- `members`: for each member, in the order of the state, a dict with its `member_id` and its
  lineage; see `Lineage`.
- `scores`: scores of the ensemble at this step, by name; empty if it was not scored there.
- `leaves`: for each leaf its `dtype`, its `shape` and the `crc32` of each member's values, in the
  order of the members.
- `files`: for each other file its number of `bytes` and its `crc32`, by its path.

The second line is `{"sha256": "..."}`, the hash of the bytes of the first. A reader ignores a key
that it does not know.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Self

from dist_ens.checkpoint.digests import file_digest
from dist_ens.checkpoint.lineage import Lineage
from dist_ens.errors import RunError
from dist_ens.file_reading import bytes_in
from dist_ens.json_text import Json, JsonDict, is_whole
from dist_ens.paths import is_plain, shortened

MANIFEST = "manifest.json"
FORMAT = 2
_STEP_NAME = re.compile("0|[1-9][0-9]{0,18}")


@dataclasses.dataclass(frozen=True)
class LeafEntry:
    """Entry of a leaf in a manifest.

    Attributes:
        dtype: Name of the type of its elements.
        shape: Shape of the whole array, members first.
        digests: CRC-32 of each member's values.
    """

    dtype: str
    shape: tuple[int, ...]
    digests: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Entry of a file in a manifest.

    Attributes:
        num_bytes: Size of the file.
        digest: CRC-32 of its content.
    """

    num_bytes: int
    digest: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: Number of updates that the state has seen.
        run: Record of the run that the state belongs to, in types that JSON can hold.
        scores: Scores of the ensemble at this step, by name.
        members: Lineage of each member, in the order of the state.
        leaves: Entry of each leaf, by name.
        files: Entry of each other file, by its path in the checkpoint.
    """

    step: int
    run: Mapping[str, Json]
    scores: Mapping[str, float]
    members: tuple[Lineage, ...]
    leaves: Mapping[str, LeafEntry]
    files: Mapping[str, FileEntry]

    @property
    def member_ids(self) -> tuple[int, ...]:
        """Id of each member, in the order of the state."""
        return tuple(member.member_id for member in self.members)

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        values = {
            "format": FORMAT,
            "step": self.step,
            "run": self.run,
            "scores": self.scores,
            "members": [member.to_dict() for member in self.members],
            "leaves": {
                name: {"dtype": leaf.dtype, "shape": leaf.shape, "crc32": leaf.digests}
                for name, leaf in self.leaves.items()
            },
            "files": files_as_json(self.files),
        }
        line = json.dumps(values).encode()
        return line + b"\n" + _second_line(line)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Returns the manifest in the content of a file.

        Raises:
            ValueError: If the content does not match its hash.
            RunError: If a newer version has written it.
        """
        line, _, rest = content.partition(b"\n")
        if rest != _second_line(line):
            raise ValueError(f"{MANIFEST} does not match its hash")
        values = json.loads(line)  # The record may hold numbers that are not finite.
        if values["format"] != FORMAT:
            raise RunError(
                f"A checkpoint has the format {values['format']}, and this version of dist_ens "
                f"reads formats up to {FORMAT}. Install the version that wrote it."
            )
        return cls(
            step=values["step"],
            run=values["run"],
            scores=values.get("scores", {}),
            members=tuple(map(Lineage.from_dict, values["members"])),
            leaves={
                name: LeafEntry(leaf["dtype"], tuple(leaf["shape"]), tuple(leaf["crc32"]))
                for name, leaf in values["leaves"].items()
            },
            files=files_from_json(values["files"]),
        )

    @classmethod
    def read(cls, checkpoint: pathlib.Path) -> Self:
        """Reads the manifest of a checkpoint.

        Args:
            checkpoint: Folder of the checkpoint, which is named after its step.

        Raises:
            ValueError: If the manifest is damaged, or of another step.
            RunError: If a newer version has written it.
            OSError: If it cannot be read.
        """
        path = checkpoint / MANIFEST
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{MANIFEST} is no regular file")
        manifest = cls.from_bytes(bytes_in(path))
        if str(manifest.step) != checkpoint.name:
            raise ValueError(f"its {MANIFEST} is that of step {manifest.step}")
        return manifest

    def changed_files(self, checkpoint: pathlib.Path, *, hashes_data: bool) -> Iterator[str]:
        """Yields a clause for each file that is missing or changed, and each folder that is a link.

        Args:
            checkpoint: Folder of the checkpoint.
            hashes_data: Whether to hash the files of the arrays, too. Otherwise only their sizes
                are compared. The other files are small, and always hashed.

        Raises:
            OSError: If a file cannot be read.
        """
        yield from self.linked_folders(checkpoint)
        for name in sorted(self.files):
            fault = self.fault_of_file(checkpoint, name, hashes_data=hashes_data)
            if fault is not None:
                yield fault

    def linked_folders(self, checkpoint: pathlib.Path) -> list[str]:
        """Returns a clause for each folder that is a symbolic link.

        Args:
            checkpoint: Folder of the checkpoint.
        """
        folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        return [
            f"{folder} is a symbolic link"
            for folder in sorted(folders - {"."})
            if (checkpoint / folder).is_symlink()
        ]

    def fault_of_file(
        self, checkpoint: pathlib.Path, name: str, *, hashes_data: bool
    ) -> str | None:
        """Returns a clause if a file is missing or changed, and None otherwise.

        Args:
            checkpoint: Folder of the checkpoint.
            name: Path of the file in it.
            hashes_data: Whether to hash a file of the arrays, too; see `changed_files`.

        Raises:
            OSError: If the file cannot be read.
        """
        path, entry = checkpoint / name, self.files[name]
        try:
            status = path.lstat()
        except FileNotFoundError:
            return f"the file {name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is no regular file"
        if status.st_size != entry.num_bytes:
            return f"the file {name} has {status.st_size} bytes, and had {entry.num_bytes}"
        if (hashes_data or not _holds_arrays(name)) and file_digest(path) != entry.digest:
            return f"the file {name} has changed"
        return None

    def added_files(self, checkpoint: pathlib.Path) -> list[str]:
        """Returns the paths of the files that the manifest does not list.

        Args:
            checkpoint: Folder of the checkpoint.
        """
        return sorted({*files_in(checkpoint)} - {*self.files, MANIFEST})


def step_of(name: str) -> int | None:
    r"""Returns the step that a folder's name gives; None if the name is no step.

    >>> step_of("500"), step_of("3000000000"), step_of("007"), step_of("+5"), step_of("\u0665")
    (500, 3000000000, None, None, None)
    """
    is_step = _STEP_NAME.fullmatch(name) is not None and is_whole(int(name))
    return int(name) if is_step else None


def files_in(folder: pathlib.Path, below: str = "") -> Iterator[str]:
    """Yields the paths of all files in a folder and in the folders below it.

    A symbolic link is yielded as a file, and not followed.

    Args:
        folder: Folder that the paths start from.
        below: Path of a folder in it that is searched. Default: the whole folder.
    """
    for entry in os.scandir(folder / below):
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_in(folder, path)
        else:
            yield path


def entries_of(folder: pathlib.Path, paths: Iterable[str]) -> dict[str, FileEntry]:
    """Returns the entries of files, which are read.

    Args:
        folder: Folder that the paths start from.
        paths: Paths of the files.
    """
    return {
        path: FileEntry((folder / path).stat().st_size, file_digest(folder / path))
        for path in sorted(paths)
    }


def files_as_json(files: Mapping[str, FileEntry]) -> JsonDict:
    """Returns entries of files in types that JSON can hold."""
    return {
        path: {"bytes": entry.num_bytes, "crc32": entry.digest} for path, entry in files.items()
    }


def files_from_json(files: Mapping[str, Mapping[str, int]]) -> dict[str, FileEntry]:
    """Returns the entries of files that `files_as_json` returned.

    Raises:
        ValueError: If a path may lead out of the checkpoint.
    """
    for path in files:
        if not is_plain(path):
            raise ValueError(f"{MANIFEST} lists {shortened(path)}, which no checkpoint has")
    return {path: FileEntry(entry["bytes"], entry["crc32"]) for path, entry in files.items()}


def _second_line(first: bytes) -> bytes:
    """Returns the second line of the file, given the bytes of the first."""
    return json.dumps({"sha256": hashlib.sha256(first).hexdigest()}).encode() + b"\n"


def _holds_arrays(path: str) -> bool:
    """Returns whether a file holds values of arrays. OCDBT has them in folders named `d`."""
    return "d" in path.split("/")[:-1]
