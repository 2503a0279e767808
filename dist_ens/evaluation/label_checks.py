"""Checks that labels and weights match the outputs of members."""

import difflib
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError, counted
from dist_ens.losses import Categorical, Distribution, Objective
from dist_ens.types import Labels, Weights

Shape = tuple[int, ...]
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
        UserError: If the labels do not have the shape [batch, ...], classes are not whole numbers,
            or the weights have neither the shape of the labels nor [batch].
    """
    _check_shapes(distribution, outputs, labels.shape, None if weights is None else weights.shape)
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
        UserError: If an integer label is not in [0, num_classes).
    """
    if labels.dtype.kind not in "iu" or not labels.size:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise UserError(
            f"{subject} lie in [{low}, {high}], and the objective has "
            f"{counted(num_classes, 'class')}, 0 to {num_classes - 1}. Correct the labels or the "
            "number of classes."
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
    distribution: Distribution,
    outputs: Shape,
    labels: Shape,
    weights: Shape | None,
) -> None:
    """Raises a `UserError` if the shapes of labels or weights do not match the outputs."""
    if labels != outputs[:-1]:
        column = "Take the column: labels[:, 0]. " if labels[1:] == (1,) else ""
        one_hot = labels == outputs and isinstance(distribution, Categorical)
        classes = "Convert one-hot rows with argmax. " if one_hot and not column else ""
        raise UserError(
            f"The labels have the shape {_shown(labels)}, and the outputs of a member have the "
            f"shape {_shown(outputs)}. {column}{classes}Give one label for each row of the "
            f"outputs: shape {_shown(outputs[:-1])}."
        )
    if weights is not None and weights not in (labels, labels[:1]):
        raise UserError(
            f"The weights have the shape {_shown(weights)}, and the labels have the shape "
            f"{_shown(labels)}. Give one weight for each example or for each label."
        )


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
