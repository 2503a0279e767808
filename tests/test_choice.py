"""How the execution is chosen when an experiment leaves it open."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens import cluster
from dist_ens.config import Experiment, ModelConfig
from dist_ens.ensemble import Ensemble, choice
from dist_ens.execution import Execution
from dist_ens.layout import BATCHES, Layout, make_layout
from dist_ens.models import make_model
from dist_ens.train import train
from test_executions import narrow, pooling


def program(network, num_members=4, steps=2):
    """An ensemble on one device, its state and the batches of a call."""
    member, inputs, label_shape = network()
    layout = make_layout(num_members, devices=jax.devices()[:1])
    ensemble = Ensemble(member, optax.sgd(0.1), layout)
    batches = networks.batches_for(inputs, label_shape, steps)
    return ensemble, networks.born_on(layout, network), layout.put(batches, networks.BATCH, BATCHES)


def wide():
    """Of which one member's product keeps a core busy: 2**22 multiplications."""
    side = 2**11 // int(networks.BATCH**0.5)
    options = {"hidden_sizes": (side, side)}
    member = make_model(ModelConfig(name="mlp", options=options), (4,), networks.CLASSES)
    return member, jax.ShapeDtypeStruct((networks.BATCH, 4), jnp.float32), ()


def candidates(ensemble, state, batches, steps=2):
    return choice.candidates(ensemble.layout, ensemble.traced_update(state, batches), steps)


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "LONGEST_SECS", 1e6)  # also where this machine is busy
    monkeypatch.setattr(choice, "_CLOSE", 1.0)  # each is timed once


@pytest.mark.parametrize(
    ("network", "num_members", "first"),
    [
        (networks.mlp, 4, "vmap"),
        (networks.mlp, 1, "vmap"),
        (narrow, 4, "vmap+aligned"),
        (narrow, 1, "vmap+aligned"),
        (networks.transformer, 4, "vmap+flat"),
        (networks.transformer, 1, "vmap+flat"),
        (networks.convolutional, 4, "unroll+canonical"),
        (pooling, 4, "unroll+canonical+masks"),
        (pooling, 17, "map+canonical+masks"),  # so many copies take long to compile
        (wide, 4, "map+aligned"),
    ],
)
def test_the_rule_goes_by_the_networks_operations(network, num_members, first):
    names = candidates(*program(network, num_members))
    assert names[0] == first
    assert len(set(names)) == len(names) > 1
    assert [str(Execution.parse(name)) for name in names] == names


@pytest.mark.parametrize(("num_members", "way"), [(4, "unroll"), (17, "map")])
def test_masks_are_a_candidate_that_can_lose(num_members, way):
    names = candidates(*program(pooling, num_members))
    assert [name for name in names if "masks" not in name] == [f"{way}+canonical"]
    assert names[0] == f"{way}+canonical+masks"


def test_what_another_version_chose_is_not_taken(monkeypatch):
    ensemble, state, batches = program(networks.mlp, 4)
    traced = ensemble.traced_update(state, batches)
    before, again = (choice._program(ensemble, traced, ["map"], state, batches) for _ in range(2))
    assert before == again
    monkeypatch.setattr("dist_ens.__version__", "0.0.0")
    assert choice._program(ensemble, traced, ["map"], state, batches) != before


def test_what_takes_long_to_compile_is_no_candidate():
    def ways(network, num_members, steps=2):
        found = candidates(*program(network, num_members, steps), steps)
        return {name.partition("+")[0] for name in found if "canonical" not in name}

    assert "unroll" in ways(wide, 16, steps=20)  # a loop over the steps: one copy per member
    assert "unroll" not in ways(wide, 17)
    assert "unroll" in ways(networks.convolutional, 8)
    assert "unroll" not in ways(networks.convolutional, 8, steps=3)  # a copy per step too


