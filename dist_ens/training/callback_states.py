"""The states of callbacks in a checkpoint, each with the name of its callback."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_ens.callbacks.protocol import call_hook, name_of_callback
from dist_ens.commands import quoted
from dist_ens.errors import UserError, first_line, kind_of
from dist_ens.types import Callback

_CALLBACKS, _NAME, _STATE = "callbacks", "name", "state"


def saved_states(callbacks: Sequence[Callback]) -> bytes | None:
    """Returns the states of the callbacks that have one, as JSON; None if none has.

    Args:
        callbacks: All callbacks of the run.

    Raises:
        UserError: If JSON cannot hold a state.
    """
    states = []
    for callback in _with_state(callbacks):
        name, state = name_of_callback(callback), call_hook(callback, "state")
        try:
            json.dumps(state, default=_number)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"The state of the callback {name} cannot be saved: {first_line(error)} Return "
                f"what JSON can hold from {name}.state: numbers, texts, bools, None, and lists "
                "and dicts of these."
            ) from error
        states.append({_NAME: name, _STATE: state})
    return json.dumps({_CALLBACKS: states}, default=_number).encode() if states else None


def restore_states(
    callbacks: Sequence[Callback], stored: bytes, folder: str | os.PathLike[str], resume: str
) -> None:
    """Restores the states of the callbacks of a resumed run.

    Args:
        callbacks: All callbacks of the run.
        stored: States that `saved_states` returned. A list without names, which an older version
            wrote, is read too.
        folder: Folder of the run, for the message.
        resume: "same" requires the saved callbacks. "anyway" restores those with the name of a
            saved one, and lets the others begin without a state.

    Raises:
        UserError: If the saved callbacks differ from those given, and `resume` is "same".
    """
    given = _with_state(callbacks)
    names, found = [name_of_callback(each) for each in given], json.loads(stored)
    if isinstance(found, dict):
        saved = [(each[_NAME], each[_STATE]) for each in found[_CALLBACKS]]
    else:
        unknown = ["(unknown)"] * (len(found) - len(names))
        saved = list(zip([*names[: len(found)], *unknown], found, strict=True))
    saved_names = [name for name, _ in saved]
    if saved_names != names and resume == "same":
        raise UserError(
            f"{quoted(folder)} holds a run with states of the callbacks {_listed(saved_names)}, "
            f"and this run has {_listed(names)}. Give the same callbacks in the same order, or "
            "set resume='anyway' to let those without a saved state begin anew."
        )
    for callback, name in zip(given, names, strict=True):
        position = next((k for k, (other, _) in enumerate(saved) if other == name), None)
        if position is not None:
            call_hook(callback, "restore", saved.pop(position)[1])


def _with_state(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks that have a state."""
    return [callback for callback in callbacks if hasattr(callback, "restore")]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _number(value: Any) -> float:
    """Returns a number of NumPy or JAX as a Python number.

    Raises:
        TypeError: If the value is something else.
    """
    if isinstance(value, np.generic) or (hasattr(value, "item") and np.ndim(value) == 0):
        return value.item()
    raise TypeError(f"{kind_of(value)} is not what JSON can hold")
