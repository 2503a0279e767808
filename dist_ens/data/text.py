"""A source of text, whose labels are the next character at every position of a window."""

import dataclasses
import gzip
import os
import pathlib
from typing import ClassVar

import numpy as np
import psutil

from dist_ens.array_files import Readable, damage_told, opened_file
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.errors import UserError
from dist_ens.paths import given_path, shortened

_NAME = "text:FILE"
_TEST_SHARE = 0.1
# The text, its code points and their numbers take up to four bytes each. Four more are a reserve.
_MEMORY_PER_BYTE = 16
_CHUNK_BYTES = 2**20
_CODE_POINTS = 0x110000  # Number of code points of Unicode.


@dataclasses.dataclass(frozen=True)
class TextSplit:
    """Consecutive windows of a text, without overlap.

    Attributes:
        characters: Text, each character as its number in the vocabulary, int32[characters].
        length: Number of characters of one example.
    """

    in_memory: ClassVar[bool] = True
    characters: np.ndarray
    length: int

    def __len__(self) -> int:
        return max(0, len(self.characters) - 1) // self.length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at some positions. The labels are the inputs one character later."""
        positions = indices[..., None] * self.length + np.arange(self.length)
        return {"inputs": self.characters[positions], "labels": self.characters[positions + 1]}


def open_text(file: str, context_length: int) -> Source:
    """Opens a text file in UTF-8. Its last tenth is the test split.

    Args:
        file: Path of the file. A file whose name ends in `.gz` is decompressed.
        context_length: Number of characters of one example.

    Returns:
        The source. Its vocabulary is the distinct characters of the file, in code point order.

    Raises:
        UserError: If the file cannot be read, does not fit in the free memory, or is not UTF-8.
            Also if it is too short for one example in each split.
    """
    path = given_path(file, _NAME)
    where = f"{_NAME} {shortened(str(path))}"
    try:
        text = _content(path, where).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: {error}. Convert it to UTF-8.") from error
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    present = np.zeros(_CODE_POINTS, bool)
    present[codes] = True
    characters = (np.cumsum(present, dtype=np.int32) - 1)[codes]
    cut = len(characters) - int(len(characters) * _TEST_SHARE)
    train, test = (TextSplit(part, context_length) for part in np.split(characters, [cut]))
    if len(train) < 1 or len(test) < 1:
        raise UserError(
            f"{where} has {len(characters):,} characters, a tenth of them for the test split, and "
            f"each split needs {context_length + 1:,} or more. Use a longer text, or a smaller "
            "--config.data.context_length."
        )
    shape = (context_length,)
    return Source(Spec(shape, "int32", shape, int(present.sum())), train=train, test=test)


def _content(path: pathlib.Path, where: str) -> bytes:
    """Returns the content of a file, decompressed if its name ends in `.gz`."""
    most = psutil.virtual_memory().available // _MEMORY_PER_BYTE
    with opened_file(path, _NAME) as file, damage_told(where):
        packed = path.suffix == ".gz"
        length = 0 if packed else os.fstat(file.fileno()).st_size
        unpacked: Readable = gzip.GzipFile(fileobj=file) if packed else file
        parts, read = list[bytes](), 0
        while max(length, read) <= most and (part := unpacked.read(_CHUNK_BYTES)):
            parts.append(part)
            read += len(part)
    if max(length, read) > most:
        raise UserError(
            f"{where} is longer than the {most:,} bytes for which memory is free, at "
            f"{_MEMORY_PER_BYTE} bytes each. Use a shorter text, or a machine with more memory."
        )
    return b"".join(parts)
