"""Checks of the parts that functions of a config file return, such as `make_loss(spec)`."""

import inspect
from collections.abc import Callable
from typing import Any

from dist_ens.ensemble.checks import loss_call_error
from dist_ens.errors import UserError, kind_of


def _has(part: object, *names: str) -> bool:
    """Returns whether an object has all of some attributes."""
    return all(hasattr(part, name) for name in names)


def _is_list(part: object) -> bool:
    """Returns whether an object is a list or a tuple."""
    return isinstance(part, list | tuple)


# The result that each function must return, in words and as a condition.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "make_objective": (
        "an objective with example_loss and distribution",
        lambda part: _has(part, "example_loss", "distribution"),
    ),
    "make_loss": (
        "a function loss(params, model_state, batch, key) of four arguments",
        lambda part: callable(part) and loss_call_error(part) is None,
    ),
    "make_step": (
        "a dict of functions by name: init, step, and apply or eval_loss",
        lambda part: (
            isinstance(part, dict)
            and {"init", "step"} <= part.keys() <= {"init", "step", "apply", "eval_loss"}
            and len(part) > 2
        ),
    ),
    "make_optimizer": (
        "an optimizer with init and update, such as optax.adam(1e-3)",
        lambda part: _has(part, "init", "update") and not isinstance(part, type),
    ),
    "make_source": (
        "a source with spec, train and test, such as a dist_ens.data.Source",
        lambda part: _has(part, "spec", "train", "test") and not isinstance(part, type),
    ),
    "make_metrics": (
        "a list of metrics, each with a name",
        lambda part: _is_list(part) and all(_has(metric, "name") for metric in part),
    ),
    "make_callbacks": ("a list of callbacks", _is_list),
}

FUNCTIONS = ("make_member", *_EXPECTED)


def check_part(function: str, part: object, path: str) -> None:
    """Checks the part that a function of a config file returned.

    Args:
        function: Name of the function, such as `make_loss`.
        part: Result of the function.
        path: Path of the config file, for the message.

    Raises:
        UserError: If the function must return something else.
    """
    expected, accepts = _EXPECTED[function]
    if not accepts(part):
        raise UserError(
            f"{function} in {path} returned {_described(part)}, not {expected}. Correct the "
            "function."
        )


def _described(part: Any) -> str:
    """Returns a short description of the result of a function."""
    if part is None:
        return "None"
    if inspect.isfunction(part):
        return f"{part.__name__}{inspect.signature(part)}"
    if isinstance(part, type):
        return f"the class {part.__name__}"
    if _is_list(part) and part:
        return f"{kind_of(part)} of {', '.join(type(each).__name__ for each in part)}"
    return f"{kind_of(part)}"
