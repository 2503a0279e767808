"""How the execution is chosen when an experiment leaves it open."""

import dataclasses
import json
import re

import pytest

import networks
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble import select_execution as choice
from dist_ens.execution import autotune
from dist_ens.execution.spec import LOWERINGS
from dist_ens.experiment import Experiment
from dist_ens.experiment.train import train
from dist_ens.layout import Layout
from dist_ens.processes import cluster
from marked import long
from test_candidates import candidates, program

SAME_LENGTH = "taken from the cache of an earlier run with the same number of steps"


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "LONGEST_SECS", 1e6)  # also where this machine is busy
    monkeypatch.setattr(autotune, "_CLOSE", 1.0)  # each is timed once


def most_turns(why):
    """Those that the choice was made among."""
    most = max(why.num_turns.values(), default=0)
    return [name for name in why.step_secs if why.num_turns.get(name, 0) == most]


def test_the_fastest_of_those_timed_is_chosen_and_kept_for_the_next_run():
    ensemble, state, batches = program(networks.mlp)
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert [*why.step_secs] == candidates(ensemble, state, batches)
    compared = most_turns(why)
    assert why.option == chosen.execution == min(compared, key=why.step_secs.get)
    assert str(why).startswith(f"Execution {chosen.execution}: the fastest of those tried (")
    chosen.update_steps(state, batches)  # the state was not used up
    again, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert again.execution == chosen.execution
    assert why.why == "the fastest in an earlier run of this program"
    _, other = choice.choose(*program(networks.mlp, num_members=5), num_steps=1)
    assert "earlier" not in other.why


def test_a_step_of_members_in_waves_is_that_of_all_waves(monkeypatch):
    def of_one_wave(options, names, call, num_steps):
        assert num_steps == 200
        assert call.state.step.shape == (2,)
        return autotune.Timing(names[0], {names[0]: 1.0, names[1]: 3.0}, {}, True, 1.0)

    monkeypatch.setattr(autotune, "timed", of_one_wave)
    ensemble, state, batches = program(networks.mlp, num_members=4)
    chosen, why = choice.choose(ensemble.replace(waves=2), state, batches, num_steps=100)
    assert (chosen.execution, chosen.waves) == ("vmap", 2)
    assert [*why.step_secs.values()] == [2.0, 6.0]


def test_what_was_not_settled_is_kept_for_runs_as_long_alone(monkeypatch):
    def chosen(num_steps, settled):
        timing = autotune.Timing("map", {"vmap": 2.0, "map": 1.0}, {}, settled, 1.0)
        monkeypatch.setattr(autotune, "timed", lambda *_: timing)
        return choice.choose(*program(networks.mlp), num_steps=num_steps)[1]

    assert chosen(100, False).step_secs
    assert chosen(100, False).why == SAME_LENGTH
    assert chosen(200, True).why == "the fastest of those tried"
    assert chosen(300, True).why == "the fastest in an earlier run of this program"


def test_a_short_run_follows_the_rule():
    chosen, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert chosen.execution == "vmap"
    assert [*why.step_secs] == ["vmap"]
    assert re.fullmatch(
        r"the rule, because timing others .* [0-9.e-]+ s, 5% of the run, or .*", why.why
    )
    # A run of the same length times nothing; a longer one has time for more.
    again, why = choice.choose(*program(networks.mlp), num_steps=1)
    assert (again.execution, why.step_secs) == ("vmap", {})
    assert why.why == SAME_LENGTH
    _, why = choice.choose(*program(networks.mlp), num_steps=10**9)
    assert len(why.step_secs) > 1  # a rule is not kept as if it had been measured


def test_what_does_not_fit_in_memory_is_not_run(monkeypatch):
    free = iter([1e12])  # at first, for a copy of the state; then none
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: next(free, 0))
    _, why = choice.choose(*program(networks.mlp), num_steps=10**9)
    assert [*why.step_secs] == ["vmap", "loop"]  # the rule's own, and one member at a time
    _, why = choice.choose(*program(networks.mlp, num_members=5), num_steps=10**9)
    assert why.why == "the rule, because memory is too small to time candidates"
    assert not why.step_secs


def experiment(**changes):
    values = {"num_members": 4, "steps": 8, "model": {"name": "mlp", "hidden_sizes": (16,)}}
    values |= {"execution": "auto", "data": {"global_batch_size": 32, "std": (16.0,)}}
    return Experiment.from_dict(values | changes)


def test_a_run_says_what_it_chose_and_keeps_it_when_it_goes_on(tmp_path, capsys):
    train(experiment(), tmp_path / "auto")
    assert "Execution vmap: nothing else is worth trying for" in capsys.readouterr().out
    summary = json.loads((tmp_path / "auto" / "summary.json").read_text())
    assert summary["execution"] == "vmap"
    train(experiment(execution="map"), tmp_path / "map")
    went_on = train(experiment(steps=16), tmp_path / "map")
    assert went_on.ensemble.execution == "map"
    assert "Execution" not in capsys.readouterr().out
    whole = train(experiment(steps=16, execution="map"), tmp_path / "whole")
    networks.assert_equal(went_on.state.params, whole.state.params)
    again = train(experiment(steps=16), tmp_path / "map")  # finished: scored as it was trained
    assert again.ensemble.execution == "map"


