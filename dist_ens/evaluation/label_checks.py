"""Checks of inputs, labels and weights, for training and for evaluation."""

import difflib
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.narrowing import check_finite_inputs
from dist_ens.ground.types import Data, Labels, Weights
from dist_ens.losses import Categorical, Distribution, Objective

Shape = tuple[int, ...]
# Largest difference between 1 and the sum of shares of classes, which may be rounded to 16 bits.
_LARGEST_REST = 0.02
# Least similarity of a misspelt key to the right one, in [0, 1]. "heights" may be its own key.
_SIMILAR = 0.9


def check_keys(objective: Objective, keys: Iterable[object]) -> None:
    """Raises a `UserError` if a key of the data is similar to an absent one of the objective."""
    given = list(keys)
    absent = {objective.INPUTS, objective.LABELS, objective.WEIGHTS}.difference(given)
    for key in given:
        for near in difflib.get_close_matches(str(key).lower(), absent, cutoff=_SIMILAR):
            raise UserError(
                f"The data has the key {key!r}, which the objective {objective.name} does not "
                f"read. Did you mean {near!r}? Rename the key."
            )


def check_inputs(objective: Objective | None, data: Data, name: str = "The data") -> None:
    """Raises a `UserError` if an input of a dict of arrays is NaN or infinite.

    A loss function, without an objective, may take inputs that are missing. Batches are not read: a
    policy for failed updates may skip those with NaN.
    """
    if objective is not None and isinstance(data, Mapping) and objective.INPUTS in data:
        inputs = jax.tree.map(np.asarray, data[objective.INPUTS])
        check_finite_inputs(f"{name}[{objective.INPUTS!r}]", inputs)


def check_labels(
    distribution: Distribution, outputs: Shape, labels: Labels, weights: Weights = None
) -> None:
    """Raises a `UserError` unless there are the labels of each row of a member's outputs.

    Labels of one target may have a last axis of length 1. Weights are those of rows or of examples.
    """
    rows, of_classes = outputs[:-1], isinstance(distribution, Categorical)
    allowed, hint, types = {rows, (*rows, 1)}, "", "iu"
    if distribution.num_targets is not None:
        if labels.shape != (*rows, distribution.num_targets):
            raise UserError(
                f"The labels have the shape {_shown(labels.shape)}, and the objective has "
                f"{counted(distribution.num_targets, 'target')}. Give labels of the shape "
                f"{_shown((*rows, distribution.num_targets))}, or another number of targets."
            )
        allowed, types = {*allowed, labels.shape}, "iub"
    elif of_classes and labels.shape == outputs:
        hint = "One-hot rows are converted to classes by argmax(axis=-1). "
    for name, given, shapes in (
        ("labels", labels, allowed),
        ("weights", weights, {rows, (*rows, 1), rows[:1]}),
    ):
        if given is not None and given.shape not in shapes:
            raise UserError(
                f"The {name} have the shape {_shown(given.shape)}, and the outputs of a member "
                f"have the shape {_shown(outputs)}. {hint}Give one number for each row of the "
                f"outputs: shape {_shown(rows)}."
            )
    if of_classes and labels.dtype.kind not in types:
        raise UserError(
            f"The labels have the type {labels.dtype}, and classes are whole numbers. Convert the "
            "labels with astype(int)."
        )


def check_examples(
    objective: Objective, examples: Mapping[str, np.ndarray], batch: str | None = None
) -> None:
    """Raises a `UserError` if a label or a weight of training examples has a wrong value.

    The weights of a batch, which is given by its name, may all be 0.
    """
    labels = np.asarray(examples[objective.LABELS])
    if objective.WEIGHTS in examples:
        check_weights(np.ravel(examples[objective.WEIGHTS]), batch)
    subject = f"The labels of {batch}" if batch else "The labels"
    check_values(objective, labels, subject)


def check_values(objective: Objective, labels: np.ndarray, subject: str) -> None:
    """Raises a `UserError` if a label is no class, or no number, that an objective takes."""
    if objective.num_classes is not None and objective.label_shape and labels.dtype.kind == "f":
        if ((labels < 0) | (labels > 1)).any():
            raise UserError(
                f"{subject} lie in [{labels.min():g}, {labels.max():g}], and {objective.name} has "
                "labels that are 0 or 1, or probabilities. Correct the labels."
            )
    elif objective.num_classes is not None:
        check_classes(labels, objective.num_classes, subject)
    check_finite(objective, labels, subject)


def check_classes(labels: np.ndarray, num_classes: int, subject: str = "The labels") -> None:
    """Raises a `UserError` if labels are neither classes nor shares of classes."""
    if labels.dtype.kind == "f" and labels.shape[1:] and labels.shape[-1] == num_classes:
        wrong = (abs(labels.sum(axis=-1) - 1) > _LARGEST_REST) | (labels < 0).any(axis=-1)
        if wrong.any():
            raise UserError(
                f"{subject} are shares of classes, and {wrong.sum():,} rows are negative or do not "
                "sum to 1. Give one label for each example, or shares."
            )
    elif labels.dtype.kind in "iu" and labels.size:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise UserError(
                f"{subject} lie in [{low}, {high}], and the objective has {num_classes} classes, 0 "
                f"to {num_classes - 1}. Correct the labels or the number of classes."
            )


def check_finite(
    objective: Objective | None, labels: np.ndarray, subject: str = "The labels"
) -> None:
    """Raises a `UserError` if real targets or shares of classes are NaN or infinite.

    An objective whose own loss is finite for such a label, as that of missing targets may be, takes
    the labels. So does a loss function, without an objective.
    """
    if objective is None or labels.dtype.kind != "f" or np.isfinite(labels).all():
        return
    wrong = labels[~np.isfinite(labels)][0]
    of_classes = () if objective.num_classes is None else (objective.num_classes,)
    shape = objective.label_shape or of_classes
    outputs = jnp.zeros((1, objective.num_outputs))
    if not np.isfinite(objective.example_loss(outputs, jnp.full((1, *shape), wrong))).all():
        rows = np.flatnonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))
        raise UserError(
            f"{subject} have {'NaN' if np.isnan(wrong) else 'infinity'} in row {rows[0]:,} of "
            f"{len(labels):,} ({counted(len(rows), 'such row')} in all). Remove these rows, or "
            "replace the values."
        )


def check_weights(weights: np.ndarray, batch: str | None = None) -> None:
    """Raises a `UserError` if a weight is negative or not finite, or all of a data set are 0."""
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        raise UserError(
            f"{wrong.sum()} of {len(weights)} weights{f' of {batch}' if batch else ''} are "
            f"negative or not finite, such as {weights[wrong][0]}. Give weights of 0 or more."
        )
    if batch is None and not weights.any():
        raise UserError("All weights are 0, so no example counts. Give some a positive weight.")


def _shown(shape: Shape) -> str:
    return f"[{', '.join(map(str, ('examples', *shape[1:])))}]"
