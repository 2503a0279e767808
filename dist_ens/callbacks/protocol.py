"""The protocol between `fit` and its callbacks.

A callback is any object with some of these methods; `fit` calls those that it has.

    __call__(info: StepInfo) -> None | State | STOP    after each call of the update
    begin(run: RunInfo) -> None | STOP                 before the first step
    evaluated(step, scores) -> None | STOP             after each evaluation
    write(step, record) -> None                        for each record of metrics: a *writer*
    sync() -> None                                     before a checkpoint: records must be on disk
    members_failed(members) -> None                    at the end, if a member has failed
    finished(step, scores, evaluation, split) -> None  after the last evaluation
    close() -> None                                    at the end, also after an error
    best_step() -> int | None                          step of the best evaluation so far
    state() -> JSON data, restore(state)               saved with the checkpoint
    reason() -> str                                    why it returned STOP, to be printed
    stops_members: bool                                whether it may return stop_members(...)
    members_stopped(member_ids) -> None                all that have stopped so far, after each stop
    keeps_best: bool                                   whether improved_members() is asked
    improved_members() -> ids                          of members evaluated best so far
    every: int                                         number of steps between two calls

A record is a flat dict from names such as `train/loss` or `test/nll/member_03` to numbers. A plain
function of a `StepInfo` is a callback too. `write` and `sync` may be called in the thread that
saves, while the other methods are called in the main thread. A state is a number, a text, a bool,
None, or a list or dict of these.

One call of the update takes `steps_per_call` steps; give `fit` `steps_per_call=1` to call callbacks
after every step. After a callback has returned `STOP`, all callbacks are called once more, with
`is_last`. A state that they then return is not used. `fit` then prints the name of the callback and
its `reason()`, a clause such as "nll is below 0.1".

A callback with an attribute `every`, such as `every = 500`, is called only after a call of the
update that reaches a multiple of it. A number of steps that `fit` chooses for a call divides it.

`fit` returns the state of the step that `best_step()` of the first callback names, and not the last
one. It is called after each evaluation, whose step it may name, and at the end.

A callback with `stops_members = True` may return `stop_members([3, 7])` in place of None. These
members take no more updates, and stay in the ensemble: they are scored, saved and returned. With
`keeps_best = True`, its method `improved_members` is called after each evaluation, and parameters
of the members that it names are kept. A member that stops, and every member at the end, has those
that were kept last.

On several hosts, every host has its own callbacks, and only process 0 calls `write`. The run ends
on all hosts as soon as a callback of one of them returns `STOP`.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from dist_ens.ensemble import Ensemble
from dist_ens.ground.errors import RunError, UserError, first_line
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.state import State
from dist_ens.ground.types import Callback
from dist_ens.processes.stop_signal import EvaluationStoppedError


class Stop(enum.Enum):
    """The type of `STOP`."""

    STOP = "stop"


# A callback returns it to end the run, which is evaluated and saved first.
STOP = Stop.STOP


class StopMembers(NamedTuple):
    """The members that a callback stops; `stop_members` makes it."""

    member_ids: tuple[int, ...]


def stop_members(member_ids: Iterable[int]) -> StopMembers:
    """Returns what a callback returns to stop the members with some ids.

    >>> stop_members([3, 7])
    StopMembers(member_ids=(3, 7))
    """
    return StopMembers(tuple(whole_number("A member's id", each, least=0) for each in member_ids))


class StepInfo(NamedTuple):
    """Information for a callback after a call of the update.

    Attributes:
        step: Number of steps that the state has seen. It grows by the number of steps of a call,
            `steps_per_call` of `fit`, which may be 50. A callback that acts every 20 steps needs
            `steps_per_call=20` or a divisor of it.
        state: State of the ensemble. The devices may still be computing it. It is donated to the
            next call, so a callback that keeps it must copy it.
        metrics: Metrics by name that have arrived since the previous `StepInfo`, float32[steps,
            members]. They lag one call behind, so that the device never waits for the host. Empty
            if none have arrived.
        is_last: Whether the run ends at this step. `metrics` then holds all remaining rows.
        metrics_step: Number of steps taken up to the last row of metrics that has arrived.

    >>> info = StepInfo(
    ...     step=3,
    ...     state=None,
    ...     metrics={"loss": np.array([[0.75, 0.25], [0.5, 0.25]])},
    ...     is_last=False,
    ...     metrics_step=2,
    ... )
    >>> print(f"step {info.metrics_step}: mean loss {info.metrics['loss'][-1].mean()}")
    step 2: mean loss 0.375
    """

    step: int
    state: State
    metrics: Mapping[str, np.ndarray]
    is_last: bool
    metrics_step: int


class RunInfo(NamedTuple):
    """Information for a callback before the first step.

    Attributes:
        ensemble: Ensemble with the execution and the layout that will be used.
        member_ids: Ids of the members, in the order of the state.
        first_step: Number of steps already taken.
        last_step: Number of steps of the whole run.
        batch_size: Number of examples of a step, over all hosts. None if the batches have no rows.
        directions: Direction of each score by its name: "lower" or "higher" is better, or None
            if neither is. Empty if there is no data to score.
        eval_every: Number of steps between two evaluations, which need not be whole if they are
            those of an epoch. None evaluates only at the end.

    >>> run = RunInfo(None, member_ids=[0, 1, 2], first_step=200, last_step=1000, batch_size=32)
    >>> run.last_step - run.first_step  # steps that are left to train
    800
    """

    ensemble: Ensemble
    member_ids: Sequence[int]
    first_step: int
    last_step: int
    batch_size: int | None
    directions: Mapping[str, str | None] = MappingProxyType({})
    eval_every: int | Fraction | None = None


# Methods of a callback that `fit` calls by name.
HOOKS = (
    *(
        "begin",
        "evaluated",
        "write",
        "sync",
        "members_failed",
        "members_stopped",
        "finished",
        "close",
    ),
    *("best_step", "improved_members", "state", "restore", "reason"),
)


class Waiting(Protocol):
    """A callback that waits for a score, of which a person may have given the direction."""

    metric: str
    direction: str | None


def direction_of(callback: Waiting, run: RunInfo) -> str:
    """Returns the direction of the score `metric` for which a callback waits, "lower" or "higher".

    A `UserError` says that nothing, or no such score, is there in training.
    """
    scored: Mapping[str, str | None] = {} if run.eval_every is None else run.directions
    name, metric = name_of_callback(callback), callback.metric
    if metric not in scored:
        raise UserError(
            f"{name} waits for {metric!r}, and the scores during training are "
            f"{', '.join(scored) or 'none'}. Choose one, or give fit eval_data and eval_every."
        )
    direction = callback.direction or scored[metric]
    if direction is None:
        raise UserError(
            f"{name} waits for {metric!r}, of which neither a lower nor a higher score is known to "
            "be better. Choose another, or give direction='lower' or 'higher'."
        )
    return direction


OWN = "dist_ens."  # Prefix of the names of services.


class Service:
    """A callback of `fit` itself. Its exceptions are not those of a user's callback."""


