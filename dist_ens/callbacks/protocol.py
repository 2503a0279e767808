"""The protocol between `fit` and its callbacks: all of it, on one page.

A callback is any object with some of these methods; `fit` calls those that it has.

    __call__(info: StepInfo) -> None | State | STOP    after each call of the update
    begin(run: RunInfo) -> None | STOP                 before the first step
    evaluated(step, scores) -> None | STOP             after each evaluation
    write(step, record) -> None                        for each record of metrics: a *writer*
    sync() -> None                                     before a checkpoint: records must be on disk
    finished(step, scores, evaluation, split) -> None  after the last evaluation
    close() -> None                                    at the end, also after an error
    state() -> what JSON can hold, restore(state)      saved with the checkpoint

A record is a flat dict from names such as `train/loss` or `test/nll/member_03` to numbers. A plain
function of a `StepInfo` is a callback too. `write` and `sync` may be called in the thread that
saves, while the other methods are called in the main thread. A state is a number, a text, a bool,
None, or a list or dict of these.

One call of the update takes `steps_per_call` steps, so that a callback is not called at every step:
give `fit` `steps_per_call=1` for that. After a callback has returned `STOP`, all callbacks are
called once more, with `is_last`; a state that they then return is not used.

On several hosts every host has its callbacks, and only process 0 calls `write`. The run ends on all
hosts as soon as a callback of one of them returns `STOP`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dist_ens.ensemble import Ensemble
from dist_ens.errors import RunError, UserError, first_line
from dist_ens.state import State


class Stop(enum.Enum):
    """The type of `STOP`."""

    STOP = "stop"


STOP = Stop.STOP  # returned by a callback to end the run: it is evaluated and saved first


class StepInfo(NamedTuple):
    """What a callback knows after a call of the update.

    Attributes:
        step: Number of steps that the state has seen. It grows by the number of steps of a call,
            `steps_per_call` of `fit`, which may be 50: a callback that acts every 20 steps needs
            `steps_per_call=20` or a divisor of it.
        state: State of the ensemble. It may still be computed, and is donated to the next call: a
            callback that keeps it must copy it.
        metrics: Metrics by name of the steps since the last call of the callback whose values are
            known, float32[steps, members]: those of the previous call, so that the device never
            waits. Empty at first.
        is_last: Whether the run ends at this step; `metrics` then has all that remain.
        metrics_step: Number of steps taken after the last row of `metrics`.
    """

    step: int
    state: State
    metrics: Mapping[str, np.ndarray]
    is_last: bool
    metrics_step: int


class RunInfo(NamedTuple):
    """What a callback knows before the first step.

    Attributes:
        ensemble: Ensemble with the execution and the layout that will be used.
        member_ids: Ids of the members, in their order.
        first_step: Number of steps already taken.
        last_step: Number of steps of the whole run.
        batch_size: Number of examples of a step, over all hosts.
        directions: Whether "lower" or "higher" is better of each score of an evaluation, by the
            score's name; None for a score of which neither is. Empty if there is no data to score.
        eval_every: Number of steps between two evaluations; None for only at the end.
    """

    ensemble: Ensemble
    member_ids: Sequence[int]
    first_step: int
    last_step: int
    batch_size: int
    directions: Mapping[str, str | None] = MappingProxyType({})
    eval_every: int | None = None


# Methods of a callback that `fit` calls by name.
HOOKS = ("begin", "evaluated", "write", "sync", "finished", "close", "state", "restore")


def name_of_callback(callback: Any) -> str:
    """Returns the name of a function, or of an object's class, for messages."""
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def call_hook(callback: Any, name: str, *args: Any) -> Any:
    """Calls a method of a callback, if it has it, and returns the result.

    Raises:
        RunError: If the method raises; a `UserError` is raised as it is.
    """
    method = getattr(callback, name, None)
    if method is None:
        return None
    return _called(f"{name_of_callback(callback)}.{name}", "", method, *args)


def call_after_update(callback: Any, info: StepInfo) -> Any:
    """Calls a callback after an update, and returns the result.

    Raises:
        RunError: If the callback raises; a `UserError` is raised as it is.
    """
    return _called(name_of_callback(callback), f" at step {info.step:,}", callback, info)


def _called(name: str, at: str, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except (UserError, RunError):
        raise
    except Exception as error:  # whatever a user's callback raises
        raise RunError(
            f"The callback {name} raised {type(error).__name__}{at}: {first_line(error)} Correct "
            "the callback, or leave it out."
        ) from error
