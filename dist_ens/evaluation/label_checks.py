"""Checks of inputs, and of labels and weights against the outputs of members."""

import difflib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data.checks import check_finite_inputs
from dist_ens.errors import UserError, counted
from dist_ens.losses import Categorical, Distribution, Objective
from dist_ens.types import Data, Labels, Weights

Shape = tuple[int, ...]
# Largest difference between 1 and the sum of shares of classes, which may be rounded to 16 bits.
_LARGEST_REST = 0.02
# Least similarity, in [0, 1], of a misspelt key to the right one. "heights" may be a key of its
# own, and is as similar to "weights" as "wieghts" is (0.86), which has the same letters.
_SIMILAR = 0.9


def check_keys(objective: Objective, keys: Iterable[object]) -> None:
    """Checks that no key of the data is a misspelt key of an objective.

    Other keys are allowed, because a method of the user may read them.

    Args:
        objective: Objective, which reads the inputs, the labels and the weights.
        keys: Keys of the data.

    Raises:
        UserError: If a key is similar to one that the objective reads and that is absent.
    """
    given = list(keys)
    absent = sorted({objective.INPUTS, objective.LABELS, objective.WEIGHTS}.difference(given))
    for key in given:
        name = str(key).lower()
        near = difflib.get_close_matches(name, absent, n=1, cutoff=_SIMILAR)
        near += [each for each in absent if sorted(each) == sorted(name)]
        if near:
            raise UserError(
                f"The data has the key {key!r}, which the objective {objective.name} does not "
                f"read. Did you mean {near[0]!r}? Rename the key."
            )


def check_inputs(objective: Objective | None, data: Data, name: str = "The data") -> None:
    """Checks that the inputs of a dict of arrays are finite.

    Args:
        objective: Objective that reads the data. None for a loss function, which may take inputs
            that are missing.
        data: Dict of arrays. Other data are not read: a policy for failed updates may skip batches
            with NaN.
        name: Name of the data in error messages.

    Raises:
        UserError: If an input is NaN or infinite.
    """
    if objective is not None and isinstance(data, Mapping) and objective.INPUTS in data:
        inputs = jax.tree.map(np.asarray, data[objective.INPUTS])
        check_finite_inputs(f"{name}[{objective.INPUTS!r}]", inputs)


def check_labels(
    distribution: Distribution, outputs: Shape, labels: Labels, weights: Weights = None
) -> None:
    """Checks that there is one label, and at most one weight, for each row of the outputs.

    Args:
        distribution: Predictive distribution of the outputs.
        outputs: Shape of the outputs of one member, [batch, ..., outputs].
        labels: Labels of the batch, or their shape and type.
        weights: Weights of the batch, or their shape and type. Default: no weights.

    Raises:
        UserError: If the labels have neither the shape [batch, ...] nor that shape and a last axis
            of length 1. Also if classes are not whole numbers, or the weights have neither the
            shape of the labels nor [batch].
    """
    _check_shapes(distribution, outputs, labels, None if weights is None else weights.shape)
    if isinstance(distribution, Categorical) and labels.dtype.kind not in "iu":
        raise UserError(
            f"The labels have the type {labels.dtype}, and classes are whole numbers. Convert the "
            "labels with astype(int)."
        )


def check_examples(
    objective: Objective, examples: Mapping[str, np.ndarray], batch: str | None = None
) -> None:
    """Checks the values of the labels and the weights of training examples.

    Args:
        objective: Objective that is trained.
        examples: Examples with labels, and weights if they have any.
        batch: Name of the batch of the examples, such as "batch 3". Default: the examples are a
            whole data set.

    Raises:
        UserError: If a label is not a class or not finite, a weight is negative or not finite, or
            all weights of a data set are 0.
    """
    labels = np.asarray(examples[objective.LABELS])
    if objective.WEIGHTS in examples:
        check_weights(np.ravel(examples[objective.WEIGHTS]), batch)
    subject = f"The labels of {batch}" if batch else "The labels"
    if objective.num_classes is not None:
        check_classes(labels, objective.num_classes, subject)
    check_finite(objective, labels, subject)


def check_classes(labels: np.ndarray, num_classes: int, subject: str = "The labels") -> None:
    """Checks that labels are classes.

    Args:
        labels: Labels, of any shape.
        num_classes: Number of classes.
        subject: Subject of the message.

    Raises:
        UserError: If an integer label is not in [0, num_classes), or shares of classes, float[...,
            num_classes], are negative or do not sum to 1.
    """
    if labels.dtype.kind == "f" and labels.shape[1:] and labels.shape[-1] == num_classes:
        _check_shares(labels, subject)
    if labels.dtype.kind not in "iu" or not labels.size:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise UserError(
            f"{subject} lie in [{low}, {high}], and the objective has "
            f"{counted(num_classes, 'class')}, 0 to {num_classes - 1}. Correct the labels or the "
            "number of classes."
        )