def name_of_callback(callback: Callback) -> str:
    """Returns the name of a function, or of an object's class, for messages."""
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    return OWN + name if isinstance(callback, Service) else name


def call_hook(callback: Callback, name: str, *args: object) -> Any:
    """Calls a method of a callback and returns the result; None if there is no such method.

    An exception of a user's callback is raised as a `RunError` that names the callback.
    """
    method = getattr(callback, name, None)
    if method is None:
        return None
    if isinstance(callback, Service):
        return method(*args)
    return _called(f"{name_of_callback(callback)}.{name}", "", method, *args)


def after_update(callback: Callback) -> Callable[[StepInfo], object]:
    """Returns the function that calls a callback after an update. Its errors are as above."""
    if isinstance(callback, Service):
        return callback.__call__  # type: ignore[operator]  # the runner looks
    name = name_of_callback(callback)
    return lambda info: _called(name, f" at step {info.step:,}", callback, info)


def _called(name: str, at: str, fn: Callable[..., object], *args: object) -> object:
    """Calls a function of the user with a name, and returns the result."""
    try:
        return fn(*args)
    except (UserError, RunError, EvaluationStoppedError):
        raise
    except Exception as error:  # A user's callback may raise anything.
        raise RunError(
            f"The callback {name} raised {type(error).__name__}{at}: {first_line(error)} Correct "
            "the callback, or leave it out."
        ) from error
