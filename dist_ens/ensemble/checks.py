"""Checks of the arguments of an `Ensemble`, of its batches, and of what a user's loss returns."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from numpy.typing import DTypeLike

from dist_ens.ensemble.failures import FAILED_UPDATES, IS_FROZEN
from dist_ens.execution.spec import AUTO
from dist_ens.ground.errors import UserError, call_error, counted, first_line, kind_of, name_of
from dist_ens.ground.numbers import require_one_of, whole_number
from dist_ens.ground.state import described, leaf_type, leaf_types
from dist_ens.ground.types import Inputs, Metrics, ModelState, Outputs, PyTree
from dist_ens.losses import Objective, Ratio
from dist_ens.members import Member
from dist_ens.members.modes import switch_arguments
from dist_ens.methods import Method, adversarial, bootstrap, label_smoothing, mixup

COMPUTE_DTYPES = ("float32", "bfloat16")
_SIGNATURE = "loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))"


def checked_ids(
    member_ids: Iterable[SupportsIndex] | None, num_members: int
) -> tuple[int, ...] | None:
    """Returns the members' ids, if given, as Python integers, each different and from 0 on."""
    if member_ids is None:
        return None
    given = member_ids if isinstance(member_ids, Iterable) else [member_ids]
    ids = tuple(whole_number("An id in member_ids", each, least=0) for each in given)
    if len(ids) != num_members or len(set(ids)) != len(ids):
        raise UserError(
            f"member_ids is {list(ids)} for {counted(num_members, 'member')}. Give each member a "
            "different id."
        )
    return ids


def check_ids_of_groups(member_ids: Sequence[int], num_groups: int) -> None:
    """Raises a `UserError` unless each group of members has as many as the others, in turn."""
    is_in_turn = all(each % num_groups == n % num_groups for n, each in enumerate(member_ids))
    if not is_in_turn or len(member_ids) % num_groups:
        raise UserError(
            f"The members {repr(list(member_ids))[:200]} are not the same number of each of the "
            f"{num_groups} groups, in turn. The group of a member is its id modulo {num_groups}. "
            f"Take whole sets of members, such as those with the ids 0 to {num_groups - 1}."
        )


def check_divided(model_axis: int, members: str, waves: int) -> None:
    """Raises a `UserError` unless members that share devices run one after another."""
    if model_axis > 1 and (members not in (AUTO, "loop") or waves != 1):
        asked = f"execution={members!r}" if waves == 1 else f"waves={waves}"
        raise UserError(
            f"{asked} needs whole members on a device, and the layout has a model axis of "
            f"{model_axis}, whose devices take one member after another. Use execution='loop' or "
            "'auto', and waves=1."
        )


def check_batch_specs(declared: object, microbatches: int) -> None:
    """Raises a `UserError` unless an ensemble can use its `batch_specs`."""
    names = jax.tree.leaves(declared)
    if not {"batch", "shared"}.issuperset(names):
        raise UserError(
            f"batch_specs is {declared!r}. Give a dict from keys of the batch to 'shared', or "
            "'shared' for the whole batch."
        )
    if microbatches > 1 and "shared" in names:
        raise UserError(
            f"microbatches={microbatches} divides a batch by its rows, and batch_specs has "
            "'shared' parts. Leave one of them out."
        )


def checked_methods(methods: Iterable[Method]) -> tuple[Method, ...]:
    """Returns the methods of an ensemble as a tuple, each a function from a loss to a loss."""
    listed = list(methods) if isinstance(methods, Iterable) else [methods]
    for method in listed:
        is_maker = method in (adversarial, bootstrap, label_smoothing, mixup)
        if callable(methods) or is_maker or call_error(method, 1) is not None:
            shown = name_of(method) if callable(method) else repr(method)[:80]
            raise UserError(
                f"methods holds {shown}. Give a tuple of functions from a loss to a loss, such as "
                "methods=(dist_ens.methods.bootstrap(),)."
            )
    if all(any(getattr(m, kind, False) for m in listed) for kind in ("is_mixup", "is_bootstrap")):
        raise UserError(
            "The method mixup would mix out-of-bag examples into those of the member, which "
            "bootstrap draws. Leave one of the two methods out."
        )
    return tuple(listed)


def checked_dtype(dtype: DTypeLike | None) -> str | None:
    """Returns the name of the type in which a network computes; None if `dtype` is None."""
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    require_one_of("compute_dtype", name, COMPUTE_DTYPES)
    return name


def check_loss(loss: Any) -> None:
    """Raises a `UserError` unless a loss is an objective, or can be called as a loss function."""
    if isinstance(loss, Objective):
        return
    signature, error = "", call_error(loss, 4)
    if callable(loss):
        signature = f"{inspect.signature(loss)}"
        named = {"counts", "hyper", "shared"} & inspect.signature(loss).parameters.keys()
        error = call_error(loss, 4, [*switch_arguments(loss, True, given=4), *named])
    if error is not None:
        raise UserError(
            f"The loss {name_of(loss)}{signature} cannot be called with four arguments: {error}. "
            f"Give an objective, such as losses.categorical(10), or a function {_SIGNATURE}. It "
            "may also have arguments named train, counts, hyper and shared."
        )


