"""The half of storage that is on a disk, where links, pipes and other writers are."""

# ruff: noqa: D102 (`Place` has the docstrings.)
import contextlib
import errno
import os
import pathlib
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Self

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_reading import bytes_in, opened_to_read, require_readable
from dist_ens.ground.file_writing import replace_file, require_regular_files
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.paths import utf8_path
from dist_ens.storage.place import ABSENT, not_writable


class Disk:
    """A folder on a disk; see `Place`.

    Folders are made below the root alone. If the root is gone, the disk was taken away, or somebody
    deleted the run, and nothing is made anew.
    """

    is_local = True

    def __init__(self, root: pathlib.Path, below: str = "") -> None:
        self._given, self._below = root, below
        self._root = root.resolve()  # TensorStore refuses a path with `..`.
        self.path = self._root / below

    def __str__(self) -> str:
        return str(self._given / self._below)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def parent(self) -> Self:
        if not self._below:
            return type(self)(self._given.parent)
        return type(self)(self._given, self._below.rpartition("/")[0])

    def make(self) -> None:
        if self._below and self.path.is_symlink():
            raise UserError(
                f"{quoted(self.path)} is a symbolic link, and nothing is saved or deleted there. "
                "Put the folder itself in its place."
            )
        utf8_path(self.path)  # TensorStore takes no other one.
        self.path.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._given, f"{self._below}/{name}" if self._below else name)

    def names(self, below: str = "") -> list[str]:
        return list(_files_in(self.path, below))

    def read(self, name: str) -> bytes:
        return bytes_in(self.path / name)

    def read_tagged(self, name: str) -> tuple[bytes, bytes]:
        try:
            content = self.read(name)
        except FileNotFoundError:
            return b"", ABSENT
        return content, _tag_of(content)

    def digest(self, name: str) -> tuple[int, int]:
        count, crc32 = 0, 0
        with opened_to_read(self.path / name) as file:
            while block := file.read(2**20):
                count, crc32 = count + len(block), zlib.crc32(block, crc32)
        return count, crc32

    def size(self, name: str) -> int:
        status = (self.path / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", name)
        return status.st_size

    def require_writable(self, names: Iterable[str] = (), *, is_new: bool = False) -> None:
        require_regular_files(self.path, names)
        there = [folder for folder in (self.path, *self.path.parents) if folder.exists()]
        try:
            with tempfile.TemporaryFile(dir=there[0] if is_new else self.path):
                pass
        except OSError as error:
            raise not_writable(self, error, "Choose another folder") from error

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        self._make_folder(path.parent)
        replace_file(path, content)
        _sync(path.parent)

    def write_if(self, name: str, content: bytes, tag: bytes) -> bytes | None:
        """Writes a file if it still has a tag. The run's lock excludes other writers meanwhile."""
        if self.read_tagged(name)[1] != tag:
            return None
        self.write(name, content)
        return _tag_of(content)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()
            _sync((self.path / name).parent)

    def remove_all(self, *, last: str | None = None) -> None:
        if not self.path.is_dir() or self.path.is_symlink():
            return
        for entry in [*os.scandir(self.path)]:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != last:
                os.unlink(entry.path)
        shutil.rmtree(self.path)

    def move_to(self, other: Self) -> None:
        self.path.rename(other.path)
        _sync(self.path.parent)

    def spec(self) -> JsonDict:
        for name in self.names():
            require_readable(self.path / name)
        return {"driver": "file", "path": f"{utf8_path(self.path)}/"}

    def _make_folder(self, folder: pathlib.Path) -> None:
        """Makes a folder below the root, and waits until its name is on disk."""
        if folder != self._root and folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(folder))
        if folder.is_dir():
            return
        if folder == self._root:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _tag_of(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def _files_in(folder: pathlib.Path, below: str) -> Iterator[str]:
    """Yields the paths of all files in a folder, or in its part `below`. No link is followed."""
    try:
        entries = [*os.scandir(folder / below)]
    except (FileNotFoundError, NotADirectoryError):  # A run may delete it meanwhile.
        return
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _files_in(folder, path)
        else:
            yield path


def _sync(path: pathlib.Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