def test_a_product_is_large_by_its_own_matrices():
    def is_large(*shape, batch=()):
        lhs, rhs = (
            jax.ShapeDtypeStruct((*batch, *side), "float32") for side in (shape[:2], shape[1:])
        )
        axes = tuple(range(len(batch)))
        last = len(batch)
        traced = jax.make_jaxpr(
            lambda a, b: jax.lax.dot_general(a, b, (((last + 1,), (last,)), (axes, axes)))
        )(lhs, rhs)
        return choice.contains(traced, choice.PRODUCT, choice._is_large)

    assert is_large(128, 128, 256)  # 2**22
    assert not is_large(128, 127, 256)
    assert not is_large(128, 32, 128, batch=(32, 4))  # 2**26 in all
    assert is_large(128, 128, 256, batch=(2,))


def test_many_small_members_may_be_batched_some_at_a_time():
    def chunks(network, num_members):
        return [name for name in candidates(*program(network, num_members)) if "chunk" in name]

    assert chunks(networks.mlp, 20) == ["chunk:10"]
    assert chunks(narrow, 14) == ["chunk:7+aligned"]
    assert chunks(networks.mlp, 22) == []  # no size from 5 to 10 divides it
    assert chunks(networks.mlp, 10) == []  # few
    assert chunks(wide, 20) == []  # a member's own products keep a core busy


def test_the_fastest_of_those_timed_is_chosen_and_kept_for_the_next_run():
    ensemble, state, batches = program(networks.mlp)
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert [*why.step_secs] == candidates(ensemble, state, batches)
    compared = why.in_turns or why.step_secs
    assert why.option == chosen.execution == min(compared, key=why.step_secs.get)
    assert str(why).startswith(f"Execution {chosen.execution}: the fastest of those tried (")
    chosen.update(state, batches)  # the state was not used up
    again, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert again.execution == chosen.execution
    assert why.why == "the fastest in an earlier run of this program"
    _, other = choice.choose(*program(networks.mlp, num_members=5), num_steps=1)
    assert "earlier" not in other.why


def test_candidates_that_are_close_are_timed_again_in_turns(monkeypatch):
    def last_is_fastest(ways, num_turns):
        for way in ways:
            way.run(1)
        return [[2.0 * (len(ways) - i)] for i in range(len(ways))]  # of calls of two steps

    monkeypatch.setattr(choice.turns, "step_secs_of_short_turns", last_is_fastest)
    monkeypatch.setattr(choice, "_CLOSE", 1e9)
    ensemble, state, batches = program(networks.mlp)
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert sorted(why.in_turns) == sorted(candidates(ensemble, state, batches))
    assert why.step_secs == {name: len(why.in_turns) - i for i, name in enumerate(why.in_turns)}
    assert chosen.execution == why.in_turns[-1]


class Sleeping:
    """An execution whose calls of two steps take some time, the first that of a compiler too."""

    def __init__(self, layout, secs, execution="map", compiling_secs=0.0):
        self.layout, self.secs, self.calls, self.disturbed = layout, secs, 0, 0
        self.execution, self.compiling_secs = execution, compiling_secs

    def update(self, state, batches):
        self.calls += 1
        time.sleep(self.secs * (5 if self.calls <= self.disturbed else 1))
        time.sleep(self.compiling_secs if self.calls == 1 else 0)
        return state, {}


def timed(*call_secs, num_steps=10**9, disturbed=0):
    """What is found out of executions whose calls take so long, the first the rule's.

    So many of that one's first calls take five times as long.
    """
    ensemble, state, batches = program(networks.mlp, steps=2)
    options = {str(secs): Sleeping(ensemble.layout, secs) for secs in call_secs}
    options[str(call_secs[0])].disturbed = disturbed
    return choice._timed(options, [*options], state, batches, num_steps), options


