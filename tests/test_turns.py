"""The harness that times in turns."""

import itertools
import time

import pytest

from dist_ens import turns


class Cold:
    """A millisecond a step; after another has run, 50 more."""

    last = None

    def run(self, num_steps):
        time.sleep(num_steps * 1e-3 + (Cold.last is not self) * 50e-3)
        Cold.last = self


class Lucky:
    """Sleeps for a hundredth of a second, but once in a while for a thousandth, or for a tenth."""

    def __init__(self, lucky):
        self._secs = itertools.cycle([0.01, 0.01, 0.001 if lucky else 0.1])

    def run(self, num_steps):
        time.sleep(next(self._secs))


def test_neither_a_lucky_turn_nor_a_disturbed_one_decides(monkeypatch):
    monkeypatch.setattr(turns, "_steps_of_a_turn", lambda way, secs: 1)
    lucky, disturbed = turns.median_step_secs([Lucky(True), Lucky(False)], 3)
    assert lucky == pytest.approx(0.01, rel=0.5)
    assert disturbed == pytest.approx(0.01, rel=0.5)


@pytest.mark.quick
def test_what_waited_for_its_turn_is_warm_when_it_is_timed(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECS", 0.01)
    step_ms = turns.step_ms_of_turns({"a": Cold(), "b": Cold()}, 3)
    assert {name: len(of_way) for name, of_way in step_ms.items()} == {"a": 3, "b": 3}
    # Ten steps a turn or so: five more each, were the first after the other counted.
    assert max(step_ms["a"] + step_ms["b"]) < 4


@pytest.mark.parametrize(("step_secs", "num_turns"), [(0.004, 3), (0.06, 2), (0.15, 2)])
def test_how_long_turns_take_is_known_before(step_secs, num_turns):
    class Steady:
        def run(self, num_steps):
            time.sleep(num_steps * step_secs)

    started = time.monotonic()
    turns.median_step_secs([Steady(), Steady()], num_turns)
    took = time.monotonic() - started
    assert took == pytest.approx(2 * turns.expected_secs(step_secs, num_turns), rel=0.4)
