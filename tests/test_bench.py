"""The command that times a config on the user's own machine."""

import json
import math
from functools import partial

import jax
import numpy as np
import pytest
from PIL import Image

from commands import python
from dist_ens.data import Spec
from dist_ens.experiment import DataConfig, Experiment, open_source
from dist_ens.experiment.bench import (
    DIST_ENS,
    LOOP,
    VMAP,
    LoopByHand,
    Updates,
    VmapByHand,
    bench,
    layouts_to_time,
    with_examples_that_fit,
)
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import UserError
from dist_ens.layout import Layout
from launch.bench import _conclusion, _curves, _ratio


def run_of(**values):
    """A run on the digits, and their source."""
    experiment = Experiment.from_dict({"steps": 3, **values})
    source = open_source(experiment.data)
    return Run(experiment, source.spec, source.num_train_examples), source


@pytest.mark.long
def test_a_config_is_timed_and_drawn(tmp_path):
    fields = "model.hidden_sizes=() num_members=1 steps_per_call=1 execution=vmap"
    flags = [f"--config.{field}" for field in fields.split()]
    files = [f"--plot={tmp_path / 'rates.png'}", f"--json={tmp_path / 'rates.json'}"]
    words = ["bench", "--config=configs/digits.py", *flags, "--turns=2", *files]
    short_turns = "from dist_ens.execution import timing; timing.TURN_SECS = 0.05; "
    ended = python("-c", f"{short_turns}import launch; launch.main()", *words)
    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((tmp_path / "rates.json").read_text())["sizes"]
    assert (point["num_members"], point["execution"]) == (1, "vmap")
    assert set(point["examples_per_second"]) == {DIST_ENS, LOOP, VMAP}
    assert {name: len(ratios) for name, ratios in point["ratios"].items()} == {LOOP: 2, VMAP: 2}
    assert "With 1 member, dist_ens" in ended.stdout or "too wide to conclude" in ended.stdout
    with Image.open(tmp_path / "rates.png") as picture:
        assert picture.size == (900, 600)


@pytest.mark.parametrize("examples", [pytest.param("shared", marks=pytest.mark.long), "permuted"])
def test_what_is_written_by_hand_trains_the_members_that_dist_ens_trains(examples):
    run, source = run_of(
        num_members=2,
        data={"global_batch_size": 32, "std": (16.0,), "examples": examples},
        model={"name": "mlp", "hidden_sizes": (8,)},
        optimizer={"name": "sgd", "learning_rate": 0.1},
    )
    layout = Layout.make(2, devices=jax.devices()[:4])
    ours = Updates(build_ensemble(run, layout), source, run.order, steps_per_call=2)
    loop = LoopByHand(build_ensemble(run, layout), source, run.order)
    vmap = VmapByHand(build_ensemble(run, layout), source, run.order)
    for way in (ours, loop, vmap):
        way.run(3)
    one_by_one = jax.tree.map(lambda *leaves: np.stack(leaves), *(s.params for s in loop.states))
    for params in (one_by_one, vmap.state.params):
        jax.tree.map(
            lambda theirs, mine: np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6),
            jax.device_get(params),
            jax.device_get(ours.state.params),
        )


@pytest.mark.parametrize(("rows", "sizes"), [(None, [1, 2, 4, 6]), (2, [2, 4, 6])])
def test_ensembles_of_1_2_4_members_are_timed_and_the_whole(rows, sizes):
    def timed(batch_size):
        values = {"num_members": 6, "steps": 1, "data": {"global_batch_size": batch_size}}
        experiment = Experiment.from_dict(values | {"layout": {"ensemble_axis": rows}})
        run = Run(experiment, Spec((8, 8), "float32", (), 10), 1000)
        return [layout.num_members for layout in layouts_to_time(run)]

    assert timed(16) == sizes
    # On eight devices one member leaves eight columns to the data, over which 12 examples do not
    # divide; two and six leave four, over which 6 do not: what was asked for is refused.
    assert timed(12) == [2, 4, 6]
    with pytest.raises(UserError, match=r"data\.global_batch_size=6 and a data axis of 4"):
        timed(6)


def test_of_a_set_that_does_not_fit_the_first_examples_are_timed(monkeypatch):
    source = open_source(DataConfig())
    layout = Layout.make(1, devices=jax.devices()[:1])
    assert with_examples_that_fit(source, layout) is source
    # 1,437 digits of 260 bytes; a sixteenth of 208,000 bytes holds 50 of them.
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: 208_000)
    first = with_examples_that_fit(source, layout).train
    assert len(first) == 50
    np.testing.assert_array_equal(
        first.take(np.arange(50))["inputs"], source.train.take(np.arange(50))["inputs"]
    )


IN_WAVES = {
    **{"execution": "vmap", "layout": {"waves": 2}},
    "model": {"name": "mlp", "hidden_sizes": ()},
}


def test_members_that_come_in_waves_are_not_held_at_once_to_be_timed(monkeypatch):
    run, source = run_of(num_members=4, **IN_WAVES)
    timed = []

    def of_no_time(ways, num_turns):
        timed.append([*ways])
        return {name: [1.0] * num_turns for name in ways}

    monkeypatch.setattr("dist_ens.experiment.bench.step_ms_of_turns", of_no_time)
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    make_ensemble = partial(build_ensemble, run)
    points = [bench(run, source, make_ensemble, each, 2) for each in layouts_to_time(run)]
    # On two devices one and two members are one a device, and no wave is smaller.
    assert timed == [[DIST_ENS, LOOP, VMAP], [DIST_ENS, LOOP, VMAP], [DIST_ENS, LOOP]]
    assert _conclusion(points[-1]).startswith(
        "With 4 members, dist_ens (vmap) is 1.00 (1.00 to 1.00) times as fast as a loop over them."
    )
    assert _ratio(points[-1], VMAP) == ""
    assert math.isnan(_curves(points)[1][VMAP][-1])


def test_the_loop_by_hand_holds_no_more_members_than_a_device_has_at_a_time():
    run, source = run_of(num_members=8, **IN_WAVES)
    ensemble = build_ensemble(run, Layout.make(8, devices=jax.devices()[:2]))
    loop = LoopByHand(ensemble, source, run.order)
    loop.run(3)
    # Four members a device, two at a time; each of those stands for four of eight.
    assert [int(state.step) for state in loop.states] == [12, 12]
