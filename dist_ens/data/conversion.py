"""Conversion of given inputs to the type on which the members were trained."""

import numpy as np

from dist_ens.data.checks import check_labels, check_numbers
from dist_ens.data.spec import Spec
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import narrowed


def convert_inputs(spec: Spec, inputs: np.ndarray, where: str) -> np.ndarray:
    """Returns inputs [examples, ...] in `spec.input_dtype`, on which the members were trained.

    Whole numbers fit in an integer type, and 0 and 1 fit in bool. Any number fits in a float type,
    where it is rounded. Inputs that the source standardises are returned in float64.
    """
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
    if spec.label_shape and spec.num_classes and to.kind in "iu":  # Text: tokens, like the labels.
        check_labels(where, converted, spec.num_classes)
    return converted
