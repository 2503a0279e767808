"""The digits that come with scikit-learn."""

import importlib.util
import pathlib

import numpy as np

from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.source import Source
from dist_ens.errors import RunError


def open_digits(num_classes: int | None) -> Source:
    """Returns the 1797 digits of scikit-learn: float32[8, 8] in 0…16, a fifth held out.

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
        raise RunError(f"The digits of scikit-learn are missing: no {path}. Install it again.")
    rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
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
