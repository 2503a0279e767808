"""Folders of IDX files, the format of MNIST and its like."""

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
    """Opens a folder of the four files of MNIST and its like, gzipped or not.

    Args:
        folder: Path of the folder, which holds `train-images-idx3-ubyte`,
            `train-labels-idx1-ubyte` and the two `t10k-…`, or these names with `.gz`.
        num_classes: See `source_of_arrays`.

    Returns:
        The source; its inputs are uint8[rows, columns].

    Raises:
        UserError: If a file is missing, is of another format, or holds more or less than its header
            declares; or if the arrays do not fit together.
    """
    return source_of_stored(_stored(folder, _TRAIN), _stored(folder, _TEST), num_classes)


def open_idx_test(folder: str) -> Split:
    """Opens the test split of a folder of IDX files, which may have no other.

    Args:
        folder: See `open_idx`.

    Raises:
        UserError: See `open_idx`.
    """
    return _stored(folder, _TEST).read()


def describe_idx(folder: str, num_classes: int | None) -> tuple[Spec, int]:
    """Describes what `open_idx` returns, from the headers of the four files.

    Args:
        folder: See `open_idx`.
        num_classes: Number of classes. Default: the training labels are read and counted.

    Returns:
        The description, and the number of training examples.

    Raises:
        UserError: If the headers or the training labels are not as `open_idx` needs them.
    """
    return describe_stored(_stored(folder, _TRAIN), _stored(folder, _TEST), num_classes)


def _stored(folder: str, names: tuple[str, str]) -> StoredSplit:
    """Returns a split, of which only the headers are read."""
    directory = given_path(folder, _NAME)
    split = "train" if names is _TRAIN else "test"
    inputs, labels = (_stored_array(_path(directory, name)) for name in names)
    return StoredSplit(f"idx:{shortened(str(directory))}", split, inputs, labels)


def _path(directory: pathlib.Path, name: str) -> pathlib.Path:
    for path in (directory / f"{name}.gz", directory / name):
        if is_there(path, _NAME):
            return path
    has = "has neither" if directory.is_dir() else "is no folder"
    raise UserError(
        f"{_NAME} lacks the file {name}.gz or {name}: {shortened(str(directory))} {has}. Correct "
        "the path, or put the file there."
    )


def _stored_array(path: pathlib.Path) -> StoredArray:
    """Reads the header of a file, and compares it with the file's length.

    Two zero bytes, the type (8: uint8), the number of axes, and the length of each as uint32.
    """
    where = f"{_NAME} {shortened(str(path))}"
    with _opened(path) as file, damage_told(where):
        start = file.read(4)
        axes = start[3] if len(start) == 4 else 0
        lengths = file.read(4 * axes)
    if start[:3] != b"\0\0\x08" or not axes or len(lengths) < 4 * axes:
        raise UserError(
            f"{where} is no IDX file of bytes: it begins with {start.hex(' ') or 'nothing'}, not "
            "with 00 00 08, its number of axes and their lengths. Fetch the file again."
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
            f"file has {there:,}{' packed' if packed else f', {header} of them its header'}. It is "
            "truncated or damaged: fetch it again."
        )
    return stored


@contextlib.contextmanager
def _opened(path: pathlib.Path, begin: int = 0) -> Iterator[Readable]:
    """Opens a file at a byte, unpacked if its name ends in `.gz`."""
    with opened_file(path, _NAME) as file:
        unpacked: Readable = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        unpacked.read(begin)
        yield unpacked