def test_those_that_are_close_take_turns_and_others_do_not(monkeypatch):
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    timing, options = timed(0.06, 0.05, 0.12)
    assert timing.fastest == "0.05"
    assert timing.in_turns == ["0.05", "0.06"]
    assert timing.settled
    for name, secs in timing.step_secs.items():
        assert secs == pytest.approx(options[name].secs / 2, rel=0.3)
    # One that is far behind warms up and is timed three times; in five turns of two calls each is
    # warmed up as often.
    assert options["0.12"].calls == 4
    assert options["0.06"].calls >= 4 + 5 * 4


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
    monkeypatch.setattr(choice, "LONGEST_SECS", longest_secs)
    ensemble, state, batches = program(networks.mlp, num_members=4, steps=2)
    options = {name: Sleeping(ensemble.layout, 0.03, name, 0.4) for name in executions}
    timing = choice._timed(options, [*options], state, batches, num_steps=10**9)
    assert [*timing.step_secs] == list(tried or executions)


def test_what_the_cache_has_spared_the_compiler_counts_as_compiled(monkeypatch):
    spared = iter([0.0, 2.0])  # before and after the rule's
    monkeypatch.setattr(choice, "spared_secs", lambda: next(spared, 2.0))
    monkeypatch.setattr(choice, "LONGEST_SECS", 1.9)
    timing, _ = timed(0.03, 0.02)
    assert [*timing.step_secs] == ["0.03"]


def test_the_rules_way_has_a_second_chance(monkeypatch):
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    timing, _ = timed(0.03, 0.06, 0.11, disturbed=6)
    assert timing.fastest == "0.03"
    assert timing.in_turns == ["0.06", "0.03"]
    assert timing.settled


@pytest.mark.parametrize(
    ("call_secs", "longest_secs", "settled"), [((0.01, 0.05), 1e6, True), ((0.02, 0.021), 3, False)]
)
def test_none_takes_turns_that_is_far_behind_or_for_which_there_is_no_time(
    monkeypatch, call_secs, longest_secs, settled
):
    monkeypatch.setattr(choice.turns, "step_secs_of_short_turns", lambda *_: pytest.fail("again"))
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    monkeypatch.setattr(choice, "LONGEST_SECS", longest_secs)
    timing, _ = timed(*call_secs)
    assert len(timing.step_secs) == 2
    assert timing.in_turns == []
    assert timing.settled == settled


@pytest.mark.parametrize(
    ("num_steps", "tried", "in_turns", "settled"),
    [
        # A call of 0.3 s is timed in 0.9 s, and takes three turns in 2.6 s. Of 6.5 s, which are 5 %
        # of 867 steps of 0.15 s, 5.6 s are left for the third: less than 0.9 s and turns of two.
        (867, 2, 2, False),
        (1100, 3, 2, True),
        (533, 3, 0, False),  # of 4 s nothing can be kept for turns
    ],
)
def test_time_for_the_turns_of_the_best_two_is_kept(
    monkeypatch, num_steps, tried, in_turns, settled
):
    def unlike(ways, num_turns):
        assert num_turns == 3  # of calls that are long
        return [[0.3 * 2**i] * 3 for i in range(len(ways))]

    monkeypatch.setattr(choice.turns, "step_secs_of_short_turns", unlike)
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    timing, _ = timed(0.3, 0.301, 0.302, num_steps=num_steps)
    assert (len(timing.step_secs), len(timing.in_turns)) == (tried, in_turns)
    assert timing.settled == settled


def test_no_time_is_kept_where_none_is_close(monkeypatch):
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    timing, _ = timed(0.3, 0.6, 0.601, num_steps=867)
    assert len(timing.step_secs) == 3
    assert timing.settled


def test_as_many_of_the_close_take_turns_as_there_is_time_for(monkeypatch):
    monkeypatch.setattr(
        choice.turns, "step_secs_of_short_turns", lambda ways, _: [[1.0]] * len(ways)
    )
    monkeypatch.setattr(choice, "_CLOSE", 1.6)
    monkeypatch.setattr(choice, "LONGEST_SECS", 5.9)
    timing, _ = timed(0.013, 0.011, 0.01)
    assert timing.in_turns == ["0.01", "0.011"]
    assert timing.settled


