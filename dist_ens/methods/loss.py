"""The loss of one member as a function that methods wrap."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.shared import NOTHING_SHARED, Shared
from dist_ens.ground.types import Batch, Key, ModelState, Params, PyTree
from dist_ens.losses import Objective
from dist_ens.losses.averaging import Ratio, averaged, batch_mean
from dist_ens.members import Member
from dist_ens.members.member import floats_as, standardized
from dist_ens.members.modes import given_arguments, switch_arguments
from dist_ens.metrics.metric import one_a_row
from dist_ens.sampling.hyper import Given


class LossInfo(NamedTuple):
    """Inputs of a loss besides parameters, model state and batch.

    Attributes:
        key: Key of this member and step, [].
        member_key: Key of this member, the same at every step, [].
        member_id: Id of this member, int32[].
        positions: Positions of the batch's examples in the training split, int32[batch]. None if
            the batches come from an iterator.
        objective: Objective of the ensemble. None if its loss is a function of the user.
        train: Whether the member is trained, and not evaluated.
        counts: Number of times that each example of the batch counts, float[batch]. None: each
            counts once.
        hyper: Settings of this member, {name: float32[]}; see `Ensemble`.
        shared: Arrays that all members share; see `Ensemble`.
        of_outputs: Function `(loss_of, outputs) -> loss` that replaces `loss_of(outputs)`.

    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), jax.numpy.int32(3), None, None)
    >>> int(info.member_id)
    3
    """

    key: Key
    member_key: Key
    member_id: jax.Array
    positions: jax.Array | None
    objective: Objective | None
    train: bool = True
    counts: jax.Array | None = None
    hyper: Given = Given()
    shared: Shared = NOTHING_SHARED
    of_outputs: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array] | None = None


# The loss, float[] or a `Ratio`, and the new model state with a dict of auxiliary scalars.
LossResults: TypeAlias = tuple[
    jax.Array | Ratio, tuple[ModelState, Mapping[str, ArrayLike | Ratio]]
]
# The loss of a user takes a key, and the loss that methods wrap takes `LossInfo` instead.
LossFunction = Callable[..., LossResults]
MemberLoss = Callable[[Params, ModelState, Batch, LossInfo], LossResults]
Method = Callable[[MemberLoss], MemberLoss]


def loss_of_objective(objective: Objective, member: Member) -> MemberLoss:
    """Returns the loss of a network's outputs under an objective.

    It takes dict batches with the keys `inputs`, `labels` and, if examples are weighted, `weights`.

    >>> from dist_ens.losses import squared_error
    >>> from dist_ens.members import as_member
    >>> member = as_member((lambda key: jax.numpy.ones((1, 1)), lambda params, x: x @ params))
    >>> loss = loss_of_objective(squared_error(), member)
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), jax.numpy.int32(0), None, None)
    >>> batch = {"inputs": jax.numpy.array([[1.0], [3.0]]), "labels": jax.numpy.array([0.0, 1.0])}
    >>> float(loss(jax.numpy.ones((1, 1)), {}, batch, info)[0])  # (1 + 4) / 2
    2.5
    """

    def loss(params: Params, model_state: ModelState, batch: Batch, info: LossInfo) -> LossResults:
        inputs, labels = (
            part_of(batch, key, f"The objective {objective.name}")
            for key in (objective.INPUTS, objective.LABELS)
        )
        if objective.standardize:
            labels = standardized(labels, model_state)
        network = member.given(info.hyper, info.shared)
        outputs, model_state = network.apply(params, model_state, inputs, info.key, info.train)
        if objective.has_heads and outputs.shape[:1] != (member.heads,):
            raise UserError(
                f"The network has {member.heads} heads, and returned {list(outputs.shape)}. Return "
                f"[{member.heads}, batch, ..., outputs]."
            )
        rows = outputs.shape[1:-1] if objective.has_heads else outputs.shape[:-1]
        labels = one_a_row(labels, (*rows, *objective.label_shape))
        has_rows = labels.shape[:1] == rows[:1]
        losses = jax.eval_shape(objective.losses, outputs, labels) if has_rows else labels
        if has_rows and losses.shape != rows and objective.joint is not None:
            raise UserError(
                f"joint returned {list(losses.shape)} for labels of the shape {list(rows)}. Return "
                "one loss for each label."
            )
        if not has_rows or losses.shape != rows:
            raise UserError(
                f"The labels have the shape {list(labels.shape)}, and the network returned "
                f"{list(outputs.shape)}. Give one label for each row of the outputs: {list(rows)}."
            )
        weights, mean = batch.get(objective.WEIGHTS), jnp.mean
        if weights is not None:
            mean = partial(batch_mean, weights=one_a_row(weights, rows), ratio=True)

        def of_outputs(outputs: jax.Array) -> jax.Array | Ratio:
            losses = objective.losses(outputs, labels)
            if info.counts is not None:
                losses = losses * info.counts.reshape(-1, *(1,) * (losses.ndim - 1))
            return mean(losses)

        if info.of_outputs is None:
            value = of_outputs(outputs)
        else:
            value = info.of_outputs(lambda outputs: averaged(of_outputs(outputs)), outputs)
        scores = objective.scores(outputs, labels)
        return value, (model_state, {name: mean(score) for name, score in scores.items()})

    return loss


def loss_of_function(fn: LossFunction, compute_dtype: str | None = None) -> MemberLoss:
    """Returns a user's `loss_fn(params, model_state, batch, key)` as a loss that methods wrap.

    An argument after the first four that switches between training and evaluation is set if it has
    a usual name, such as `train`. An argument `counts` is given the number of times that each
    example counts, float[batch], or 1.0 if each counts once. Arguments `hyper` and `shared` are
    given the settings of the member, and the arrays that all members share.

    >>> double = lambda params, model_state, batch, key: (2 * batch.mean(), (model_state, {}))
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), jax.numpy.int32(0), None, None)
    >>> float(loss_of_function(double)({}, {}, jax.numpy.array([1.0, 2.0]), info)[0])
    3.0
    """

    if isinstance(fn, jax.stages.Wrapped):
        fn = inspect.unwrap(fn)  # Inside jit, a switch would be an array.
    takes_counts = "counts" in inspect.signature(fn).parameters

    def loss(params: Params, model_state: ModelState, batch: Batch, info: LossInfo) -> LossResults:
        shared = info.shared.arrays
        if compute_dtype is not None:
            params, batch, shared = floats_as((params, batch, shared), compute_dtype)
        named: dict[str, object] = dict(switch_arguments(fn, info.train, given=4))
        named |= given_arguments(fn, {"hyper": info.hyper, "shared": shared})
        if takes_counts:
            named["counts"] = 1.0 if info.counts is None else info.counts
        elif info.counts is not None:
            raise UserError(
                "bootstrap needs a loss function with the argument counts, float[batch], by which "
                "it multiplies the losses: loss_fn(params, model_state, batch, key, counts)."
            )
        return fn(params, model_state, batch, info.key, **named)

    return loss


def require_objective(info: LossInfo, method: str) -> Objective:
    """Returns the objective of the ensemble; raises a `UserError` if its loss is a function."""
    if info.objective is None:
        raise UserError(f"{method} needs an objective, not a loss function. Write it into that.")
    return info.objective


def part_of(batch: Batch, key: str, user: str) -> PyTree:
    """Returns a part of a batch; raises a `UserError` that names its user if it is absent."""
    if isinstance(batch, dict) and key in batch:
        return batch[key]
    found = ", ".join(map(repr, batch)) if isinstance(batch, dict) else kind_of(batch)
    raise UserError(f"{user} takes batches that are dicts with the key {key!r}: got {found}.")


def with_float_inputs(batch: Batch, method: str, key: str = "inputs") -> jax.Array:
    """Returns the inputs of a batch as floating-point numbers; raises unless they are an array."""
    inputs = part_of(batch, key, method)
    if not isinstance(inputs, jax.Array):
        raise UserError(f"{method} needs an array batch[{key!r}]: got {kind_of(inputs)}.")
    return inputs.astype(jax.numpy.result_type(inputs, jax.numpy.float32))
