"""A source of text, whose labels are the next character at every position of a window."""

import dataclasses
from typing import ClassVar

import numpy as np

from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_reading import bytes_in, explained_reading
from dist_ens.ground.paths import given_path, shortened

_TEST_SHARE = 0.1
_CODE_POINTS = 0x110000  # Number of code points of Unicode.


@dataclasses.dataclass(frozen=True)
class TextSplit:
    """Windows of `length` characters of a text, without overlap.

    `characters` holds the number of each character in the vocabulary, int32[characters].
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
        UserError: If the file cannot be read or is not UTF-8, or is too short for one example in
            each split.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.txt").write_text("abcde" * 20)
    ...     source = open_text(f"{folder}/a.txt", context_length=4)
    >>> source.train.take(np.array([0]))["labels"]
    array([[1, 2, 3, 4]], dtype=int32)
    """
    path = given_path(file, "text:FILE")
    where = f"text:FILE {shortened(str(path))}"
    with explained_reading(where, "Correct the path, or convert the text to UTF-8."):
        text = bytes_in(path).decode("utf-8")
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    present = np.zeros(_CODE_POINTS, bool)
    present[codes] = True
    characters = (np.cumsum(present, dtype=np.int32) - 1)[codes]
    cut = len(characters) - int(len(characters) * _TEST_SHARE)
    train, test = (TextSplit(part, context_length) for part in np.split(characters, [cut]))
    if len(train) < 1 or len(test) < 1:
        raise UserError(
            f"{where} has {len(characters):,} characters, a tenth of them for the test split, and "
            f"each split needs {context_length + 1:,}. Use a longer text, or less context_length."
        )
    shape = (context_length,)
    return Source(Spec(shape, "int32", shape, int(present.sum())), train=train, test=test)
