"""Checks of the arguments of `fit`, before anything is compiled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.callbacks.protocol import HOOKS
from dist_ens.checkpoint import Checkpoints
from dist_ens.data import OrderRule
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import explained_errors
from dist_ens.ensemble.initial_state import inputs_of
from dist_ens.evaluation import label_checks
from dist_ens.ground.errors import UserError, counted, first_line, kind_of
from dist_ens.ground.numbers import MOST_STEPS, require_coefficient, whole_number
from dist_ens.ground.state import State, described, refuse_lists
from dist_ens.ground.types import Callback, Inputs, Outputs, Shapes
from dist_ens.layout import BATCH, MEMBER_BATCH, MEMBERS, specs_of_batch
from dist_ens.losses import Objective
from dist_ens.training.arguments import FitArguments
from dist_ens.training.data import EPOCH, OrderedSplit
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.held_out import EvalData

# Training is slow if the mean or the standard deviation of the labels is larger, because the
# outputs start near 0.
_LARGE = 10.0


def check_arguments(given: FitArguments) -> None:
    """Raises a `UserError` unless the arguments of `fit` have their types and ranges."""
    of_init = "a State, such as that of Ensemble.init or of an earlier FitResult"
    _check_type("The ensemble", given.ensemble, Ensemble, "a dist_ens.Ensemble")
    _check_type("checkpoints", given.checkpoints, Checkpoints, "Checkpoints('runs/a')")
    _check_type("order", given.order, OrderRule, "one of dist_ens.data, such as data.kfold(5)")
    _check_type("The given state", given.state, State, of_init)
    _check_type("callbacks", given.callbacks, Sequence, "a list of callbacks: callbacks=[...]")
    steps, epochs = given.steps, given.epochs
    if (steps is None) == (epochs is None):
        raise UserError(
            f"fit takes exactly one of steps and epochs: got steps={steps}, epochs={epochs}."
        )
    if given.eval_data is not None and given.validation is not None:
        raise UserError("fit got both eval_data and validation. Leave one of them out.")
    if steps is not None:
        whole_number("steps", steps, least=0, most=MOST_STEPS)
    if epochs is not None:
        require_coefficient("epochs", epochs, "Give the number of passes over the data.")
    for name in ("steps_per_call", "log_every", "eval_every"):
        value = getattr(given, name)
        if value is not None and (name, value) != ("eval_every", EPOCH):
            whole_number(name, value, least=1)
    for callback in given.callbacks:
        _check_callback(callback)
    if isinstance(given.data, Mapping | tuple):  # A list is an iterable of batches.
        refuse_lists(given.data, "the data")


def _check_type(name: str, value: object, cls: type, instead: str) -> None:
    if value is not None and not isinstance(value, cls):
        raise UserError(f"{name} is {kind_of(value)}. Give {instead}.")


def _check_callback(callback: Callback) -> None:
    if isinstance(callback, type):
        raise UserError(
            f"callbacks holds {kind_of(callback)}, not a callback. Give an instance: "
            f"{callback.__name__}(...)."
        )
    if getattr(callback, "every", None) is not None:
        whole_number(f"every of {type(callback).__name__}", callback.every, least=1)
    if not callable(callback) and not any(hasattr(callback, name) for name in HOOKS):
        raise UserError(
            f"The callback {callback!r} has none of the methods of a callback. Give a function "
            f"of a StepInfo, or an object with one of {', '.join(HOOKS)}."
        )


def try_parts(
    given: FitArguments,
    train: TrainingData,
    eval_data: EvalData | None,
    say: Callable[[str], None],
) -> Mapping[str, str | None]:
    """Tries ensemble, data and arguments together, and returns the direction of each score."""
    ensemble = given.ensemble
    label_checks.check_inputs(ensemble.trained_objective, given.data)
    for name in ("eval_every", "metrics"):
        if eval_data is None and getattr(given, name):
            raise UserError(
                f"{name} was given, and there is no data to score. Give eval_data, or "
                f"validation=0.1 to hold out training examples, or leave {name} out."
            )
    _check_groups(ensemble, train)
    labels = _training_labels(ensemble, train)
    if labels is not None:
        _note_on_labels(ensemble.trained_objective, labels, say)
    if given.state is None and given.checkpoints is None:
        # XLA compiles while Python traces the step.
        ensemble.compile_init(train.batch)
    _trace_step(ensemble, train)
    return {} if eval_data is None else eval_data.check(ensemble, train.batch)


def _training_labels(ensemble: Ensemble, train: TrainingData) -> np.ndarray | None:
    """Returns the training labels of an objective, checked; None if they are not in memory."""
    objective = ensemble.trained_objective
    if objective is None:
        return None
    if isinstance(train.batch, Mapping):
        label_checks.check_keys(objective, train.batch)
    if objective.standardize and not isinstance(train, OrderedSplit):
        raise UserError(
            f"{objective.name}(standardize=True) reads all training labels, and the data is an "
            "iterable. Give the data as arrays, or standardise the labels in the iterable."
        )
    if not isinstance(train, OrderedSplit) or not train.split.in_memory:
        return None
    examples = train.split.take(np.arange(len(train.split)))
    if not isinstance(examples, Mapping) or objective.LABELS not in examples:
        raise UserError(
            f"The objective {objective.name} takes a dict of arrays with the keys "
            f"{objective.INPUTS!r} and {objective.LABELS!r}: got {described(examples)}. Give "
            f"{{{objective.INPUTS!r}: x, {objective.LABELS!r}: y}}."
        )
    label_checks.check_examples(objective, examples)
    labels = np.asarray(examples[objective.LABELS])
    if objective.standardize and labels.min() == labels.max():  # Their std() may be rounded.
        raise UserError(
            "All labels are equal, so that standardize=True would divide by 0. Correct the labels, "
            "or leave it out."
        )
    return labels


def _note_on_labels(
    objective: Objective | None, labels: np.ndarray, say: Callable[[str], None]
) -> None:
    """Prints a note if the training labels are large."""
    if objective is None or objective.num_classes is not None or objective.standardize:
        return
    mean, std = float(np.mean(labels)), float(np.std(labels))
    if max(abs(mean), std) > _LARGE:
        say(
            f"Note: the labels have mean {mean:.4g} and standard deviation {std:.4g}. Networks "
            f"train faster on labels near 0: consider {objective.name}(standardize=True)."
        )


def _check_groups(ensemble: Ensemble, train: TrainingData) -> None:
    num_groups = train.order.num_groups if isinstance(train, OrderedSplit) else 1
    if num_groups != ensemble.num_groups:
        raise UserError(
            f"The training data has num_groups={num_groups}, and the ensemble has "
            f"num_groups={ensemble.num_groups}. Make the ensemble with num_groups={num_groups}."
        )


def _trace_step(ensemble: Ensemble, train: TrainingData) -> None:
    """Traces a step of one member, and raises a `UserError` if its parts do not fit the batch."""
    if ensemble.waves > 1:
        ensemble = ensemble.of_wave  # The state of all waves is not on the devices.
    layout, batch = ensemble.layout, train.batch
    specs = specs_of_batch(ensemble.batch_specs, batch)
    state = ensemble.abstract_state(batch)
    objective = ensemble.trained_objective
    if objective is not None and objective.num_outputs is not None:
        _trace_outputs(ensemble, state, batch)
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
    with _explained("A training step could not be traced"):
        jax.make_jaxpr(step)(state, batch, index)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raises any error of a user's network, loss or step as a `UserError`."""
    try:
        with explained_errors():
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{what}: {type(error).__name__}: {first_line(error)} Correct the network, the loss, "
            "the step or the data."
        ) from error


