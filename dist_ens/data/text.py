"""A text as a source: the next character, at every position of a window."""

import dataclasses
import pathlib
from typing import ClassVar

import numpy as np

from dist_ens.data.files import read_bytes
from dist_ens.data.source import Source, Spec
from dist_ens.errors import UserError

_TEST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class TextSplit:
    """Windows of `length` characters that follow one another without overlap.

    Attributes:
        characters: int32[characters], each a number in the vocabulary.
        length: Characters of one example.
    """

    in_memory: ClassVar[bool] = True
    characters: np.ndarray
    length: int

    def __len__(self) -> int:
        return max(0, len(self.characters) - 1) // self.length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`: the labels are the inputs, one character later."""
        positions = indices[..., None] * self.length + np.arange(self.length)
        return {"inputs": self.characters[positions], "labels": self.characters[positions + 1]}


def open_text(file: str, context_length: int) -> Source:
    """A text file, UTF-8, gzipped or not; its last tenth is the test split.

    Args:
        file: The path.
        context_length: Characters per example.

    Returns:
        The source; the vocabulary is the file's distinct characters, in code order.

    Raises:
        UserError: For a file that cannot be read, or is too short for one example in each split.
    """
    path = pathlib.Path(file).expanduser()
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"A text source is UTF-8. Received: {path}: {error}. Convert the file."
        ) from error
    vocabulary, characters = np.unique(
        np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True
    )
    characters = characters.astype(np.int32)
    cut = len(characters) - int(len(characters) * _TEST_SHARE)
    train, test = (TextSplit(part, context_length) for part in np.split(characters, [cut]))
    if len(train) < 1 or len(test) < 1:
        raise UserError(
            f"A text needs {context_length + 1} characters or more in each split. Received: "
            f"{len(characters)} in all ({path}), a tenth of them for the test. Take a longer text "
            "or a smaller --config.data.context_length."
        )
    shape = (context_length,)
    return Source(Spec(shape, "int32", shape, len(vocabulary)), train=train, test=test)
