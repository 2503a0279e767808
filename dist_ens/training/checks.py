"""Checks of the ensemble with its data, before anything is compiled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from dist_ens.data import parts_of
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import explained_errors
from dist_ens.ensemble.initial_state import inputs_of
from dist_ens.ensemble.programs import step_of_one
from dist_ens.evaluation import label_checks
from dist_ens.ground.errors import UserError, counted, first_line, kind_of
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State, check_alive, described
from dist_ens.ground.types import Inputs, Outputs, Shapes
from dist_ens.layout import BATCH, MEMBERS, REPLICATED, specs_of_batch, to_host
from dist_ens.losses import Objective
from dist_ens.training.arguments import FitArguments
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluating import EvalData

# Training is slow if the mean or the standard deviation of the labels is larger, because the
# outputs start near 0.
_LARGE = 10.0
# Labels of a smaller standard deviation, as a share of their mean, are rounded too much by float32.
_COARSE = 1e-5


def try_parts(
    given: FitArguments,
    train: TrainingData,
    eval_data: EvalData | None,
    say: Callable[[str], None],
) -> Mapping[str, str | None]:
    """Tries ensemble, data and arguments together, and returns the direction of each score."""
    ensemble, objective = given.ensemble, given.ensemble.trained_objective
    for name in ("eval_every", "metrics"):
        if eval_data is None and getattr(given, name):
            raise UserError(
                f"{name} was given, and there is no data to score. Give eval_data, or "
                f"validation=0.1 to hold out training examples, or leave {name} out."
            )
    num_groups = 1 if train.order is None else train.order.num_groups
    if num_groups != ensemble.num_groups:
        raise UserError(
            f"The training data has num_groups={num_groups}, and the ensemble has "
            f"num_groups={ensemble.num_groups}. Make the ensemble with num_groups={num_groups}."
        )
    if objective is not None:
        label_checks.check_inputs(objective, given.data)
        _try_labels(objective, train, given.state, say)
    if given.state is None and given.checkpoints is None:
        # XLA compiles while Python traces the step.
        ensemble.compile_init(train.batch)
    _trace_step(ensemble, train)
    if eval_data is None:
        return {}
    if eval_data.final is not None:
        eval_data.final.directions(ensemble, train.batch)
    return eval_data.directions(ensemble, train.batch)


def _try_labels(
    objective: Objective, train: TrainingData, state: State | None, say: Callable[[str], None]
) -> None:
    """Checks the training labels if they are in memory, and prints a note if they are large."""
    # A state after step 0 holds the scale of the labels that it was trained on.
    sets_scale = objective.standardize and not _was_trained(state)
    if train.split is None:
        if isinstance(train.batch, Mapping):
            label_checks.check_keys(objective, train.batch)
        if sets_scale:
            raise UserError(
                f"{objective.name}(standardize=True) reads all training labels, and the data is an "
                "iterable. Give arrays, or standardise the labels in the iterable."
            )
        return
    if not train.split.in_memory:
        return
    parts = parts_of(train.split, (objective.LABELS, objective.WEIGHTS))
    label_checks.check_examples(objective, parts)
    labels = parts[objective.LABELS]
    weights = parts.get(objective.WEIGHTS)
    with_weight = labels if weights is None or weights.ndim > 1 else labels[weights > 0]
    of_targets = with_weight.reshape(-1, *objective.label_shape)
    # The std() of equal labels may be rounded.
    equal = np.argwhere(of_targets.min(axis=0) == of_targets.max(axis=0)).tolist()
    if sets_scale and equal:
        which = "".join(f" of target {number}" for number in equal[0])
        raise UserError(
            f"All labels{which} are equal, so that standardize=True would divide by 0. Correct the "
            "labels, or leave it out."
        )
    if sets_scale:
        means, stds = of_targets.mean(axis=0, dtype=float), of_targets.std(axis=0, dtype=float)
        if (coarse := np.flatnonzero(stds < _COARSE * np.abs(means))).size:
            mean, std = means.flat[coarse[0]], stds.flat[coarse[0]]
            raise UserError(
                f"The labels have mean {mean:.6g} and standard deviation {std:.4g}, and float32 "
                "holds 7 digits. Subtract their mean, and add it to the predictions."
            )
    if objective.num_classes is not None or objective.standardize:
        return
    mean, std = float(np.mean(labels)), float(np.std(labels))
    if max(abs(mean), std) > _LARGE:
        say(
            f"Note: the labels have mean {mean:.4g} and standard deviation {std:.4g}. Networks "
            f"train faster on labels near 0: consider {objective.name}(standardize=True)."
        )


def _was_trained(state: State | None) -> bool:
    if state is None:
        return False
    check_alive(state.step)
    with jax.transfer_guard("allow"):
        return bool(to_host(state.step)[0])


def _trace_step(ensemble: Ensemble, train: TrainingData) -> None:
    """Traces a step of one member, and raises a `UserError` if its parts do not fit the batch."""
    if ensemble.waves > 1:
        ensemble = ensemble.of_wave  # The state of all waves is not on the devices.
    layout, batch, objective = ensemble.layout, train.batch, ensemble.trained_objective
    state = ensemble.abstract_state(batch)
    if objective is not None and objective.num_outputs is not None:
        _trace_outputs(ensemble, objective, state, batch)
    step = layout.map_rows(
        lambda state, *args: jax.tree.map(
            lambda leaf: leaf[None],
            ensemble.programs.step(jax.tree.map(lambda leaf: leaf[0], state), *args),
        ),
        in_specs=(MEMBERS, specs_of_batch(ensemble.batch_specs, batch), BATCH, REPLICATED),
        out_specs=MEMBERS,
    )
    with _explained("A training step could not be traced"):
        jax.make_jaxpr(step)(state, batch, train.index, ensemble.shared)
        if not ensemble.shared.is_empty:
            _require_shared_read(ensemble, batch, train.index)
        if ensemble.hyper:
            _require_read(ensemble.replace(failure_policy=None), batch, train.index)


def _traced_of_one(
    ensemble: Ensemble, batch: Shapes, index: Shapes | None
) -> tuple[State, Jaxpr, Jaxpr]:
    """Returns the shapes of one member's state, and its step and its initialiser as traced."""
    make = ensemble.programs.initializer(batch).make
    of_member = jax.eval_shape(
        lambda: (jnp.int32(0), dict.fromkeys(ensemble.hyper, jnp.float32(0)) or ())
    )
    seed, shared = jax.ShapeDtypeStruct((), np.uint32), ensemble.shared
    state = jax.eval_shape(make, of_member, seed, shared)
    made = jax.make_jaxpr(make)(of_member, seed, shared).jaxpr
    taken = jax.make_jaxpr(step_of_one(ensemble))(state, batch, index, shared).jaxpr
    return state, taken, made


