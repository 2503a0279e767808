"""Checks of a user's loss function: its signature and its results."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from dist_ens.errors import UserError, first_line, kind_of
from dist_ens.losses import Objective, Ratio
from dist_ens.members.modes import switch_arguments
from dist_ens.signatures import call_error
from dist_ens.state import described, leaf_type, leaf_types
from dist_ens.types import Leaf, Metrics, ModelState, PyTree

_SIGNATURE = "loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))"


def check_signature(fn: Callable[..., object]) -> None:
    """Raises a `UserError` unless a function can be called as a loss."""
    if isinstance(fn, type):
        raise UserError(
            f"The loss is {kind_of(fn)}, not a function. Give an instance: {fn.__name__}(...)."
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    if getattr(fn, "__annotations__", {}).get("return") is Objective:
        raise UserError(
            f"The loss is the function {name}, which makes an objective and was not called. Give "
            f"{name}(...)."
        )
    error = loss_call_error(fn)
    if error is not None:
        raise UserError(
            f"The loss {name}{inspect.signature(fn)} cannot be called with four arguments: "
            f"{error}. A loss is {_SIGNATURE}."
        )


def loss_call_error(fn: Callable[..., object]) -> str | None:
    """Returns why a function cannot be called as a loss; None if it can."""
    named = "counts" in inspect.signature(fn).parameters
    return call_error(fn, 4, [*switch_arguments(fn, True, given=4), *(["counts"] if named else [])])


def check_loss_outputs(
    results: object, model_state: ModelState
) -> tuple[jax.Array, ModelState, Metrics]:
    """Returns the loss, the new model state and the metrics that a loss returned.

    Args:
        results: Return value of the loss.
        model_state: Model state that the loss was given.

    Returns:
        The loss, the model state, and metrics by name, float32[]: the loss and its auxiliary
        values. A `Ratio` stays one.

    Raises:
        UserError: If the results have another structure, the loss or an auxiliary value is not a
            scalar, or an auxiliary value is called "loss". Also if the model state changed its
            structure, shapes or types.
    """
    if not isinstance(results, tuple) or len(results) != 2:
        found = f"a tuple of {len(results)}" if isinstance(results, tuple) else _kind(results)
        raise UserError(f"The loss returned {found}. A loss is {_SIGNATURE}.")
    loss, rest = results
    if not isinstance(rest, tuple) or len(rest) != 2:
        raise UserError(
            f"The loss returned {_kind(rest)} beside its value. A loss is {_SIGNATURE}. Return "
            "(loss, (model_state, {})) if there are no auxiliary values."
        )
    new_state, aux = rest
    loss = _as_arrays(loss)
    for part in jax.tree.leaves(loss):
        if part.shape != ():
            raise UserError(
                f"The loss has the shape {list(part.shape)}, and it must be one number. Average "
                "over the examples with dist_ens.losses.batch_mean(loss)."
            )
    if not isinstance(loss, Ratio) and not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UserError(
            f"The loss has the type {loss.dtype}, which has no gradient. Return a floating-point "
            "number."
        )
    if not isinstance(aux, Mapping):
        raise UserError(
            f"The auxiliary output of the loss is {_kind(aux)}, not a dict of scalars by name. "
            f"A loss is {_SIGNATURE}."
        )
    if "loss" in aux:
        raise UserError(
            "The auxiliary output of the loss has a key 'loss', which is the name of the loss "
            "itself. Rename it."
        )
    for name, value in [(n, v) for n, each in aux.items() for v in _parts_of(each)]:
        if not isinstance(value, bool | int | float | complex) and not hasattr(value, "dtype"):
            raise UserError(
                f"The auxiliary value {name!r} of the loss is {_kind(value)}, and it must be one "
                "number. Return a number, or leave it out."
            )
        if jnp.shape(value) != ():
            raise UserError(
                f"The auxiliary value {name!r} of the loss has the shape {list(jnp.shape(value))}, "
                "and it must be one number. Average over the examples."
            )
    if leaf_types(new_state) != leaf_types(model_state):
        raise UserError(
            f"The loss returned a model state of {described(new_state)}, and it was given one "
            f"of {described(model_state)}. Return it with the structure, shapes and types that "
            "it has after init."
        )
    metrics = {"loss": loss} | {name: _as_arrays(value) for name, value in aux.items()}
    return loss, new_state, jax.tree.map(lambda value: value.astype(jnp.float32), metrics)


def _parts_of(value: Leaf | Ratio) -> tuple[Leaf, ...]:
    return tuple(value) if isinstance(value, Ratio) else (value,)


def _as_arrays(value: Leaf | Ratio) -> PyTree:
    return Ratio(*map(jnp.asarray, value)) if isinstance(value, Ratio) else jnp.asarray(value)


def refuse_tracers(arrays: Sequence[object]) -> None:
    """Raises a `UserError` if a traced step captures an array of another traced function."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise UserError(
            "The loss uses an array of another traced function: it closes over the array, or keeps "
            "it from an earlier call. Pass it through the batch, the parameters or the model state."
        )


@contextlib.contextmanager
def explained_errors(what: str = "loss") -> Iterator[None]:
    """Turns the tracing errors that a loss often causes into a `UserError` that says what to do.

    Args:
        what: Name of what is traced, for the messages.
    """
    try:
        yield
    except jax.errors.TracerArrayConversionError as error:
        raise UserError(
            f"The {what} passes a traced array to NumPy, which cannot be compiled: "
            f"{first_line(error)} Use jax.numpy instead."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(
            f"The {what} uses an array of another traced function: it closes over the array, or "
            f"keeps it from an earlier call. {first_line(error)} Pass it through the batch, the "
            "parameters or the model state."
        ) from error
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            f"The {what} needs the value of a traced array while it is compiled: "
            f"{first_line(error)} Use jnp.where or jax.lax.cond instead of `if`, and shapes "
            "instead of values."
        ) from error


def _kind(value: object) -> str:
    if hasattr(value, "shape"):
        return f"an array {leaf_type(value)}"
    return f"{kind_of(value)}"
