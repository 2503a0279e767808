"""What is found out of executions in the time there is, by a clock that only they move on."""

import time

import jax
import jax.numpy as jnp
import pytest

import networks
from dist_ens.execution import autotune
from dist_ens.layout import BATCHES
from test_candidates import program


@pytest.fixture(autouse=True)
def _time_without_limit(monkeypatch, sleep):
    monkeypatch.setattr(autotune, "LONGEST_SECS", 1e6)


class Sleeping:
    """An execution whose calls of two steps take some time, the first that of a compiler too."""

    def __init__(self, layout, secs, execution="map", compiling_secs=0.0):
        self.layout, self.secs, self.calls = layout, secs, 0
        self.execution, self.compiling_secs = execution, compiling_secs

    def update_steps(self, state, batches):
        self.calls += 1
        time.sleep(self.secs)
        time.sleep(self.compiling_secs if self.calls == 1 else 0)
        return state, {}


def contest(make_options, names=None, num_steps=10**9):
    """What is found out of executions by name, which a function of a layout makes, and these."""
    ensemble, state, batches = program(networks.mlp, steps=2)
    options = make_options(ensemble.layout)
    call = autotune.Call(state, batches, BATCHES, 2)
    return autotune.timed(options, names or [*options], call, num_steps), options


def timed(*call_secs, num_steps=10**9):
    """What is found out of executions whose calls take so long, the first the rule's."""
    return contest(
        lambda layout: {str(secs): Sleeping(layout, secs) for secs in call_secs},
        num_steps=num_steps,
    )


def in_rounds(monkeypatch, sleep, *rounds, secs_of_each=1.0):
    """Scripts the calls' seconds in rounds of turns, by an execution's milliseconds before.

    Returns a list, in which each round is going to be told: those that took turns, and how many.
    """
    told = []

    def next_round(ways, num_turns):
        names = [round(1e3 * way.update.__self__.secs) for way in ways]
        secs = rounds[len(told)]
        told.append((sorted(names), num_turns))
        sleep(secs_of_each * len(ways))
        return [secs[name] for name in names]

    monkeypatch.setattr(autotune.timing, "step_secs_of_turns", next_round)
    return told


def test_those_that_are_close_take_turns_and_others_do_not():
    timing, options = timed(0.06, 0.05, 0.12)
    assert timing.fastest == "0.05"
    assert timing.num_turns == {"0.05": 5, "0.06": 5}  # not so close that they would take more
    assert timing.settled
    for name, secs in timing.step_secs.items():
        assert secs == pytest.approx(options[name].secs / 2)
    # One that is far behind warms up and is timed three times; in five turns of two calls each is
    # warmed up as often.
    assert options["0.12"].calls == 4
    assert options["0.06"].calls >= 4 + 5 * 4


@pytest.mark.parametrize(("num_steps", "is_short"), [(390, True), (410, False)])
def test_a_run_too_short_for_another_candidate_times_one_call(num_steps, is_short):
    # Of 195 calls of 10 ms 5 % are 97.5 ms, and the timing of a candidate takes 100 ms.
    timing, options = timed(0.01, 0.02, num_steps=num_steps)
    assert [*timing.step_secs] == ["0.01"]
    assert timing.step_secs["0.01"] == pytest.approx(0.005)
    assert (options["0.01"].calls == 1 + 1) == is_short  # The first call warms up.
    assert not timing.settled


