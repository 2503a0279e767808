"""The harness that times in turns."""

import time

import pytest

from dist_ens import turns


class Cold:
    """A millisecond a step; after another has run, 50 more."""

    last = None

    def run(self, num_steps):
        time.sleep(num_steps * 1e-3 + (Cold.last is not self) * 50e-3)
        Cold.last = self


@pytest.mark.quick
def test_what_waited_for_its_turn_is_warm_when_it_is_timed(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECS", 0.01)
    step_ms = turns.step_ms_of_turns({"a": Cold(), "b": Cold()}, 3)
    assert {name: len(of_way) for name, of_way in step_ms.items()} == {"a": 3, "b": 3}
    # Ten steps a turn or so: five more each, were the first after the other counted.
    assert max(step_ms["a"] + step_ms["b"]) < 4
