"""Folders of IDX files, the format of MNIST and similar data sets."""

import pathlib

import numpy as np

from dist_ens.data.arrays import examples_in, source_of_arrays
from dist_ens.data.source import Source
from dist_ens.data.splits import ArraySplit, Split
from dist_ens.ground.file_reading import bytes_in, explained_reading
from dist_ens.ground.paths import given_path, shortened

_BYTES = b"\0\0\x08"  # A file of uint8 begins with this.


def open_idx(folder: str, num_classes: int | None = None) -> Source:
    """Opens a folder with the four IDX files of MNIST or a similar data set, gzipped or not.

    Args:
        folder: Path of the folder, which holds `train-images-idx3-ubyte`,
            `train-labels-idx1-ubyte` and the two files `t10k-…`, or these names with `.gz`.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source. Its inputs are uint8[rows, columns].

    Raises:
        UserError: If a file is missing, damaged or in another format, or if the arrays do not
            match.

    >>> import tempfile
    >>> images = np.array([0x803, 2, 1, 1], ">u4").tobytes() + bytes([0, 255])
    >>> labels = np.array([0x801, 2], ">u4").tobytes() + bytes([0, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for part in ("train", "t10k"):
    ...         for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
    ...             _ = pathlib.Path(folder, f"{part}-{kind}-ubyte").write_bytes(content)
    ...     source = open_idx(folder)
    >>> source.train.take(np.array([1]))
    {'inputs': array([[[255]]], dtype=uint8), 'labels': array([1], dtype=int32)}
    """
    train, test = _read_split(folder, "train"), _read_split(folder, "t10k")
    return source_of_arrays(train, test, num_classes=num_classes, name=f"idx:{shortened(folder)}")


def open_idx_test(folder: str) -> Split:
    """Opens the test split of a folder of IDX files, which may have no training split."""
    where = f"idx:{shortened(folder)}, split test"
    return ArraySplit(*examples_in(where, *_read_split(folder, "t10k")))


def _read_split(folder: str, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and the labels of a split."""
    directory = given_path(folder, "idx:DIR")
    kinds = ("images-idx3", "labels-idx1")
    images, labels = (_read(directory, f"{prefix}-{kind}-ubyte") for kind in kinds)
    return images, labels


def _read(directory: pathlib.Path, name: str) -> np.ndarray:
    """Reads a file: two zero bytes, the type, the number of axes, their lengths, and the values."""
    packed = directory / f"{name}.gz"
    path = packed if packed.exists() else directory / name
    advice = f"Correct the path of the folder, or fetch {name}.gz again."
    with explained_reading(f"idx:DIR {shortened(str(path))}", advice):
        content = bytes_in(path)
        if content[:3] != _BYTES:
            raise ValueError(f"It begins with {content[:4].hex(' ')} and holds no bytes in IDX.")
        begin = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:begin], ">u4")
        return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)
