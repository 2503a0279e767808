"""Checks of the values of examples and labels."""

import numpy as np

from dist_ens.ground.errors import UserError
from dist_ens.ground.finite import check_finite
from dist_ens.ground.narrowing import first_index


def check_numbers(where: str, inputs: np.ndarray) -> None:
    """Raises a `UserError` unless inputs are finite numbers of at least one example."""
    if not inputs.shape or not inputs.shape[0]:
        raise UserError(f"{where} has no examples: shape {list(inputs.shape)}. Add one or more.")
    if inputs.dtype.kind not in "biuf":
        raise UserError(
            f"{where} has inputs of type {inputs.dtype}, which holds no real numbers. Convert them "
            "to an array of floats or integers, whose rows are equally long."
        )
    check_finite(where, inputs)


def count_classes(where: str, labels: np.ndarray) -> int:
    """Returns the number of classes of training labels, which must be all of 0, 1, 2, …"""
    present = np.unique(labels)
    count = int(present[-1]) + 1
    if present[0] < 0 or len(present) != count or count == 1:
        raise UserError(
            f"{where} has {len(present)} different labels from {present[0]} to {present[-1]}, not "
            "all of 0, 1, 2, … of two or more classes. Correct them, or set num_classes. Save "
            "real targets as floats."
        )
    return count


def check_labels(where: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises a `UserError` unless every label lies in [0, num_classes)."""
    bad = (labels < 0) | (labels >= num_classes)
    if bad.any():
        index = first_index(bad)
        raise UserError(
            f"{where} has the label {labels[index]} at index {index}, outside [0, {num_classes}); "
            f"{np.count_nonzero(bad):,} in all. Correct the labels, or set num_classes."
        )