@pytest.mark.long
def test_a_run_that_begins_again_before_it_is_saved_has_what_was_chosen(
    tmp_path, monkeypatch, capsys
):
    def killed(*_):
        raise MemoryError

    monkeypatch.setattr(autotune, "PART_OF_THE_RUN", 1e9)
    with monkeypatch.context() as patch:
        patch.setattr("dist_ens.training.runner.MetricsReader.dispatched", killed)
        # On a machine where nothing is remembered.
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        for steps in (8, 16):
            with pytest.raises(MemoryError):
                train(experiment(steps=steps, steps_per_call=2), tmp_path / "run")
    begun = capsys.readouterr().out
    assert begun.count("the fastest of those tried") == 2  # of another length it is another run
    kept = json.loads((tmp_path / "run" / "executions.json").read_text())
    assert len(kept) == 2
    other = json.dumps(dict.fromkeys(kept, "vmap+single"))
    (tmp_path / "run" / "executions.json").write_text(other)
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


@pytest.mark.parametrize(
    ("num_members", "fastest", "on_one"),
    [(4, "vmap", "vmap"), *long((4, "vmap+single", "vmap"), (8, "map", "map"))],
    ids=["the rule's", "no candidate on one device", "another"],
)
def test_the_fastest_is_tried_on_one_core_too(cores, monkeypatch, num_members, fastest, on_one):
    time = autotune._Contest._time

    def timed(self, name, *others):
        time(self, name, *others)
        self.step_secs[name] = 1.0 if name == fastest else 2.0

    monkeypatch.setattr(autotune._Contest, "_time", timed)
    ensemble, state, batches = program(networks.mlp, num_members, devices=4)
    _, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    on_all = candidates(ensemble, state, batches)
    assert fastest in on_all
    assert [*why.step_secs] == [*on_all, f"{on_one} on one device"]


def test_one_core_has_candidates_of_its_own(cores, monkeypatch):
    tried = []

    def first(options, *_):
        tried.extend(options)
        return autotune.Timing("vmap", {"vmap": 1.0, "map": 2.0}, {}, True, 1.0)

    monkeypatch.setattr(autotune, "timed", first)
    choice.choose(*program(networks.mlp, 24, devices=8), num_steps=10**9)
    assert "unroll" in tried  # 3 copies of a step a core
    assert "unroll on one device" not in tried  # 24
    assert "chunk:12 on one device" in tried


def test_a_layout_that_somebody_says_is_kept(cores, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(autotune, "PART_OF_THE_RUN", 1e9)
    said = train(experiment(steps_per_call=2, layout={"ensemble_axis": 4}), tmp_path / "said")
    tried = capsys.readouterr().out
    assert "the fastest of those tried" in tried
    assert "on one device" not in tried
    assert said.ensemble.layout.mesh.size == 4


@pytest.mark.long
def test_a_run_goes_on_on_the_cores_it_began_with(cores, tmp_path):
    on_one = {"layout": {"ensemble_axis": 1}}
    train(experiment(**on_one), tmp_path / "parts")
    parts = train(experiment(steps=16), tmp_path / "parts")
    whole = train(experiment(steps=16, **on_one), tmp_path / "whole")
    assert parts.ensemble.layout.mesh.size == whole.ensemble.layout.mesh.size == 1
    networks.assert_equal(parts.state.params, whole.state.params)
    anew = train(experiment(), tmp_path / "anew")
    assert anew.ensemble.layout.mesh.size == 4


def raises(monkeypatch, name):
    """Lets the rule of a lowering raise an error."""

    def rule(*arrays, **params):
        raise NotImplementedError("this lowering has no such product\nand more lines")

    monkeypatch.setitem(LOWERINGS, name, dataclasses.replace(LOWERINGS[name], rule=rule))


def test_a_candidate_that_raises_is_left_out_and_said(monkeypatch):
    raises(monkeypatch, "flat")
    ensemble, state, batches = program(networks.transformer)
    names = candidates(ensemble, state, batches)
    assert names[0] == "vmap+flat"
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert chosen.execution == "vmap"
    assert [*why.step_secs] == ["vmap"] == [name for name in names if "+flat" not in name]
    assert why.why == "the only one that raised no error"
    error = "NotImplementedError: this lowering has no such product."
    assert why.failed == {name: error for name in names if "+flat" in name}
    assert f"Not used: vmap+flat raised {error}; " in str(why)
    chosen.update_steps(state, batches)  # the state was not used up


@pytest.mark.long
def test_where_all_candidates_raise_the_reference_is_taken(monkeypatch):
    raises(monkeypatch, "canonical")
    raises(monkeypatch, "patches")
    ensemble, state, batches = program(networks.convolutional, num_members=17)
    assert all("+" in name for name in candidates(ensemble, state, batches))
    chosen, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert chosen.execution == "loop"
    again, why = choice.choose(ensemble, state, batches, num_steps=10**9)
    assert (again.execution, why.step_secs) == ("loop", {})


def test_what_the_network_itself_raises_ends_the_choice(monkeypatch):
    def no_loss(*_):
        raise ZeroDivisionError("the loss divides by zero")

    ensemble, state, batches = program(networks.transformer)
    traced = ensemble.traced_update(state, batches)
    monkeypatch.setattr(Ensemble, "traced_update", lambda *_: traced)
    broken = ensemble.replace(loss=no_loss)
    with pytest.raises(ZeroDivisionError, match="the loss divides"):
        choice.choose(broken, state, batches, num_steps=10**9)