@pytest.mark.parametrize(
    ("executions", "longest_secs", "tried"),
    [
        # Timed in 0.15 s, compiled in 0.4: four members' copies in 1.6. Behind them comes a loop.
        (("map", "unroll", "vmap"), 1.5, ["map", "vmap"]),
        (("map", "unroll", "vmap"), 3, ["map", "unroll", "vmap"]),
        # With convolutions left to XLA there is one for each of the two steps too: 3.2.
        (("map+canonical", "unroll", "loop"), 3, ["map+canonical", "loop"]),
        (("map+canonical", "unroll+canonical", "loop"), 3.5, None),
        # Of the rule's copies each took a quarter.
        (("unroll", "unroll+flat", "map"), 1.5, None),
    ],
)
def test_what_would_be_compiled_for_too_long_is_not_begun(
    monkeypatch, executions, longest_secs, tried
):
    monkeypatch.setattr(autotune, "LONGEST_SECS", longest_secs)
    timing, _ = contest(
        lambda layout: {name: Sleeping(layout, 0.03, name, 0.4) for name in executions}
    )
    assert [*timing.step_secs] == list(tried or executions)


@pytest.mark.parametrize(
    ("rounds", "fastest"),
    [
        # Two stay within a tenth of each other to the end: 1, 1.2 and 1.3; 1.1, 1 and 1.15.
        (
            [
                {1: [1.0], 2: [1.1], 3: [1.09], 4: [1.11]},
                {1: [1.2], 2: [1.0], 3: [2.0]},
                {1: [1.3], 2: [1.15]},
            ],
            "0.002",
        ),
        # The third was faster than both only because it ran when the machine was.
        ([{1: [1.0], 2: [1.01], 3: [1.2]}, {1: [2.0], 2: [2.01]}, {1: [2.1], 2: [1.9]}], "0.002"),
        ([{1: [1.2], 2: [1.0]}], "0.002"),
        # In the median of all: not in the mean, nor in the median of the rounds' medians.
        ([{1: [1.0, 1.0, 9.0], 2: [1.05] * 3}] * 3, "0.001"),
        ([{1: [1.0, 1.08, 1.08], 2: [1.04] * 3}] * 2 + [{1: [1.0] * 3, 2: [1.04] * 3}], "0.001"),
    ],
)
def test_those_that_stay_close_take_more_turns_and_all_of_them_count(
    monkeypatch, sleep, rounds, fastest
):
    monkeypatch.setattr(autotune, "_CLOSE", 1e9)
    told = in_rounds(monkeypatch, sleep, *rounds)
    timing, _ = timed(*(ms / 1e3 for ms in rounds[0]))
    assert told == [([*names], 5) for names in rounds]
    assert timing.fastest == fastest
    turns = {name: sum(len(r.get(name, [])) for r in rounds) for name in rounds[0]}
    assert timing.num_turns == {str(name / 1e3): count for name, count in turns.items()}
    assert timing.settled


def test_a_way_that_one_core_has_not_is_no_reason_not_to_try_that_core():
    secs = {"chunk:5": 0.01, "vmap on one device": 0.02, "chunk:10 on one device": 0.03}

    def options(layout):
        return {name: Sleeping(layout, secs[name]) for name in secs}

    def tried():
        return [*contest(options, ["chunk:5"])[0].step_secs]

    assert tried() == ["chunk:5", "vmap on one device"]
    secs["chunk:5 on one device"] = 0.02
    assert tried() == ["chunk:5", "chunk:5 on one device"]


class Failing(Sleeping):
    """An execution that has used the state up when its second call raises."""

    def update_steps(self, state, batches):
        state, metrics = super().update_steps(state, batches)
        if self.calls == 2:
            for leaf in jax.tree.leaves(state):
                leaf.delete()
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return state, metrics


class Reading(Sleeping):
    """An execution that looks at the state it is given."""

    def update_steps(self, state, batches):
        jax.block_until_ready(jax.tree.map(jnp.copy, state))
        return super().update_steps(state, batches)


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_candidate_that_uses_the_state_up_and_raises_is_left_out(failing):
    def options(layout):
        kinds = {name: Failing if name == failing else Reading for name in "abc"}
        return {name: kind(layout, 0.05, "vmap") for name, kind in kinds.items()}

    timing, _ = contest(options)
    assert [*timing.step_secs] == [name for name in "abc" if name != failing]
    assert timing.failed == {failing: "RuntimeError: RESOURCE_EXHAUSTED: Out of memory."}
