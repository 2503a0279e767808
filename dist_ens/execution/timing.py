"""Interleaved timing, A B C A B C …, so that a slow phase of the machine affects all alike.

In a round, every candidate has one turn. A turn is some steps of one candidate, timed together.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from dist_ens.processes import cluster

# A turn takes at least this number of seconds, and consists of whole steps.
TURN_SECS = 0.5
# Turns are shorter where they only choose between candidates.
_SHORT_TURN_SECS = 0.1
# In a pause of these seconds before a turn, idle threads of the last candidate stop waiting for
# work.
_PAUSE_SECS = 0.05


class Candidate(Protocol):
    """A training program of an ensemble, compiled when it first runs."""

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits until they are done."""


def step_ms_of_turns(timed: Mapping[str, Candidate], num_turns: int) -> dict[str, list[float]]:
    """Returns the milliseconds per step of each candidate in each round, by its name."""
    step_secs = step_secs_of_turns([*timed.values()], num_turns, TURN_SECS)
    return {name: [1e3 * s for s in secs] for name, secs in zip(timed, step_secs, strict=True)}


def step_secs_of_turns(
    timed: Sequence[Candidate], num_turns: int, turn_secs: float = _SHORT_TURN_SECS
) -> list[list[float]]:
    """Returns the seconds per step of each candidate in each round, [candidates, num_turns]."""
    step_secs: list[list[float]] = [[] for _ in timed]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        steps = [_steps_of_a_turn(each, turn_secs) for each in timed]
        for _ in range(num_turns):
            gc.collect()
            for i, each in enumerate(timed):
                # The first run warms up. Meanwhile the caches were filled by others, the clock
                # slowed down, or a virtual machine gave back memory.
                each.run(steps[i])
                step_secs[i].append(_secs(each, steps[i]) / steps[i])
    finally:
        if was_enabled:
            gc.enable()
    return step_secs


def expected_secs(step_secs: float, num_turns: int) -> float:
    """Estimates the seconds of a candidate in `step_secs_of_turns` from those of one step."""
    # One turn, or two where steps are short, find the number of steps of a turn. Each turn runs
    # twice, and the first run warms up.
    short = step_secs < _SHORT_TURN_SECS
    turn_secs = _SHORT_TURN_SECS + step_secs if short else step_secs
    return (num_turns + (2 if short else 1)) * (2 * turn_secs + _PAUSE_SECS)


def _steps_of_a_turn(candidate: Candidate, turn_secs: float) -> int:
    """Returns the number of steps of a turn. They have run, so they are compiled."""
    steps = 1
    while True:
        candidate.run(steps)
        secs = _secs(candidate, steps)
        if secs >= turn_secs:
            return steps
        steps = max(steps + 1, min(20 * steps, int(1.2 * steps * turn_secs / secs)))


def _secs(candidate: Candidate, num_steps: int) -> float:
    time.sleep(_PAUSE_SECS)
    since = cluster.clock()
    candidate.run(num_steps)
    return cluster.clock() - since
