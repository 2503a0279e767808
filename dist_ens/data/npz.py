"""A source of .npz files."""

import contextlib
from collections.abc import Iterator

from dist_ens.array_files import opened_npz
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.data.stored import StoredSplit, describe_stored, source_of_stored
from dist_ens.paths import given_path, shortened

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_NAME = "npz:FILE"


def open_npz(file: str, num_classes: int | None) -> Source:
    """Opens an .npz file with `train_images`, `train_labels`, `test_images` and `test_labels`.

    Args:
        file: Path of the file.
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source.

    Raises:
        UserError: If the file cannot be read, lacks one of the arrays, or has another length than
            its headers declare. Also if the arrays cannot be used.
    """
    with _stored(file) as (train, test):
        return source_of_stored(train, test, num_classes)


def describe_npz(file: str, num_classes: int | None) -> tuple[Spec, int]:
    """Describes the source that `open_npz` returns, from the headers of the four arrays.

    Args:
        file: Path of the file.
        num_classes: Number of classes. None reads the training labels and counts them.

    Returns:
        Description of the examples, and the number of training examples.

    Raises:
        UserError: If a header or the training labels cannot be used.
    """
    with _stored(file) as (train, test):
        return describe_stored(train, test, num_classes)


@contextlib.contextmanager
def _stored(file: str) -> Iterator[tuple[StoredSplit, StoredSplit]]:
    """Opens a file as a context manager, and reads the headers of its two splits."""
    path = given_path(file, _NAME)
    with opened_npz(path, _KEYS, _NAME) as (train_images, train_labels, test_images, test_labels):
        name = f"npz:{shortened(str(path))}"
        yield (
            StoredSplit(name, "train", train_images, train_labels),
            StoredSplit(name, "test", test_images, test_labels),
        )