def in_rounds(monkeypatch, *rounds):
    """Scripts what executions take in rounds of turns, by their milliseconds in other calls.

    Returns a list, in which those that took turns will be, round by round.
    """
    taken = []

    def next_round(ways, num_turns):
        names = [round(1e3 * way.update.__self__.secs) for way in ways]
        secs = rounds[len(taken)]
        taken.append(sorted(names))
        return [[secs[name]] for name in names]

    monkeypatch.setattr(choice.turns, "step_secs_of_short_turns", next_round)
    monkeypatch.setattr(choice, "_CLOSE", 1e9)
    return taken


@pytest.mark.parametrize(
    ("rounds", "taken", "fastest"),
    [
        # Two stay within a tenth of each other to the end: 1, 1.2 and 1.3; 1.1, 1 and 1.15.
        (
            [{1: 1.0, 2: 1.1, 3: 1.09, 4: 1.2}, {1: 1.2, 2: 1.0, 3: 2.0}, {1: 1.3, 2: 1.15}],
            [[1, 2, 3, 4], [1, 2, 3], [1, 2]],
            "0.002",
        ),
        # The third was faster than both only because it ran when the machine was.
        (
            [{1: 1.0, 2: 1.01, 3: 1.2}, {1: 2.0, 2: 2.01}, {1: 2.1, 2: 1.9}],
            [[1, 2, 3], [1, 2], [1, 2]],
            "0.002",
        ),
        ([{1: 1.2, 2: 1.0}], [[1, 2]], "0.002"),
    ],
)
def test_those_that_stay_close_take_more_turns_and_all_of_them_count(
    monkeypatch, rounds, taken, fastest
):
    names = in_rounds(monkeypatch, *rounds)
    timing, _ = timed(*(ms / 1e3 for ms in rounds[0]))
    assert names == taken
    assert timing.fastest == fastest
    assert len(timing.in_turns) == len(rounds[0])
    assert timing.settled


def test_for_more_turns_there_must_be_time(monkeypatch):
    taken = in_rounds(monkeypatch, {10: 1.0, 11: 1.01})
    # 5 % of these steps of 5 ms are 9 s. The first turns are expected to take 4; of calls that have
    # turned out to take a second, three more take 16.
    timing, _ = timed(0.01, 0.011, num_steps=36_000)
    assert taken == [[10, 11]]
    assert len(timing.in_turns) == 2
    assert not timing.settled  # a longer run has time for them


def test_what_was_not_settled_is_kept_for_runs_as_long_alone(monkeypatch):
    def chosen(num_steps, settled):
        timing = choice._Timing("map", {"vmap": 2.0, "map": 1.0}, [], settled, 1.0)
        monkeypatch.setattr(choice, "_timed", lambda *_: timing)
        return choice.choose(*program(networks.mlp), num_steps=num_steps)[1]

    assert chosen(100, False).step_secs
    assert chosen(100, False).why == "as in an earlier run of as many steps"
    assert chosen(200, True).why == "the fastest of those tried"
    assert chosen(300, True).why == "the fastest in an earlier run of this program"


def test_what_was_tried_is_told():
    secs = {"vmap": 0.002, "map": 0.001, "loop": 0.004}
    told = str(choice.Choice("map", "the fastest of those tried", secs))
    assert told == "Execution map: the fastest of those tried (vmap 2, map 1, loop 4 ms a step)."
    told = str(choice.Choice("map", "the fastest of those tried", secs, ["map", "vmap"]))
    assert told.endswith("tried (in turns map 1, vmap 2; once loop 4 ms a step).")
    assert str(choice.Choice("map", "the rule")) == "Execution map: the rule."


def test_a_short_run_follows_the_rule():
    chosen, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert chosen.execution == "vmap"
    assert [*why.step_secs] == ["vmap"]
    assert "are too few to time others" in why.why
    # A run of the same length times nothing; a longer one has time for more.
    again, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert (again.execution, why.step_secs) == ("vmap", {})
    assert why.why == "as in an earlier run of as many steps"
    _, why = choice.choose(*program(networks.mlp), num_steps=10**9)
    assert len(why.step_secs) > 1  # a rule is not kept as if it had been measured


