"""Objectives: a loss with the predictive distribution that it trains."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from dist_ens.losses.distribution import Distribution

Loss = Callable[[jax.Array, jax.Array], jax.Array]
TrainingScores = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss of outputs and labels, with the predictive distribution that it trains.

    Attributes:
        name: Name of the objective.
        example_loss: Function of outputs [batch, ..., outputs] and labels [batch, ...] that
            returns the loss of each label, float[batch, ...].
        distribution: Predictive distribution that the outputs parametrise. It brings the default
            metrics.
        training_scores: Function of outputs and labels that returns the scores to report with the
            training loss, `{name: float[batch, ...]}`.
        num_outputs: Number of outputs of the network for each label.
        num_classes: Number of classes; None for real targets.
        standardize: Whether the targets are standardised by their training mean and standard
            deviation, which `fit` sets in a state at step 0.

    >>> from dist_ens.losses import Point
    >>> absolute_error = Objective(
    ...     "absolute_error",
    ...     lambda outputs, targets: abs(targets - outputs[..., 0]),
    ...     Point(),
    ...     lambda outputs, targets: {},
    ...     num_outputs=1,
    ... )
    >>> absolute_error.example_loss(jax.numpy.array([[1.0]]), jax.numpy.array([3.0])).tolist()
    [2.0]
    """

    # These are the keys of a batch.
    INPUTS: ClassVar[str] = "inputs"
    LABELS: ClassVar[str] = "labels"
    WEIGHTS: ClassVar[str] = "weights"

    name: str
    example_loss: Loss
    distribution: Distribution
    training_scores: TrainingScores
    num_outputs: int
    num_classes: int | None = None
    standardize: bool = False

    def shares_of_labels(self, labels: jax.Array) -> jax.Array:
        """Returns labels that can be averaged: shares of the classes, or the real targets.

        Labels of classes are int[batch, ...], or already shares, float[batch, ..., classes].

        >>> from dist_ens.losses import categorical
        >>> categorical(2).shares_of_labels(jax.numpy.array([1]))
        Array([[0., 1.]], dtype=float32)
        """
        if self.num_classes is None or jax.numpy.issubdtype(labels.dtype, jax.numpy.floating):
            return labels
        return jax.nn.one_hot(labels, self.num_classes)
