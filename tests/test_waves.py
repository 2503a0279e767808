"""Members trained wave after wave are what they are when they fit together."""

import gc
import json
import logging
import shutil

import jax
import numpy as np
import optax
import pytest

import dist_ens as de
import networks
from dist_ens.data import ArraySplit
from dist_ens.ensemble.update_steps import update_in_waves
from dist_ens.evaluation import Evaluator
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.layout import BATCHES, Layout, Waves, copied_off_devices
from marked import long
from test_train import compilations, experiment


def trained(network, waves, mesh=(2, 2), execution="vmap"):
    """State, metrics, scores and predictions of 8 members after three steps."""
    member, inputs, label_shape = network()
    layout, optimizer = networks.layout_on(mesh, 8), optax.sgd(0.1, momentum=0.9)
    ensemble = networks.ensemble_of(member, optimizer, layout, execution=execution, waves=waves)
    state = networks.begin(ensemble, inputs)
    batches = networks.batches_for(inputs, label_shape, 3)
    on_devices = layout.put(batches, BATCHES)
    with jax.transfer_guard("disallow"):
        state, metrics = ensemble.update_steps(state, on_devices)
    evaluator = Evaluator(ensemble, 8)
    split = ArraySplit(batches["inputs"][0], batches["labels"][0])
    scores = evaluator.evaluate(state, split).scores()
    predictions = evaluator.predict(state, split.inputs)
    return ensemble, state, (jax.device_get(metrics), scores.to_dict(), predictions)


@pytest.mark.parametrize(
    ("network", "mesh", "execution"),
    [(networks.dropout, (1, 2), "chunk:2"), *long((networks.mlp, (2, 1), "loop"))],
)
def test_members_in_waves_are_what_they_are_together(network, mesh, execution):
    _, together, of_together = trained(network, 1, mesh, execution)
    ensemble, state, of_waves = trained(network, 4, mesh, execution)
    assert state.member_id.tolist() == list(range(8))
    networks.assert_close((state, of_waves), (together, of_together))
    waiting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
    assert waiting == {"pinned_host"}
    abstract = ensemble.abstract_state({"inputs": network()[1]})
    found, told = (jax.tree.map(lambda leaf: leaf.sharding, each) for each in (state, abstract))
    assert found == told


def test_the_given_state_is_used_up_and_what_was_put_aside_is_not_written_to():
    ensemble, state, _ = trained(networks.mlp, 2)
    _, inputs, label_shape = networks.mlp()
    before = jax.tree.map(np.array, jax.device_get(state.params))
    first = Waves(ensemble.layout, 2).take(state, 0)
    batches = ensemble.layout.put(networks.batches_for(inputs, label_shape, 1), BATCHES)
    ensemble.of_wave.update_steps(first, batches)  # uses the wave up
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    ensemble.update_steps(state, batches)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_one_wave_at_a_time_is_on_the_devices():
    layout = Layout.make(8, ensemble_axis=2, devices=jax.devices()[:2])
    waves = Waves(layout, 4)
    state = copied_off_devices({"w": layout.put(np.zeros((8, 4096), np.float32), "members")})
    live = []

    def update(state, batches):
        gc.collect()
        live.append(sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "device"))
        return jax.tree.map(lambda leaf: leaf + 1, state), {}

    update_in_waves(waves, update)(state, {})
    wave_bytes = 2 * 4096 * 4
    assert len(live) == 4
    assert max(live) - live[0] < wave_bytes / 2


def small(**changes):
    sgd = {"name": "sgd", "learning_rate": 0.1}  # Adam's first steps magnify rounding
    own = {"examples": "permuted"}
    return experiment(num_members=16, optimizer=sgd, data=own, **changes)


def test_a_run_in_waves_is_the_run_without(tmp_path, caplog):
    def same_state(run):
        networks.assert_close(run.state, together.state)

    together = train(small(), tmp_path / "together")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        waves = train(small(layout={"waves": 2}), tmp_path / "waves")
    assert len(compilations(caplog.records)) == 1
    same_state(waves)
    scores = [
        json.loads((tmp_path / name / "summary.json").read_text())["members"]
        for name in ("waves", "together")
    ]
    assert scores[0] == [pytest.approx(member, abs=1e-5) for member in scores[1]]
    # Stopped and gone on with, the bits stay; and with another number of waves, the members.
    train(small(steps=8, layout={"waves": 2}), tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    parts = train(small(layout={"waves": 2}), tmp_path / "parts")
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(run.state.params) for run in (parts, waves)),
    )
    same_state(train(small(), tmp_path / "other"))
    finished = open_finished(tmp_path / "waves")
    assert finished.ensemble.waves == 2
    same_state(finished)


@pytest.mark.long
def test_a_given_state_is_trained_on_in_waves_as_at_once():
    random = np.random.default_rng(0)
    data = {"inputs": random.normal(size=(8, 3)), "labels": np.arange(8) % 2}
    options = {"batch_size": 4, "progress": False}
    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda p, x: x @ p["w"])
    layout = Layout.make(4, devices=jax.devices()[:2])
    in_waves = de.Ensemble(
        network, optax.sgd(0.1), de.losses.categorical(2), num_members=4, waves=2, layout=layout
    )
    first = de.fit(in_waves, data, steps=3, **options).state
    given = de.fit(in_waves, data, steps=6, state=first, **options).state
    expected = de.fit(in_waves.replace(waves=1), data, steps=6, **options).state
    assert given.params["w"].sharding.memory_kind == "pinned_host"
    assert first.step.tolist() == [3] * 4  # not used up
    np.testing.assert_allclose(given.params["w"], expected.params["w"], rtol=1e-6)
