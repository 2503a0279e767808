"""Folders of IDX files, the format of MNIST and similar data sets."""

import contextlib
import functools
import gzip
import pathlib
import struct
from collections.abc import Iterator

import numpy as np

from dist_ens.array_files import (
    LARGEST_PACKING,
    Readable,
    StoredArray,
    damage_told,
    is_there,
    opened_file,
)
from dist_ens.data.source import Source, Split
from dist_ens.data.spec import Spec
from dist_ens.data.stored import StoredSplit, describe_stored, source_of_stored
from dist_ens.errors import UserError
from dist_ens.paths import given_path, shortened

_NAME = "idx:DIR"
_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def open_idx(folder: str, num_classes: int | None) -> Source:
    """Opens a folder with the four IDX files of MNIST or a similar data set, gzipped or not.

    Args:
        folder: Path of the folder, which holds `train-images-idx3-ubyte`,
            `train-labels-idx1-ubyte` and the two files `t10k-…`, or these names with `.gz`.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source. Its inputs are uint8[rows, columns].

    Raises:
        UserError: If a file is missing, is in another format, or has another length than its header
            declares, or if the arrays do not match.
    """
    return source_of_stored(_stored(folder, _TRAIN), _stored(folder, _TEST), num_classes)


def open_idx_test(folder: str) -> Split:
    """Opens the test split of a folder of IDX files, which may have no training split.

    Args:
        folder: Path of the folder, which holds the two files `t10k-…`, gzipped or not.

    Raises:
        UserError: If a file is missing or damaged, or its values cannot be used.
    """
    return _stored(folder, _TEST).read()


def describe_idx(folder: str, num_classes: int | None) -> tuple[Spec, int]:
    """Describes the source that `open_idx` returns, from the headers of the four files.

    Args:
        folder: Path of the folder.
        num_classes: Number of classes. None reads the training labels and counts them.

    Returns:
        Description of the examples, and the number of training examples.

    Raises:
        UserError: If a header or the training labels cannot be used.
    """
    return describe_stored(_stored(folder, _TRAIN), _stored(folder, _TEST), num_classes)


def _stored(folder: str, names: tuple[str, str]) -> StoredSplit:
    """Reads the headers of a split."""
    directory = given_path(folder, _NAME)
    split = "train" if names is _TRAIN else "test"
    inputs, labels = (_stored_array(_path(directory, name)) for name in names)
    return StoredSplit(f"idx:{shortened(str(directory))}", split, inputs, labels)


def _path(directory: pathlib.Path, name: str) -> pathlib.Path:
    for path in (directory / f"{name}.gz", directory / name):
        if is_there(path, _NAME):
            return path
    has = "has neither" if directory.is_dir() else "is not a folder"
    raise UserError(
        f"{_NAME} lacks the file {name}.gz or {name}: {shortened(str(directory))} {has}. Correct "
        "the path, or put the file there."
    )


def _stored_array(path: pathlib.Path) -> StoredArray:
    """Reads the header of a file, and compares it with the file's length.

    The header is two zero bytes, the type (8 for uint8), the number of axes, and the length of each
    axis as a big-endian uint32.
    """
    where = f"{_NAME} {shortened(str(path))}"
    with _opened(path) as file, damage_told(where):
        start = file.read(4)
        axes = start[3] if len(start) == 4 else 0
        lengths = file.read(4 * axes)
    if start[:3] != b"\0\0\x08" or not axes or len(lengths) < 4 * axes:
        raise UserError(
            f"{where} is not an IDX file of bytes: it begins with {start.hex(' ') or 'nothing'}, "
            "not with 00 00 08, its number of axes and their lengths. Fetch the file again."
        )
    header = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", lengths)
    body = functools.partial(_opened, path, header)
    stored = StoredArray(where, shape, np.dtype(np.uint8), body)
    there = path.stat().st_size
    packed = path.suffix == ".gz"
    if stored.num_bytes > there * LARGEST_PACKING if packed else stored.num_bytes != there - header:
        raise UserError(
            f"{where} declares {stored.num_bytes:,} bytes for the shape {list(shape)}, and the "
            f"file has {there:,}{' compressed' if packed else f', {header} of them its header'}. "
            "It is truncated or damaged: fetch it again."
        )
    return stored


@contextlib.contextmanager
def _opened(path: pathlib.Path, begin: int = 0) -> Iterator[Readable]:
    """Opens a file at a byte. The file is decompressed if its name ends in `.gz`."""
    with opened_file(path, _NAME) as file:
        unpacked: Readable = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        unpacked.read(begin)
        yield unpacked
