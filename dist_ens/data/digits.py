"""The digits data set of scikit-learn."""

import importlib.util
import pathlib

import numpy as np

from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.source import Source


def open_digits(num_classes: int | None = None) -> Source:
    """Returns the 1797 digits of scikit-learn. A fifth of them is the test split.

    Inputs are float32[8, 8] in [0, 16].

    Args:
        num_classes: Number of classes. None counts those of the training labels.

    Returns:
        The source.

    >>> source = open_digits()
    >>> len(source.train), len(source.test)
    (1437, 360)

    Source: UCI, Optical Recognition of Handwritten Digits.
    """
    # The file is read without scikit-learn, whose import takes longer than training on the digits.
    package = importlib.util.find_spec("sklearn")
    folder = pathlib.Path(package.origin if package and package.origin else "").parent
    rows = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32)
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int32)
    # The shuffled examples are sorted by class, so that each class gives a fifth to the test split.
    shuffled = np.random.RandomState(0).permutation(len(rows))
    test = shuffled[np.argsort(labels[shuffled], kind="stable")][::5]
    train = np.setdiff1d(shuffled, test)
    return source_of_arrays(
        (images[train], labels[train]),
        (images[test], labels[test]),
        num_classes=num_classes,
        name="digits",
    )
