"""The alignment of labels with the rows of predictions."""

import numpy as np

from dist_ens.errors import UserError
from dist_ens.types import Labels


def one_a_row(labels: Labels, rows: tuple[int, ...]) -> Labels:
    """Returns labels without an axis of length 1 that the predictions do not have.

    A column of labels [batch, 1] and predictions [batch] would broadcast to [batch, batch].

    Args:
        labels: Labels, [*rows] or [*rows, 1], or shares of classes, [*rows, classes].
        rows: Shape of the predictions without their last axis, such as (batch,).

    Raises:
        UserError: If labels and predictions would broadcast to a shape that neither has.

    >>> one_a_row(np.zeros((8, 1)), (8,)).shape
    (8,)
    """
    at, shape = len(rows), np.shape(labels)
    if shape[: at + 1] == (*rows, 1):
        shape = rows + shape[at + 1 :]
        labels = labels.reshape(shape)
    try:
        both = np.broadcast_shapes(shape, rows)
    except ValueError:
        return labels  # The caller compares the shapes.
    if both not in (shape, rows):
        raise UserError(
            f"The labels have the shape {list(shape)}, and the predictions {list(rows)}: together "
            f"they would have {list(both)}. Give one label for each prediction."
        )
    return labels