def loss_outputs(
    results: object, model_state: ModelState
) -> tuple[jax.Array | Ratio, ModelState, Metrics]:
    """Returns the loss, the new model state and the metrics of a loss, float32[] or a `Ratio`."""
    match results:
        case (loss, (new_state, Mapping() as aux)):
            pass
        case _:
            raise UserError(f"The loss returned {parts_text(results)}. A loss is {_SIGNATURE}.")
    for name in ("loss", FAILED_UPDATES, IS_FROZEN):
        if aux.get(name, loss) is not loss:
            raise UserError(
                f"The loss returned an auxiliary value {name!r}, and {name!r} is a metric of "
                "dist_ens itself. Give the value another name."
            )
    metrics = {**aux, "loss": loss}
    for name, value in metrics.items():
        parts = value if isinstance(value, Ratio) else (value,)
        if any(jnp.shape(part) != () for part in parts):
            raise UserError(
                f"The value {name!r} of the loss has the shape {list(jnp.shape(parts[0]))}, and it "
                "must be one number. Average it with dist_ens.losses.batch_mean."
            )
    require_same("loss returned a model state", new_state, model_state)
    in_float32 = jax.tree.map(lambda value: jnp.asarray(value).astype(jnp.float32), metrics)
    return jax.tree.map(jnp.asarray, loss), new_state, in_float32


def require_same(what: str, new: PyTree, old: PyTree) -> None:
    """Raises a `UserError` unless a new state has the leaves of the old one."""
    if leaf_types(new) != leaf_types(old):
        raise UserError(
            f"The {what} of {described(new)}, and it was given one of {described(old)}. Return "
            "the structure, shapes and types that it has after init."
        )


def parts_text(value: object) -> str:
    """Returns what a function returned, for messages: nested tuples, and the kind of each part."""
    if isinstance(value, tuple) and not isinstance(value, Ratio):
        return f"({', '.join(map(parts_text, value))})"
    return leaf_type(value) if hasattr(value, "shape") else kind_of(value)


# Errors of tracing that a loss often causes, and what to do about each.
_REMEDIES: dict[type[Exception], str] = {
    jax.errors.TracerArrayConversionError: "Use jax.numpy in place of NumPy.",
    jax.errors.UnexpectedTracerError: "Pass arrays through the batch, the parameters or the model "
    "state, and keep none from an earlier call.",
    jax.errors.ConcretizationTypeError: "Use jnp.where or jax.lax.cond in place of `if`, and "
    "shapes in place of values.",
}


@contextlib.contextmanager
def explained_errors(what: str = "loss") -> Iterator[None]:
    """Turns the tracing errors that a loss often causes into a `UserError` that says what to do."""
    try:
        yield
    except tuple(_REMEDIES) as error:
        remedy = next(text for kind, text in _REMEDIES.items() if isinstance(error, kind))
        raise UserError(
            f"The {what} cannot be compiled: {type(error).__name__}: {first_line(error)} {remedy}"
        ) from error


def check_heads(
    member: Member, objective: Objective | None, methods: Sequence[Method], num_groups: int
) -> None:
    """Raises a `UserError` unless an objective and methods take the heads of a member."""
    if member.heads is None and any(getattr(each, "needs_heads", False) for each in methods):
        raise UserError(
            f"svgd takes the heads of a member as its particles, and {member.name} has none. Give "
            "one with heads, such as models.trunk_and_heads(trunk, head, heads=8)."
        )
    if member.heads is not None and num_groups > 1:
        raise UserError("Members with heads cannot be in several groups. Leave num_groups out.")
    if objective is None or (member.heads is not None) == objective.has_heads:
        return
    if member.heads is None:
        raise UserError(
            f"{objective.name} takes a member with heads, and {member.name} has none. Give one, "
            "such as models.batch_ensemble(network, heads=4), or leave of_heads out."
        )
    raise UserError(
        f"The network {member.name} has {counted(member.heads, 'head')}, and {objective.name} is "
        f"the loss of one. Give losses.of_heads(losses.{objective.name}(...))."
    )


def require_rows(
    objective: Objective | None, outputs: Outputs, inputs: Inputs, heads: int | None
) -> Outputs:
    """Returns a member's outputs, which an objective takes if they have a row for each example."""
    if objective is None:
        return outputs
    size: int = jax.tree.leaves(inputs)[0].shape[0]
    shape: tuple[int, ...] = getattr(outputs, "shape", ())
    leading = [size] if heads is None else [heads, size]
    if len(shape) <= len(leading) or [*shape[: len(leading)]] != leading:
        takes = f"{objective.name} takes [{', '.join(map(str, leading))}, ..., outputs]"
        raise ValueError(f"The outputs are {described(outputs)}, and {takes}.")
    return outputs
