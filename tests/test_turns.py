"""The harness that times in turns."""

import itertools
import time

import pytest

from benchmarks.peers import way
from dist_ens.execution import timing
from dist_ens.processes import cluster

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("sleep")]


class Cold:
    """A millisecond a step; after another has run, 50 more."""

    last = None

    def run(self, num_steps):
        time.sleep(num_steps * 1e-3 + (Cold.last is not self) * 50e-3)
        Cold.last = self


class Varying:
    """Sleeps for so many seconds, one after another, when it is warm."""

    def __init__(self, *secs):
        self._secs = itertools.cycle(secs)
        self._is_warm = False

    def run(self, num_steps):
        if self._is_warm:
            time.sleep(next(self._secs))
        self._is_warm = not self._is_warm


def test_neither_a_lucky_turn_nor_a_disturbed_one_decides(monkeypatch):
    monkeypatch.setattr(timing, "_steps_of_a_turn", lambda way, secs: 1)
    lucky, disturbed = Varying(0.001, 0.03, 0.03), Varying(0.2, 0.01, 0.01)
    assert way.fastest([lucky, disturbed]) is disturbed
    assert way.fastest([disturbed, lucky]) is disturbed


def test_what_waited_for_its_turn_is_warm_when_it_is_timed(monkeypatch):
    monkeypatch.setattr(timing, "TURN_SECS", 0.01)
    step_ms = timing.step_ms_of_turns({"a": Cold(), "b": Cold()}, 3)
    assert {name: len(of_way) for name, of_way in step_ms.items()} == {"a": 3, "b": 3}
    # A turn has 12 steps. With the first run after the other, a step would take 4.2 ms more.
    assert step_ms["a"] + step_ms["b"] == pytest.approx([1] * 6)


@pytest.mark.parametrize(("step_secs", "num_turns"), [(0.004, 3), (0.06, 2), (0.15, 2)])
def test_how_long_turns_take_is_known_before(step_secs, num_turns):
    class Steady:
        def run(self, num_steps):
            time.sleep(num_steps * step_secs)

    timing.step_secs_of_turns([Steady(), Steady()], num_turns)
    assert cluster.clock() == pytest.approx(2 * timing.expected_secs(step_secs, num_turns), rel=0.3)
