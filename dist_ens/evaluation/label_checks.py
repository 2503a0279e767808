"""Checks of labels and weights against the outputs that they are compared with."""

from collections.abc import Sequence

import numpy as np

from dist_ens.errors import UserError
from dist_ens.losses import Categorical, Distribution


def check_labels(
    distribution: Distribution,
    outputs: Sequence[int],
    labels: Sequence[int],
    dtype: np.dtype,
    weights: Sequence[int] | None,
) -> None:
    """Checks that there is one label, and at most one weight, for each row of the outputs.

    Args:
        distribution: Predictive distribution of the outputs.
        outputs: Shape of a member's outputs, [batch, ..., outputs].
        labels: Shape of the labels.
        dtype: Type of the labels.
        weights: Shape of the weights; None without weights.

    Raises:
        UserError: If the labels have another shape than [batch, ...], classes are not whole
            numbers, or the weights are neither like the labels nor [batch].
    """
    if tuple(labels) != tuple(outputs[:-1]):
        column = "Take the column: labels[:, 0]. " if tuple(labels[1:]) == (1,) else ""
        one_hot = tuple(labels) == tuple(outputs) and isinstance(distribution, Categorical)
        classes = "Convert one-hot rows with argmax. " if one_hot and not column else ""
        raise UserError(
            f"The labels have the shape {_shown(labels)}, and the outputs of a member have the "
            f"shape {_shown(outputs)}. {column}{classes}Give one label for each row of the "
            f"outputs: shape {_shown(outputs[:-1])}."
        )
    if isinstance(distribution, Categorical) and dtype.kind not in "iu":
        raise UserError(
            f"The labels have the type {dtype}, and classes are whole numbers. Convert the labels "
            "with astype(int)."
        )
    if weights is not None and tuple(weights) not in (tuple(labels), tuple(labels[:1])):
        raise UserError(
            f"The weights have the shape {_shown(weights)}, and the labels have the shape "
            f"{_shown(labels)}. Give one weight for each example or for each label."
        )


def check_weights(weights: np.ndarray) -> None:
    """Checks that weights [rows] can weight a mean.

    Raises:
        UserError: If one is negative or not finite, or all are 0.
    """
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        raise UserError(
            f"{wrong.sum()} of {len(weights)} weights are negative or not finite, such as "
            f"{weights[wrong][0]}. Give weights of 0 or more."
        )
    if not weights.any():
        raise UserError(
            "All weights are 0, so no example can be scored. Give some a positive weight."
        )


def _shown(shape: Sequence[int]) -> str:
    """Returns a shape whose first axis holds the examples, of which a batch has any number."""
    return f"[{', '.join(map(str, ('examples', *shape[1:])))}]"
