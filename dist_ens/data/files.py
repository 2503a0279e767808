"""Sources that are read into memory whole: digits, IDX folders, NPZ files."""

import gzip
import importlib.util
import io
import pathlib
import struct
import zlib

import numpy as np
from numpy.lib import format as npy

from dist_ens.data.npz import opened_npz
from dist_ens.data.source import (
    ArraySplit,
    Source,
    Spec,
    Split,
    check_examples,
    count_classes,
    narrowed,
    source_of_arrays,
)
from dist_ens.errors import RunError, UserError

_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_NPZ_KEYS = ("train_images", "train_labels", "test_images", "test_labels")


def open_digits(num_classes: int | None) -> Source:
    """The 1797 digits that come with scikit-learn: float32[8, 8] in 0…16, a fifth held out.

    Args:
        num_classes: See `source_of_arrays`.

    Returns:
        The source.

    Raises:
        RunError: If scikit-learn is not installed with its data.

    Source: UCI, Optical Recognition of Handwritten Digits.
    """
    # Its file is read without it: to import it takes longer than to train on them.
    package = importlib.util.find_spec("sklearn")
    path = pathlib.Path((package and package.origin) or "").parent / "datasets/data/digits.csv.gz"
    if not path.is_file():
        raise RunError(f"The digits come with scikit-learn. Received: no {path}. Install it anew.")
    rows = np.loadtxt(io.BytesIO(read_bytes(path)), delimiter=",", dtype=np.float32)
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int32)
    # Every fifth of them, shuffled and then sorted by class: of each class its share.
    shuffled = np.random.RandomState(0).permutation(len(rows))
    test = shuffled[np.argsort(labels[shuffled], kind="stable")][::5]
    train = np.setdiff1d(shuffled, test)
    return source_of_arrays(
        (images[train], labels[train]),
        (images[test], labels[test]),
        num_classes=num_classes,
        name="digits",
    )


def open_idx(folder: str, num_classes: int | None) -> Source:
    """A folder of the four files of MNIST and its like, gzipped or not: uint8[rows, columns].

    Args:
        folder: Holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the two `t10k-…`.
        num_classes: See `source_of_arrays`.

    Returns:
        The source.

    Raises:
        UserError: For a file that is missing, truncated or of another format.
    """
    train, test = (
        (_read_idx(folder, images), _read_idx(folder, labels))
        for images, labels in _IDX_FILES.values()
    )
    return source_of_arrays(train, test, num_classes=num_classes, name=f"idx:{folder}")


def open_idx_test(folder: str) -> Split:
    """The test split of a folder of IDX files, which may have no other."""
    inputs, labels = (_read_idx(folder, name) for name in _IDX_FILES["test"])
    check_examples(f"idx:{folder}, split test", inputs, labels)
    return ArraySplit(inputs, labels.astype(np.int32))


def describe_idx(folder: str, num_classes: int | None) -> tuple[Spec, int]:
    """What `open_idx` would yield, and how many for training: from the header of the images.

    The labels are read where `num_classes` is None.
    """
    images, labels = _IDX_FILES["train"]
    path = _idx_path(folder, images)
    # Two bytes of zero, type, number of axes, and at most 255 lengths.
    count, *shape = _idx_header(path, read_bytes(path, 4 + 4 * 255))
    if num_classes is None:
        num_classes = count_classes(f"idx:{folder}, split train", _read_idx(folder, labels))
    return Spec(tuple(shape), "uint8", (), num_classes), count


def _read_idx(folder: str, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, a type (8: uint8), the number of axes, their lengths, data."""
    path = _idx_path(folder, name)
    content = read_bytes(path)
    shape = _idx_header(path, content)
    header = 4 + 4 * len(shape)
    if len(content) - header != np.prod(shape, dtype=np.int64):
        raise UserError(
            f"An IDX file holds as many bytes as its header says. Received: {path}, "
            f"{len(content) - header} bytes for shape {list(shape)}. It is truncated or damaged: "
            "fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _idx_path(folder: str, name: str) -> pathlib.Path:
    directory = pathlib.Path(folder).expanduser()
    candidates = [directory / f"{name}.gz", directory / name]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise UserError(
            f"An IDX folder holds {name}.gz or {name}. Received: {directory}, "
            f"{'which has neither' if directory.is_dir() else 'which is no folder'}. "
            "Correct idx:DIR."
        )
    return path


def _idx_header(path: pathlib.Path, content: bytes) -> tuple[int, ...]:
    """Lengths of the axes, from the first bytes of a file."""
    axes = content[3] if len(content) > 3 else 0
    header = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or not axes or len(content) < header:
        raise UserError(
            "An IDX file begins with 00 00 08, its number of axes and their lengths. Received: "
            f"{path}, which begins with {content[:4].hex(' ') or 'nothing'}. Fetch the file again."
        )
    return struct.unpack(f">{axes}I", content[4:header])


def read_bytes(path: pathlib.Path, limit: int = -1) -> bytes:
    """The content of a file, unpacked if its name ends in `.gz`; of a limit its first bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"A file whose name ends in .gz is gzipped whole. Received: {path}: {error}. "
            "It is truncated or no gzip: fetch it again, or take the ending off its name."
        ) from error
    except OSError as error:
        raise UserError(
            f"A data file can be read. Received: {path}: {error.strerror}. Correct the path."
        ) from error


def open_npz(file: str, num_classes: int | None) -> Source:
    """An `.npz` file with `train_images`, `train_labels`, `test_images` and `test_labels`.

    Args:
        file: The path.
        num_classes: See `source_of_arrays`.

    Returns:
        The source.

    Raises:
        UserError: For a file that cannot be read, or lacks one of the arrays.
    """
    path = pathlib.Path(file).expanduser()
    with opened_npz(path, _NPZ_KEYS) as archive:
        arrays = {key: archive[key] for key in _NPZ_KEYS}
    return source_of_arrays(
        (arrays["train_images"], arrays["train_labels"]),
        (arrays["test_images"], arrays["test_labels"]),
        num_classes=num_classes,
        name=f"npz:{path}",
    )


def describe_npz(file: str, num_classes: int | None) -> tuple[Spec, int]:
    """What `open_npz` would yield, and how many for training: from the header of the images.

    The labels are read where `num_classes` is None.
    """
    path = pathlib.Path(file).expanduser()
    images, labels = _NPZ_KEYS[:2]
    with opened_npz(path, _NPZ_KEYS) as archive:
        with archive.zip.open(f"{images}.npy") as member:
            old = npy.read_magic(member) == (1, 0)
            read_header = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
            (count, *shape), _, dtype = read_header(member)
        if num_classes is None:
            num_classes = count_classes(f"npz:{path}, split train", archive[labels])
    return Spec(tuple(shape), narrowed(dtype).name, (), num_classes), count