def _require_shared_read(ensemble: Ensemble, batch: Shapes, index: Shapes | None) -> None:
    """Raises a `UserError` if neither a step nor an initialiser reads what the members share."""
    _, taken, made = _traced_of_one(ensemble, batch, index)
    count = len(jax.tree.leaves(ensemble.shared))
    if not any(
        any(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][-count:]) for jaxpr in (taken, made)
    ):
        raise UserError(
            "Nothing reads the shared arrays. Give the ensemble a member on them, such as "
            "models.lora(network, rank), or a network or a loss function with an argument shared."
        )


def _require_read(ensemble: Ensemble, batch: Shapes, index: Shapes | None) -> None:
    """Raises a `UserError` if no step and no initialiser reads one of the members' settings."""
    names, (state, taken, made) = [*ensemble.hyper], _traced_of_one(ensemble, batch, index)
    # The settings are the last leaves of a state, which a step and an initialiser pass on.
    end = len(jax.tree.leaves(state))
    begin = end - len(names)

    def reads(jaxpr: Jaxpr, settings: slice) -> list[bool]:
        is_other = [not begin <= place < end for place in range(len(jaxpr.outvars))]
        return dce_jaxpr(jaxpr, is_other)[1][settings]

    found = zip(names, reads(taken, slice(begin, end)), reads(made, slice(1, None)), strict=False)
    are_read = {name: in_step or in_init for name, in_step, in_init in found}
    unread = [name for name in names if not are_read[name]]
    if unread:
        others = ", ".join(name for name in names if are_read[name]) or "none"
        raise UserError(
            f"Nothing reads hyper[{unread[0]!r}]; read of hyper are: {others}. Read it in a "
            "function optimizer(hyper), or in a loss function or a network with an argument hyper, "
            "or leave it out."
        )


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


def _trace_outputs(ensemble: Ensemble, objective: Objective, state: State, batch: Shapes) -> None:
    """Raises a `UserError` unless the objective takes the network's outputs and the labels."""
    inputs = inputs_of(ensemble, batch)

    def outputs(state: State, inputs: Inputs, shared: Shared) -> Outputs:
        one = jax.tree.map(lambda leaf: leaf[0], state)
        network = ensemble.network.given(one.hyper, shared)
        found = network.evaluate(one.params, one.model_state, inputs, one.key)[0]
        return jax.tree.map(lambda leaf: leaf[None], found)

    with _explained(f"The network does not take the inputs {described(inputs)}"):
        specs = (MEMBERS, BATCH, REPLICATED)
        of_row = ensemble.layout.map_rows(outputs, specs, MEMBERS)
        found = jax.eval_shape(of_row, state, inputs, ensemble.shared)
    if ensemble.heads is not None:
        if found.shape[1:2] != (ensemble.heads,):
            return  # The loss says so.
        found = jax.eval_shape(lambda leaf: leaf[:, 0], found)
    shape = getattr(found, "shape", None)
    if shape is None or shape[-1] != objective.num_outputs:
        kind = f"{found.dtype}{list(shape[1:])}" if shape else kind_of(found)
        raise UserError(
            f"The network returned {kind} for inputs {described(inputs)}, and {objective.name} "
            f"takes {counted(objective.num_outputs, 'output')} in the last axis. Change either."
        )
    if not isinstance(batch, Mapping) or objective.LABELS not in batch:
        return  # The loss says which key is absent.
    labels = batch[objective.LABELS]
    are_shares = objective.num_classes is not None and labels.shape == found.shape[1:]
    if are_shares and jnp.issubdtype(labels.dtype, jnp.floating):
        return
    label_checks.check_labels(
        objective.distribution, found.shape[1:], labels, batch.get(objective.WEIGHTS)
    )
