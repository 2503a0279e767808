"""Interleaved timing, A B C A B C …, so that a slow phase of the machine affects every way.

In a round, every way has one turn. A turn is some steps of one way, timed together.
"""

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from dist_ens.processes import cluster

# A turn takes at least this number of seconds, and consists of whole steps.
TURN_SECS = 0.5
# Turns are shorter where they only choose between ways.
_SHORT_TURN_SECS = 0.1
# The pause before a turn, in seconds, lets idle threads of the previous way stop waiting for work.
_PAUSE_SECS = 0.05


class Way(Protocol):
    """A way to train an ensemble, which compiles its programs when it first runs."""

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits until they are done."""


def step_ms_of_turns(ways: Mapping[str, Way], num_turns: int) -> dict[str, list[float]]:
    """Returns the milliseconds per step of each way in each round, `num_turns` numbers by name."""
    step_secs = _step_secs_of_turns([*ways.values()], num_turns, TURN_SECS)
    return {
        name: [1e3 * secs for secs in of_way] for name, of_way in zip(ways, step_secs, strict=True)
    }


def step_secs_of_short_turns(ways: Sequence[Way], num_turns: int) -> list[list[float]]:
    """Returns the seconds per step of each way in each round of short turns, [ways, num_turns]."""
    return _step_secs_of_turns(ways, num_turns, _SHORT_TURN_SECS)


def expected_secs(step_secs: float, num_turns: int) -> float:
    """Estimates the seconds of a way in `step_secs_of_short_turns` from those of one step."""
    # One turn, or two where steps are short, find the number of steps of a turn. Each turn runs
    # twice, and the first run warms up.
    short = step_secs < _SHORT_TURN_SECS
    turn_secs = _SHORT_TURN_SECS + step_secs if short else step_secs
    return (num_turns + (2 if short else 1)) * (2 * turn_secs + _PAUSE_SECS)


def _step_secs_of_turns(ways: Sequence[Way], num_turns: int, turn_secs: float) -> list[list[float]]:
    step_secs: list[list[float]] = [[] for _ in ways]
    with _no_collection():
        steps = [_steps_of_a_turn(way, turn_secs) for way in ways]
        for _ in range(num_turns):
            gc.collect()
            for i, way in enumerate(ways):
                # The first run warms up. Meanwhile the caches were filled by other ways, the clock
                # slowed down, or a virtual machine gave back memory.
                way.run(steps[i])
                step_secs[i].append(_secs(way, steps[i]) / steps[i])
    return step_secs


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _steps_of_a_turn(way: Way, turn_secs: float) -> int:
    """Returns the number of steps of a turn. The way has run them, so they are compiled."""
    steps = 1
    while True:
        way.run(steps)
        secs = _secs(way, steps)
        if secs >= turn_secs:
            return steps
        steps = max(steps + 1, min(20 * steps, int(1.2 * steps * turn_secs / secs)))


def _secs(way: Way, num_steps: int) -> float:
    time.sleep(_PAUSE_SECS)
    since = cluster.clock()
    way.run(num_steps)
    return cluster.clock() - since