def test_the_longest_run_is_not_kept_waiting_for_its_choice(monkeypatch):
    monkeypatch.setattr(choice, "LONGEST_SECS", 0)
    _, why = choice.choose(*program(networks.mlp), num_steps=10**9)
    assert [*why.step_secs] == ["vmap"]
    assert "0 s are too few to time others" in why.why


def test_what_does_not_fit_in_memory_is_not_run(monkeypatch):
    free = iter([1e12])  # at first, for a copy of the state; then none
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: next(free, 0))
    _, why = choice.choose(*program(networks.mlp), num_steps=10**9)
    assert [*why.step_secs] == ["vmap", "loop"]  # the rule's own, and one member at a time
    _, why = choice.choose(*program(networks.mlp, num_members=5), num_steps=10**9)
    assert why.why == "the rule, for there is no room to time candidates"
    assert not why.step_secs


def test_a_damaged_memory_of_choices_is_no_obstacle(tmp_path):
    kept = tmp_path / "cache" / "dist_ens" / "executions.json"
    kept.parent.mkdir(parents=True)
    for damaged in ("", "[]", "{"):
        kept.write_text(damaged)
        chosen, _ = choice.choose(*program(networks.mlp), num_steps=10**9)
        assert json.loads(kept.read_text()).popitem()[1] == chosen.execution


def experiment(**changes):
    values = {
        "num_members": 4,
        "steps": 8,
        "execution": "auto",
        "data": {"global_batch_size": 32, "std": (16.0,)},
        "model": {"name": "mlp", "hidden_sizes": (16,)},
    }
    return Experiment.from_dict(values | changes)


def test_a_run_says_what_it_chose_and_keeps_it_when_it_goes_on(tmp_path, capsys):
    train(experiment(), tmp_path / "auto")
    assert (
        "Execution vmap: nothing else is worth trying for this network." in capsys.readouterr().out
    )
    summary = json.loads((tmp_path / "auto" / "summary.json").read_text())
    assert summary["execution"] == "vmap"
    train(experiment(execution="map"), tmp_path / "map")
    went_on = train(experiment(steps=16), tmp_path / "map")
    assert went_on.ensemble.execution == "map"
    assert "Execution" not in capsys.readouterr().out
    whole = train(experiment(steps=16, execution="map"), tmp_path / "whole")
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(run.state.params) for run in (whole, went_on)),
    )
    again = train(experiment(steps=16), tmp_path / "map")  # finished: scored as it was trained
    assert again.ensemble.execution == "map"


def test_a_run_that_begins_again_before_it_is_saved_has_what_was_chosen(
    tmp_path, monkeypatch, capsys
):
    def killed(*_):
        raise MemoryError

    monkeypatch.setattr(choice, "PART_OF_THE_RUN", 1e9)
    with monkeypatch.context() as patch:
        patch.setattr("dist_ens.report.TrainingReporter.updated", killed)
        # On a machine where nothing is remembered.
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        for steps in (8, 16):
            with pytest.raises(MemoryError):
                train(experiment(steps=steps, steps_per_call=2), tmp_path / "run")
    begun = capsys.readouterr().out
    assert begun.count("the fastest of those tried") == 2  # of another length it is another run
    kept = json.loads((tmp_path / "run" / "executions.json").read_text())
    assert len(kept) == 2
    (tmp_path / "run" / "executions.json").write_text(
        json.dumps(dict.fromkeys(kept, "vmap+single"))
    )
    again = train(experiment(steps_per_call=2), tmp_path / "run")
    assert again.ensemble.execution == "vmap+single"
    assert "Execution vmap+single: as when this run began." in capsys.readouterr().out


@pytest.fixture
def cores(monkeypatch):
    """The eight devices taken for the cores of one CPU."""
    monkeypatch.setattr(cluster, "_cores_are_devices", True)


