"""Checks of examples, of their labels, and of an object that is given as a data set."""

import numpy as np

from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.data.splits import example_shapes_of
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.narrowing import check_finite, first_index, narrowed
from dist_ens.ground.types import Inputs, PyTree


def check_numbers(where: str, inputs: np.ndarray) -> None:
    """Raises a `UserError` unless inputs are finite numbers of at least one example."""
    if not inputs.shape or not inputs.shape[0]:
        raise UserError(f"{where} has no examples: shape {list(inputs.shape)}. Add one or more.")
    narrowed(inputs, inputs.dtype, where)
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


def convert_inputs(spec: Spec, inputs: Inputs, where: str) -> np.ndarray:
    """Returns inputs [examples, ...] in `spec.input_dtype`, on which the members were trained.

    Of a run on a table they are a table; see `TableRule.encode`. Whole numbers fit in an integer
    type, and 0 and 1 fit in bool. Any number fits in a float type, where it is rounded. Inputs that
    the source standardises are returned in float64.
    """
    if spec.table is not None:
        return narrowed(spec.table.encode(inputs), spec.input_dtype, where)
    inputs = np.asarray(inputs)
    if not inputs.ndim or inputs.shape[1:] != spec.input_shape:
        wanted = ", ".join(map(str, ("examples", *spec.input_shape)))
        raise UserError(
            f"{where} has the shape {list(inputs.shape)}, and the members take [{wanted}]. Reshape "
            "the array; a single example is an array of length 1."
        )
    check_numbers(where, inputs)
    is_scaled = spec.standardization is not None and spec.standardization.has_inputs
    to = np.dtype("float64" if is_scaled else spec.input_dtype)
    converted = narrowed(inputs, to, where, exact=is_scaled)
    has_positions = spec.label_shape and spec.num_targets is None
    if has_positions and spec.num_classes and to.kind in "iu":  # Text: tokens, like the labels.
        check_labels(where, converted, spec.num_classes)
    return converted


def check_source(source: object, *, any_parts: bool = False) -> None:
    """Raises a `UserError` unless an object is a source whose `spec` describes its examples.

    With `any_parts`, for a loss function that takes the batch, examples may have any parts.
    """
    if not isinstance(source, Source):
        raise UserError(
            f"source is {kind_of(source)}, not a dist_ens.data.Source. Make one of arrays "
            "with source_of_arrays((inputs, labels), (test_inputs, test_labels))."
        )
    for split in () if any_parts else (source.train, source.test):
        if (found := example_shapes_of(split)) != (described := source.spec.example):
            raise UserError(f"A split yields {found}, and its source.spec describes {described}.")


def check_parts(where: str, examples: PyTree) -> None:
    """Raises a `UserError` unless examples are a dict of inputs and labels, or weights too."""
    names = {*examples} if isinstance(examples, dict) else {kind_of(examples)}
    if names - {"weights"} != {"inputs", "labels"}:
        raise UserError(
            f"{where} yields parts {sorted(names)}, and training uses 'inputs' and 'labels' only. "
            "Leave out the other parts, and examples that do not count."
        )
