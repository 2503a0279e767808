"""Checks of a loss that a user wrote: its signature, its results, and its mean over the batch."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from dist_ens.errors import UserError, first_line
from dist_ens.execution.rewrite import nested
from dist_ens.signatures import call_error
from dist_ens.state import described, leaf_type, leaf_types

_SIGNATURE = "loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))"
_COLLECTIVES = {"psum", "psum_invariant", "pmean", "pmax", "pmin", "all_gather", "all_to_all"}


def check_signature(fn: Callable[..., Any]) -> None:
    """Raises a `UserError` unless a function can be called as a loss."""
    error = call_error(fn, 4)
    if error is not None:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise UserError(
            f"The loss {name}{inspect.signature(fn)} cannot be called with four arguments: "
            f"{error}. A loss is {_SIGNATURE}."
        )


def check_loss_outputs(
    results: Any, model_state: Any
) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Returns the loss, the new model state and the metrics that a loss returned.

    Args:
        results: What the loss returned.
        model_state: Model state that it was given.

    Raises:
        UserError: If the results have another structure, the loss is no scalar, the model state
            changed its structure, shapes or types, or an auxiliary value is no scalar or is called
            "loss".
    """
    if not isinstance(results, tuple) or len(results) != 2:
        found = f"a tuple of {len(results)}" if isinstance(results, tuple) else _kind(results)
        raise UserError(f"The loss returned {found}. A loss is {_SIGNATURE}.")
    loss, rest = results
    if not isinstance(rest, tuple) or len(rest) != 2:
        raise UserError(
            f"The loss returned {_kind(rest)} beside its value. A loss is {_SIGNATURE}; return "
            "(loss, (model_state, {})) where there is nothing else."
        )
    new_state, aux = rest
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise UserError(
            f"The loss has the shape {list(loss.shape)}, and a loss is one number. Average over "
            "the examples, such as dist_ens.losses.batch_mean(loss)."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
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
    for name, value in aux.items():
        if not isinstance(value, bool | int | float | complex) and not hasattr(value, "dtype"):
            raise UserError(
                f"The auxiliary value {name!r} of the loss is {_kind(value)}, and it should be one "
                "number. Leave it out, or return a number."
            )
        if jnp.shape(value) != ():
            raise UserError(
                f"The auxiliary value {name!r} of the loss has the shape {list(jnp.shape(value))}, "
                "and it should be one number. Average over the examples."
            )
    if leaf_types(new_state) != leaf_types(model_state):
        raise UserError(
            f"The loss returned a model state of {described(new_state)}, and it was given one "
            f"of {described(model_state)}. Return it with the structure, shapes and types that "
            "init gave it."
        )
    metrics = {"loss": loss} | {name: jnp.asarray(value) for name, value in aux.items()}
    return loss, new_state, {name: value.astype(jnp.float32) for name, value in metrics.items()}


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Raises a `UserError` for errors of tracing that a loss often causes, saying what to do."""
    try:
        yield
    except jax.errors.TracerArrayConversionError as error:
        raise UserError(
            "The loss gives a traced array to NumPy, which cannot be compiled: "
            f"{first_line(error)} Use jax.numpy in its place."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(
            "The loss uses an array of another traced function, which it closes over or keeps "
            f"from an earlier call: {first_line(error)} Pass it through the batch, the parameters "
            "or the model state."
        ) from error
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            f"The loss needs the value of a traced array while it is compiled: {first_line(error)} "
            "Use jnp.where or jax.lax.cond in place of `if`, and shapes in place of values."
        ) from error


def local_weighted_mean(traced: Jaxpr, batch_vars: set[Any]) -> str | None:
    """Returns the operation by which a loss divides by a sum of its own column's part of the batch.

    Such a mean, `(v * m).sum() / m.sum()`, is that of one column's examples. The mean of such means
    over the columns is not the mean over the global batch.

    Args:
        traced: Loss of one column, traced; its first result is the loss.
        batch_vars: Variables of the batch.

    Returns:
        The equation as text; None if there is none.
    """
    found = _scalar_division(traced, batch_vars, {traced.outvars[0]})
    return found[1]


def _scalar_division(
    jaxpr: Jaxpr, local: set[Any], needed: set[Any]
) -> tuple[set[Any], str | None]:
    """Returns the variables that depend on this column's batch, and a division by a sum of them."""
    local = set(local)
    on_path = _needed_for(jaxpr, needed)
    division: str | None = None
    for eqn in jaxpr.eqns:
        inputs = [not isinstance(v, Literal) and v in local for v in eqn.invars]
        if not any(inputs):
            continue
        name = eqn.primitive.name
        if name in _COLLECTIVES:
            continue
        inner = nested(eqn.params)
        if inner and len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            body = inner[0]
            of_body = {v for v, is_local in zip(body.invars, inputs, strict=True) if is_local}
            wanted = {
                inside
                for inside, outside in zip(body.outvars, eqn.outvars, strict=False)
                if outside in on_path and not isinstance(inside, Literal)
            }
            reached, inside = _scalar_division(body, of_body, wanted)
            division = division or inside
            local.update(
                outside
                for inside_var, outside in zip(body.outvars, eqn.outvars, strict=False)
                if inside_var in reached
            )
            continue
        divides = (name == "div" and inputs[1] and _is_scalar(eqn.invars[1])) or (
            (name == "rsqrt" or (name == "integer_pow" and eqn.params["y"] < 0))
            and _is_scalar(eqn.invars[0])
        )
        if divides and any(v in on_path for v in eqn.outvars):
            division = division or str(eqn).strip()
        local.update(eqn.outvars)
    return local, division


def _needed_for(jaxpr: Jaxpr, results: set[Any]) -> set[Any]:
    """Returns the variables on which some results depend, the results among them."""
    needed = {v for v in results if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed


def _is_scalar(variable: Any) -> bool:
    return getattr(variable.aval, "shape", None) == ()


def _kind(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"an array {leaf_type(value)}"
    return f"a {type(value).__name__}"