def test_cores_are_devices_for_members_and_never_for_data(cores):
    # The most of 8 cores that divide the members, or as many as somebody says.
    for num_members, rows, expected in [(8, None, 8), (10, None, 5), (7, None, 7), (11, None, 1)]:
        assert len(cluster.devices_for(num_members, rows)) == expected
    assert len(cluster.devices_for(8, 2)) == 2


def test_the_fastest_is_tried_on_one_core_too(cores, monkeypatch):
    # Turns would replace the seconds by which it was the fastest.
    monkeypatch.setattr(choice._Contest, "_that_take_turns", lambda *_, **__: [])
    member, inputs, label_shape = networks.mlp()
    layout = make_layout(4, devices=cluster.devices_for(4))
    ensemble = Ensemble(member, optax.sgd(0.1), layout)
    batches = networks.batches_for(inputs, label_shape, 2)
    state = ensemble.init(0, inputs)
    batches = layout.put(batches, networks.BATCH, BATCHES)
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    *on_all, on_one = why.step_secs
    assert on_all == candidates(ensemble, state, batches)
    assert on_one == f"{min(on_all, key=why.step_secs.get)} on one device"
    assert chosen.layout.mesh.size == (1 if why.option == on_one else 4)


def test_a_way_that_one_core_has_not_is_no_reason_not_to_try_that_core():
    ensemble, state, batches = program(networks.mlp, steps=2)
    secs = {"chunk:5": 0.01, "vmap on one device": 0.02, "chunk:10 on one device": 0.03}
    options = {name: Sleeping(ensemble.layout, secs[name]) for name in secs}
    timing = choice._timed(options, ["chunk:5"], state, batches, num_steps=10**9)
    assert [*timing.step_secs] == ["chunk:5", "vmap on one device"]
    options["chunk:5 on one device"] = Sleeping(ensemble.layout, 0.02)
    timing = choice._timed(options, ["chunk:5"], state, batches, num_steps=10**9)
    assert [*timing.step_secs] == ["chunk:5", "chunk:5 on one device"]


def test_one_core_has_candidates_of_its_own(cores, monkeypatch):
    tried = []

    def first(options, *_):
        tried.extend(options)
        return choice._Timing("vmap", {"vmap": 1.0, "map": 2.0}, [], True, 1.0)

    monkeypatch.setattr(choice, "_timed", first)
    layout = make_layout(24, devices=cluster.devices_for(24))
    member, inputs, label_shape = networks.mlp()
    ensemble = Ensemble(member, optax.sgd(0.1), layout)
    batches = layout.put(networks.batches_for(inputs, label_shape, 2), networks.BATCH, BATCHES)
    choice.choose(ensemble, ensemble.init(0, inputs), batches, num_steps=10**9)
    assert "unroll" in tried  # 3 copies of a step a core
    assert "unroll on one device" not in tried  # 24
    assert "chunk:8 on one device" in tried


def test_a_layout_that_somebody_says_is_kept(cores, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(choice, "PART_OF_THE_RUN", 1e9)
    train(experiment(steps_per_call=2), tmp_path / "open")
    assert "on one device" in capsys.readouterr().out
    said = train(experiment(steps_per_call=2, layout={"ensemble_axis": 4}), tmp_path / "said")
    tried = capsys.readouterr().out
    assert "the fastest of those tried" in tried
    assert "on one device" not in tried
    assert said.ensemble.layout.mesh.size == 4


def test_a_run_goes_on_on_the_cores_it_began_with(cores, tmp_path):
    on_one = {"layout": {"ensemble_axis": 1}}
    train(experiment(**on_one), tmp_path / "parts")
    parts = train(experiment(steps=16), tmp_path / "parts")
    whole = train(experiment(steps=16, **on_one), tmp_path / "whole")
    assert parts.ensemble.layout.mesh.size == whole.ensemble.layout.mesh.size == 1
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(run.state.params) for run in (whole, parts)),
    )
    anew = train(experiment(), tmp_path / "anew")
    assert anew.ensemble.layout.mesh.size == 4