def _check_shares(labels: np.ndarray, subject: str) -> None:
    """Raises a `UserError` if shares of classes are negative or do not sum to 1."""
    wrong = (abs(labels.sum(axis=-1) - 1) > _LARGEST_REST) | (labels < 0).any(axis=-1)
    if wrong.any():
        row = np.argwhere(wrong)[0]
        raise UserError(
            f"{subject} are shares of classes, and those of row {row[0]:,} are "
            f"{np.array2string(labels[tuple(row)], threshold=8)}, which are negative or do not sum "
            f"to 1 ({counted(int(wrong.sum()), 'such row')} in all). An objective of classes needs "
            "one label for each example, or shares that sum to 1."
        )


def check_finite(
    objective: Objective | None, labels: np.ndarray, subject: str = "The labels"
) -> None:
    """Checks that real targets or shares of classes are finite.

    Args:
        objective: Objective of the labels. One whose own loss is finite for such a label, as that
            of missing targets may be, takes the labels.
        labels: Labels, [examples, ...].
        subject: Subject of the message.

    Raises:
        UserError: If a label is NaN or infinite.
    """
    if objective is None or labels.dtype.kind != "f" or np.isfinite(labels).all():
        return
    wrong = labels[~np.isfinite(labels)][0]
    label = np.full(() if objective.num_classes is None else (objective.num_classes,), wrong)
    outputs = jnp.zeros((1, objective.num_outputs))
    if np.isfinite(objective.example_loss(outputs, jnp.asarray(label)[None])).all():
        return
    rows = np.flatnonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))
    raise UserError(
        f"{subject} have {'NaN' if np.isnan(wrong) else 'infinity'} in row {rows[0]:,} of "
        f"{len(labels):,} ({counted(len(rows), 'such row')} in all). Remove these rows, or replace "
        "the values."
    )


def _check_shapes(
    distribution: Distribution, outputs: Shape, labels: Labels, weights: Shape | None
) -> None:
    """Raises a `UserError` if the shapes of labels or weights do not match the outputs."""
    rows = outputs[:-1]
    if labels.shape not in (rows, (*rows, 1)):
        of_classes = labels.shape == outputs and isinstance(distribution, Categorical)
        raise UserError(
            f"The labels have the shape {_shown(labels.shape)}, and the outputs of a member have "
            f"the shape {_shown(outputs)}. {_told_of_rows(labels) if of_classes else ''}Give one "
            f"label for each row of the outputs: shape {_shown(rows)}."
        )
    if weights is not None and weights not in (rows, (*rows, 1), rows[:1]):
        raise UserError(
            f"The weights have the shape {_shown(weights)}, and the labels have the shape "
            f"{_shown(rows)}. Give one weight for each example or for each label."
        )


def _told_of_rows(labels: Labels) -> str:
    """Returns a sentence about labels with a number for each class; empty if they are not here."""
    if isinstance(labels, jax.ShapeDtypeStruct) or not getattr(
        labels, "is_fully_addressable", True
    ):
        return ""
    marked = np.asarray(labels) != 0
    if (marked.sum(axis=-1) == 1).all():
        return "They are one-hot rows, which argmax(axis=-1) converts to classes. "
    return "Their rows mark several classes or none, and an objective of classes needs one. "


def check_weights(weights: np.ndarray, batch: str | None = None) -> None:
    """Checks that weights can weight a mean.

    Args:
        weights: Weights of the rows, float[rows].
        batch: Name of the batch of the rows, whose weights may all be 0. Default: the rows are a
            whole data set.

    Raises:
        UserError: If a weight is negative or not finite, or all weights of a data set are 0.
    """
    of_batch = f" of {batch}" if batch else ""
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        raise UserError(
            f"{wrong.sum()} of {len(weights)} weights{of_batch} are negative or not finite, such "
            f"as {weights[wrong][0]}. Give weights of 0 or more."
        )
    if batch is None and not weights.any():
        raise UserError("All weights are 0, so no example counts. Give some a positive weight.")


def _shown(shape: Shape) -> str:
    """Returns a shape as text, with `examples` in place of the length of the first axis."""
    return f"[{', '.join(map(str, ('examples', *shape[1:])))}]"
