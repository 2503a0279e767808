"""Checks of the arguments of `fit`, before anything is compiled."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.callbacks.protocol import HOOKS
from dist_ens.checkpoint import Checkpoints
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import explained_errors
from dist_ens.ensemble.initial_state import inputs_of
from dist_ens.errors import UserError, counted, first_line, kind_of
from dist_ens.evaluation import label_checks
from dist_ens.ground.numbers import MOST_STEPS, require_coefficient, whole_number
from dist_ens.layout import BATCH, MEMBER_BATCH, MEMBERS, specs_of_batch
from dist_ens.state import State, described, refuse_lists
from dist_ens.training.arguments import FitArguments
from dist_ens.training.data import EPOCH, OrderedSplit, eval_steps_of
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.held_out import EvalData
from dist_ens.types import Callback, Inputs, Outputs

# Training is slow if the mean or the standard deviation of the labels is larger, because the
# outputs start near 0.
_LARGE = 10.0


def check_arguments(given: FitArguments) -> None:
    """Raises a `UserError` unless the arguments of `fit` have their types and ranges."""
    ensemble, steps, epochs = given.ensemble, given.steps, given.epochs
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
    if isinstance(given.eval_every, str) and given.eval_every != EPOCH:
        raise UserError(
            f"eval_every is {given.eval_every!r}. Give a whole number of steps, or {EPOCH!r}."
        )
    cadences: list[tuple[str, Any]] = [
        ("steps_per_call", given.steps_per_call),
        ("log_every", given.log_every),
    ]
    cadences += [("eval_every", given.eval_every)] if given.eval_every != EPOCH else []
    cadences += [("every", getattr(callback, "every", None)) for callback in given.callbacks]
    for name, value in cadences:
        if value is not None:
            whole_number(name, value, least=1)
    _check_instance("checkpoints", given.checkpoints, Checkpoints, "Checkpoints('runs/a')")
    _check_instance("state", given.state, State, "State, as Ensemble.init returns it")
    for callback in given.callbacks:
        _check_callback(callback)
    if given.eval_data is not None and given.validation is not None:
        raise UserError(
            "fit scores one set of examples, and got both eval_data and "
            f"validation={given.validation}. Leave one of them out."
        )
    if isinstance(given.data, Mapping | tuple):  # A list is an iterable of batches.
        refuse_lists(given.data, "the data")


def _check_instance(name: str, value: object, cls: type, instead: str) -> None:
    """Raises a `UserError` unless an argument is None or an instance of a class."""
    if value is not None and not isinstance(value, cls):
        raise UserError(f"{name} is {kind_of(value)}. Give a dist_ens.{instead}.")


def _check_callback(callback: Callback) -> None:
    """Raises a `UserError` unless an object is a callback."""
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


def check_parts(
    given: FitArguments,
    train: TrainingData,
    eval_data: EvalData | None,
    say: Callable[[str], None],
) -> Mapping[str, str | None]:
    """Checks that the ensemble, the data and the arguments fit each other.

    Args:
        given: Arguments of `fit`.
        train: Training data.
        eval_data: Data to score; None to score nothing.
        say: Function that prints a note.

    Returns:
        The direction of each score by its name; empty without data to score.

    Raises:
        UserError: If they do not fit each other.
    """
    ensemble = given.ensemble
    label_checks.check_inputs(ensemble.trained_objective, given.data)
    _check_scoring(given, train, eval_data, say)
    _check_groups(ensemble, train)
    _check_labels(ensemble, train, say)
    if given.state is None and given.checkpoints is None:
        # XLA compiles while Python traces the step.
        ensemble.compile_init(train.batch)
    _check_step(ensemble, train)
    return {} if eval_data is None else eval_data.check(ensemble, train.batch)


def _check_scoring(
    given: FitArguments,
    train: TrainingData,
    eval_data: EvalData | None,
    say: Callable[[str], None],
) -> None:
    """Checks that there is data to score if evaluations are configured."""
    steps, per_call = eval_steps_of(train, given.eval_every), given.steps_per_call
    if per_call is not None and steps is not None and steps % per_call:
        say(
            f"Note: evaluations are at the ends of calls of {per_call} steps, and every "
            f"{float(steps):g} steps were asked for. Leave steps_per_call out, or set it to 1."
        )
    for name in ("eval_every", "metrics"):
        if eval_data is None and getattr(given, name):
            raise UserError(
                f"{name} was given, and there is no data to score. Give eval_data, or "
                f"validation=0.1 to hold out training examples, or leave {name} out."
            )


def _check_labels(ensemble: Ensemble, train: TrainingData, say: Callable[[str], None]) -> None:
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


def _check_groups(ensemble: Ensemble, train: TrainingData) -> None:
    """Raises a `UserError` if data and ensemble have different numbers of groups."""
    num_groups = train.order.num_groups if isinstance(train, OrderedSplit) else 1
    if num_groups != ensemble.num_groups:
        raise UserError(
            f"The training data has num_groups={num_groups}, and the ensemble has "
            f"num_groups={ensemble.num_groups}: each member belongs to one group, and learns from "
            f"its examples alone. Make the ensemble with num_groups={num_groups}."
        )


def _check_step(ensemble: Ensemble, train: TrainingData) -> None:
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
