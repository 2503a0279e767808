"""Time, taken in turns: A B C A B C …, so that what disturbs the machine disturbs all alike."""

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from dist_ens import cluster

# A turn takes at least so long, and is of whole steps.
TURN_SECS = 0.5
# Where ways are only chosen among.
_SHORT_TURN_SECS = 0.1
# Before a turn: the threads of the way before it stop waiting for work.
_PAUSE_SECS = 0.05


class Way(Protocol):
    """A way to train an ensemble. What it compiles it does when it first runs."""

    def run(self, num_steps: int) -> None:
        """Trains every member for some steps more, and waits for the last."""


def step_ms_of_turns(ways: Mapping[str, Way], num_turns: int) -> dict[str, list[float]]:
    """Milliseconds per step of each way in each of its turns.

    Args:
        ways: By name.
        num_turns: Of each way, after those that find out how many steps a turn takes.

    Returns:
        By name: float[num_turns].
    """
    step_secs = _step_secs_of_turns([*ways.values()], num_turns, TURN_SECS)
    return {
        name: [1e3 * secs for secs in of_way] for name, of_way in zip(ways, step_secs, strict=True)
    }


def step_secs_of_short_turns(ways: Sequence[Way], num_turns: int) -> list[list[float]]:
    """Seconds per step of each way in each of its turns, which are short: [ways, num_turns]."""
    return _step_secs_of_turns(ways, num_turns, _SHORT_TURN_SECS)


def expected_secs(step_secs: float, num_turns: int) -> float:
    """About how long a way takes in `step_secs_of_short_turns`.

    Args:
        step_secs: Seconds that one of its steps takes.
        num_turns: Of the way.

    Returns:
        Seconds.
    """
    # How many steps a turn takes is found out in one as long, where steps are short in two; and
    # each turn is taken twice, to warm up.
    short = step_secs < _SHORT_TURN_SECS
    turn_secs = _SHORT_TURN_SECS + step_secs if short else step_secs
    return (num_turns + (2 if short else 1)) * (2 * turn_secs + _PAUSE_SECS)


def fastest(ways: Sequence[Way]) -> Way:
    """Of ways to do the same, the one that takes the least in the median of three turns."""
    # Not in the shortest: where ways are close, that is the luckiest.
    medians = [statistics.median(of_way) for of_way in step_secs_of_short_turns(ways, 3)]
    return ways[medians.index(min(medians))]


def spread(values: Sequence[float]) -> float:
    """The range of some values as a part of their median.

    >>> spread([2.0, 4.0, 5.0])
    0.75
    """
    return (max(values) - min(values)) / statistics.median(values)


def _step_secs_of_turns(ways: Sequence[Way], num_turns: int, turn_secs: float) -> list[list[float]]:
    """Seconds per step of each way in each of its turns, [ways, num_turns]."""
    step_secs: list[list[float]] = [[] for _ in ways]
    with _no_collection():
        steps = [_steps_of_a_turn(way, turn_secs) for way in ways]
        for _ in range(num_turns):
            gc.collect()
            for i, way in enumerate(ways):
                # What waited for its turn is cold: its caches, its clock, and the memory that a
                # virtual machine has given back meanwhile.
                way.run(steps[i])
                step_secs[i].append(_secs(way, steps[i]) / steps[i])
    return step_secs


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector runs only when it is called; afterwards it is as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _steps_of_a_turn(way: Way, turn_secs: float) -> int:
    """Enough for a turn of so long; they have been taken before, so that they are compiled."""
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
