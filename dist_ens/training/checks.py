"""Checks of the arguments of `fit`, before anything is compiled."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.callbacks.protocol import HOOKS
from dist_ens.checkpoint import Checkpoints
from dist_ens.data import Split
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import explained_errors
from dist_ens.ensemble.initial_state import inputs_of
from dist_ens.errors import UserError, counted, first_line, kind_of
from dist_ens.evaluation import label_checks
from dist_ens.ground.numbers import MOST_STEPS, require_coefficient, whole_number
from dist_ens.layout import BATCH, MEMBER_BATCH, MEMBERS, specs_of_batch
from dist_ens.losses import Objective
from dist_ens.metrics import Metric
from dist_ens.state import State, described
from dist_ens.training.data import EPOCH, OrderedSplit
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluation_data import EvalData
from dist_ens.types import Callback, Inputs, Outputs

# Training is slow if the mean or the standard deviation of the labels is larger, because the
# outputs start near 0.
_LARGE = 10.0


def check_arguments(
    ensemble: Ensemble,
    steps: int | None,
    epochs: float | None,
    steps_per_call: int | None,
    eval_every: int | str | None,
    log_every: int,
    checkpoints: Checkpoints | None,
    state: State | None,
    callbacks: Sequence[Callback],
) -> None:
    """Raises a `UserError` unless the arguments of `fit` have their types and ranges."""
    if not isinstance(ensemble, Ensemble):
        raise UserError(
            f"ensemble is {kind_of(ensemble)}. Give a dist_ens.Ensemble, made of a "
            "network, an optimizer and a loss."
        )
    if (steps is None) == (epochs is None):
        raise UserError(
            f"fit takes exactly one of steps and epochs: got steps={steps}, epochs={epochs}."
        )
    if steps is not None:
        whole_number("steps", steps, least=0, most=MOST_STEPS)
    if epochs is not None:
        require_coefficient("epochs", epochs, "Give the number of passes over the data.")
    if isinstance(eval_every, str) and eval_every != EPOCH:
        raise UserError(
            f"eval_every is {eval_every!r}. Give a whole number of steps, or {EPOCH!r}."
        )
    for name, value in (
        ("steps_per_call", steps_per_call),
        ("eval_every", eval_every),
        ("log_every", log_every),
    ):
        if value is not None and (name, value) != ("eval_every", EPOCH):
            whole_number(name, value, least=1)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise UserError(
            f"checkpoints is {kind_of(checkpoints)}. Give a folder as "
            "dist_ens.Checkpoints('runs/a')."
        )
    if state is not None and not isinstance(state, State):
        raise UserError(
            f"The given state is {kind_of(state)}. Give a State, such as that of "
            "Ensemble.init or of an earlier FitResult."
        )
    if not isinstance(callbacks, Sequence):
        raise UserError(
            f"callbacks is {kind_of(callbacks)}. Give a list of callbacks: callbacks=[...]."
        )
    for callback in callbacks:
        if isinstance(callback, type):
            raise UserError(
                f"callbacks holds {kind_of(callback)}, not a callback. Give an instance: "
                f"{callback.__name__}(...)."
            )
        if not callable(callback) and not any(hasattr(callback, name) for name in HOOKS):
            raise UserError(
                f"The callback {callback!r} has none of the methods of a callback. Give a function "
                f"of a StepInfo, or an object with one of {', '.join(HOOKS)}."
            )


def check_labels(ensemble: Ensemble, train: TrainingData, say: Callable[[str], None]) -> None:
    """Checks the training labels of an objective, and prints a note if they are large.

    Args:
        ensemble: Ensemble to train.
        train: Training data.
        say: Function that prints a sentence.

    Raises:
        UserError: If a label is not a class or not finite, the objective standardises the labels of
            an iterable or equal labels, or a key is misspelt.
    """
    objective = ensemble.trained_objective
    if objective is None:
        return
    if isinstance(train.batch, Mapping):
        label_checks.check_keys(objective, train.batch)
    if not isinstance(train, OrderedSplit):
        if objective.standardize:
            raise UserError(
                f"{objective.name}(standardize=True) takes the mean and the standard deviation of "
                "all training labels, and the data is an iterable. Give the data as arrays, or "
                "standardise the labels in the iterable."
            )
        return
    if not train.split.in_memory:
        return
    examples = train.split.take(np.arange(len(train.split)))
    if not isinstance(examples, Mapping) or objective.LABELS not in examples:
        raise UserError(
            f"The objective {objective.name} takes a dict of arrays with the keys "
            f"{objective.INPUTS!r} and {objective.LABELS!r}: got {described(examples)}. Give "
            f"{{{objective.INPUTS!r}: x, {objective.LABELS!r}: y}}."
        )
    label_checks.check_examples(objective, examples)
    labels = np.asarray(examples[objective.LABELS])
    if objective.num_classes is not None:
        return
    if objective.standardize and labels.min() == labels.max():
        raise UserError(
            f"All training labels are {labels.min():.4g}, and {objective.name}(standardize=True) "
            "divides them by their standard deviation, which is 0. Check that they are the labels, "
            "or leave standardize out."
        )
    mean, std = float(np.mean(labels)), float(np.std(labels))
    if not objective.standardize and max(abs(mean), std) > _LARGE:
        say(
            f"Note: the labels have mean {mean:.4g} and standard deviation {std:.4g}. Networks "
            f"train faster on labels near 0: consider {objective.name}(standardize=True)."
        )


def check_eval_labels(objective: Objective, split: Split) -> None:
    """Raises a `UserError` if a label of a split in memory is not a class, or is not finite.

    Labels of examples of weight 0 are not checked.
    """
    examples = split.take(np.arange(len(split)))
    labels, subject = np.asarray(examples[objective.LABELS]), "The labels of the evaluation data"
    if objective.WEIGHTS in examples:
        weights = np.asarray(examples[objective.WEIGHTS])
        ones = [1] * (labels.ndim - weights.ndim)
        weights = weights.reshape(*weights.shape[: labels.ndim], *ones)
        labels = np.where(weights == 0, labels.dtype.type(0), labels)
    if objective.num_classes is not None:
        label_checks.check_classes(labels, objective.num_classes, subject)
    label_checks.check_finite(objective, labels, subject)


def check_groups(ensemble: Ensemble, train: TrainingData) -> None:
    """Raises a `UserError` if data and ensemble have different numbers of groups."""
    num_groups = train.order.num_groups if isinstance(train, OrderedSplit) else 1
    if num_groups != ensemble.num_groups:
        raise UserError(
            f"The training data has num_groups={num_groups}, and the ensemble has "
            f"num_groups={ensemble.num_groups}: each member belongs to one group, and learns from "
            f"its examples alone. Make the ensemble with num_groups={num_groups}."
        )


def check_scoring(
    eval_data: EvalData | None, eval_every: int | str | None, metrics: Sequence[Metric]
) -> None:
    """Raises a `UserError` if evaluations are configured and there is no data to score."""
    if eval_data is not None:
        return
    for name, is_given in (("eval_every", eval_every is not None), ("metrics", bool(metrics))):
        if is_given:
            raise UserError(
                f"{name} was given, and there is no data to score. Give eval_data, or "
                f"validation=0.1 to hold out training examples, or leave {name} out."
            )


def check_ensemble(ensemble: Ensemble, train: TrainingData) -> None:
    """Checks that network, loss and data fit each other, by tracing a step of one member.

    Args:
        ensemble: Ensemble to train.
        train: Training data.

    Raises:
        UserError: If the network or the loss does not take the batch, or the batch has no equal
            microbatches.
    """
    if ensemble.waves > 1:
        ensemble = ensemble.of_wave  # The state of all waves is not on the devices.
    layout, batch = ensemble.layout, train.batch
    specs = specs_of_batch(ensemble.batch_specs, batch)
    state = ensemble.abstract_state(batch)
    objective = ensemble.trained_objective
    if objective is not None and objective.num_outputs is not None:
        _check_outputs(ensemble, state, train)
    index = None
    if isinstance(train, OrderedSplit):  # Only its examples have positions.
        index = jax.ShapeDtypeStruct((train.order.global_batch_size,), jnp.int32)
    step = layout.map_rows(
        lambda state, batch, index: jax.tree.map(
            lambda leaf: leaf[None],
            ensemble.programs.step(jax.tree.map(lambda leaf: leaf[0], state), batch, index),
        ),
        in_specs=(MEMBERS, specs, BATCH),
        out_specs=MEMBERS,
    )
    try:
        with explained_errors():
            jax.make_jaxpr(step)(state, batch, index)
    except UserError:
        raise
    except Exception as error:  # The network and the loss of a user may raise anything.
        raise UserError(
            f"A training step could not be traced: {type(error).__name__}: {first_line(error)} "
            "Correct the network, the loss, the step or the data."
        ) from error


def _check_outputs(ensemble: Ensemble, state: State, train: TrainingData) -> None:
    """Raises a `UserError` unless the objective takes the network's outputs and the labels."""
    objective, batch = ensemble.trained_objective, train.batch
    inputs = inputs_of(ensemble, batch)

    def outputs(state: State, inputs: Inputs) -> Outputs:
        one = jax.tree.map(lambda leaf: leaf[0], state)
        found = ensemble.network.evaluate(one.params, one.model_state, inputs, one.key)[0]
        return jax.tree.map(lambda leaf: leaf[None], found)

    try:
        found = jax.eval_shape(
            ensemble.layout.map_rows(outputs, (MEMBERS, BATCH), MEMBER_BATCH), state, inputs
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"The network does not take the inputs {described(inputs)}: {type(error).__name__}: "
            f"{first_line(error)} Correct the network or the data."
        ) from error
    shape = getattr(found, "shape", None)
    if objective is not None and (shape is None or shape[-1] != objective.num_outputs):
        kind = f"{found.dtype}{list(shape[1:])}" if shape else f"{kind_of(found)}"
        raise UserError(
            f"The network returned {kind} for inputs {described(inputs)}, and {objective.name} "
            f"takes {counted(objective.num_outputs, 'output')} in the last axis. Change the "
            "network's last layer, or the objective."
        )
    if objective is None or not isinstance(batch, Mapping) or objective.LABELS not in batch:
        return  # The loss says which key is absent.
    labels = batch[objective.LABELS]
    if objective.num_classes is not None and labels.shape == found.shape[1:]:
        if jnp.issubdtype(labels.dtype, jnp.floating):
            return  # They are shares of classes.
        labels = train.first_batch(ensemble.layout)[objective.LABELS]  # The message reads them.
    label_checks.check_labels(
        objective.distribution, found.shape[1:], labels, batch.get(objective.WEIGHTS)
    )
