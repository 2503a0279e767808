"""`Place`: a folder of files, wherever it is."""

from collections.abc import Iterable
from typing import Protocol, Self

from dist_ens.ground.causes import explained
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict

# Tag of a file that is absent, for `Place.write_if`. TensorStore gives it to each such file.
ABSENT = b"\x02"


def not_writable(place: "Place", error: OSError, remedy: str | None = None) -> UserError:
    """Returns the error of a folder in which a file could not be written."""
    what, advice, _ = explained(error)
    return UserError(f"Nothing can be written in {quoted(place)}: {what}. {remedy or advice}.")


def not_readable(place: "Place", error: OSError) -> UserError:
    """Returns the error of a folder from which a file could not be read."""
    what, advice, _ = explained(error)
    return UserError(f"Nothing can be read in {quoted(place)}: {what}. {advice}.")


class Place(Protocol):
    """A folder of files, on a disk or in a bucket.

    Names are paths below the folder, with slashes. Folders come and go with their files. Every
    error is an `OSError`, and `FileNotFoundError` is one of a file that is absent. No writer or
    reader sees a part of a file.

    Attributes:
        is_local: Whether it is on a disk, where a lock of the system excludes other writers.
    """

    is_local: bool

    @property
    def name(self) -> str:
        """Last part of its path."""

    @property
    def address(self) -> str:
        """Absolute path or address."""

    @property
    def parent(self) -> Self:
        """Folder above this one."""

    def __str__(self) -> str:
        """Returns the path or the address, as a person gave it."""

    def __truediv__(self, name: str) -> Self:
        """Returns a folder below this one."""

    def make(self) -> None:
        """Makes the folder where folders are made, and not only named. No link may be there."""

    def names(self, below: str = "") -> list[str]:
        """Returns the names of all files, or of those in a folder below. No link is followed."""

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""

    def read_tagged(self, name: str) -> tuple[bytes, bytes]:
        """Returns the content of a file and its tag; `ABSENT` if the file is absent."""

    def digest(self, name: str) -> tuple[int, int]:
        """Returns the number of bytes of a file and their CRC-32."""

    def size(self, name: str) -> int | None:
        """Returns the number of bytes of a file; None if only reading would tell.

        A link, a pipe or a device is an `OSError`.
        """

    def require_writable(self, names: Iterable[str] = (), *, is_new: bool = False) -> None:
        """Raises a `UserError` unless files, and those of these names, can be written.

        A folder that `is_new` need not exist on a disk, if it can be made.
        """

    def write(self, name: str, content: bytes) -> None:
        """Writes a file whole, and waits until it is stored."""

    def write_if(self, name: str, content: bytes, tag: bytes) -> bytes | None:
        """Writes a file if it still has a tag, and returns its new tag; None if it had another."""

    def remove(self, name: str) -> None:
        """Deletes a file. One that is absent is no error."""

    def remove_all(self, *, last: str | None = None) -> None:
        """Deletes all files of the folder, and one of them last."""

    def move_to(self, other: Self) -> None:
        """Gives all files of the folder a place in another one, which is empty."""

    def spec(self) -> JsonDict:
        """Returns TensorStore's specification of the folder, as the base of a database.

        It raises an `OSError` if there is a pipe, for whose other end TensorStore would wait.
        """