def _trace_outputs(ensemble: Ensemble, state: State, batch: Shapes) -> None:
    """Raises a `UserError` unless the objective takes the network's outputs and the labels."""
    objective = ensemble.trained_objective
    inputs = inputs_of(ensemble, batch)

    def outputs(state: State, inputs: Inputs) -> Outputs:
        one = jax.tree.map(lambda leaf: leaf[0], state)
        found = ensemble.network.evaluate(one.params, one.model_state, inputs, one.key)[0]
        return jax.tree.map(lambda leaf: leaf[None], found)

    with _explained(f"The network does not take the inputs {described(inputs)}"):
        found = jax.eval_shape(
            ensemble.layout.map_rows(outputs, (MEMBERS, BATCH), MEMBER_BATCH), state, inputs
        )
    shape = getattr(found, "shape", None)
    if objective is not None and (shape is None or shape[-1] != objective.num_outputs):
        kind = f"{found.dtype}{list(shape[1:])}" if shape else f"{kind_of(found)}"
        raise UserError(
            f"The network returned {kind} for inputs {described(inputs)}, and {objective.name} "
            f"takes {counted(objective.num_outputs, 'output')} in the last axis. Change either."
        )
    if objective is None or not isinstance(batch, Mapping) or objective.LABELS not in batch:
        return  # The loss says which key is absent.
    labels = batch[objective.LABELS]
    are_shares = objective.num_classes is not None and labels.shape == found.shape[1:]
    if are_shares and jnp.issubdtype(labels.dtype, jnp.floating):
        return
    label_checks.check_labels(
        objective.distribution, found.shape[1:], labels, batch.get(objective.WEIGHTS)
    )
