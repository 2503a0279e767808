"""Members trained wave after wave are what they are when they fit together."""

import gc
import json
import logging
import shutil

import jax
import jax.numpy as jnp
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
from test_feed import calls_of
from test_train import compilations, experiment

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def trained(network, waves, mesh=(2, 2), execution="vmap"):
    """State, metrics, scores and predictions of 8 members after three steps."""
    member, inputs, label_shape = network()
    rows, columns = mesh
    layout = Layout.make(8, ensemble_axis=rows, devices=jax.devices()[: rows * columns])
    optimizer = optax.sgd(0.1, momentum=0.9)
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


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jax.dtypes.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, **TOLERANCE)
        else:
            assert (x == y).all()


@pytest.mark.parametrize(
    ("network", "mesh", "execution", "waves"),
    [
        (networks.mlp, (2, 1), "loop", 4),
        (networks.dropout, (1, 2), "chunk:2", 4),
    ],
)
def test_members_in_waves_are_what_they_are_together(network, mesh, execution, waves):
    _, together, of_together = trained(network, 1, mesh, execution)
    ensemble, state, of_waves = trained(network, waves, mesh, execution)
    assert state.member_id.tolist() == list(range(8))
    assert_same(state, together)
    assert_same(of_waves, of_together)
    waiting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
    assert waiting == {"pinned_host"}
    abstract = ensemble.abstract_state({"inputs": network()[1]})
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, abstract
    )


def test_the_given_state_is_used_up_and_what_was_put_aside_is_not_written_to():
    ensemble, state, _ = trained(networks.mlp, 2)
    _, inputs, label_shape = networks.mlp()
    before = jax.tree.map(np.array, jax.device_get(state.params))
    first = Waves(ensemble.layout, 2).take(state, 0)
    batches = networks.batches_for(inputs, label_shape, 1)
    batches = ensemble.layout.put(batches, BATCHES)
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


def test_members_in_waves_draw_batches_of_their_own():
    def params(waves):
        member, inputs, _ = networks.mlp()
        layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:2])
        ensemble = networks.ensemble_of(member, optax.sgd(0.1), layout, waves=waves)
        state = networks.begin(ensemble, inputs)
        for batches in calls_of(ArraySplit, layout, per_member=True):
            state, _ = ensemble.update_steps(state, batches)
        return jax.device_get(state.params)

    assert_same(params(1), params(2))


def small(**changes):
    sgd = {"name": "sgd", "learning_rate": 0.1}  # Adam's first steps magnify rounding
    return experiment(num_members=16, optimizer=sgd, **changes)


def test_a_run_in_waves_is_the_run_without(tmp_path, caplog):
    def same_state(run):
        assert_same(*(jax.device_get(each.state) for each in (run, together)))

    together = train(small(), tmp_path / "together")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        waves = train(small(layout={"waves": 2}), tmp_path / "waves")
    assert len(compilations(caplog.records)) == 1
    same_state(waves)
    summaries = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("waves", "together")
    ]
    for a, b in zip(*(summary["members"] for summary in summaries), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
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


def linear(waves, loss=None):
    """An ensemble of four linear members on two devices."""
    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda p, x: x @ p["w"])
    layout = de.Layout.make(4, devices=jax.devices()[:2])
    objective = loss or de.losses.categorical(2)
    return de.Ensemble(
        network, optax.sgd(0.1), objective, num_members=4, waves=waves, layout=layout
    )


def test_a_loss_function_is_scored_in_waves_as_at_once():
    def loss(params, model_state, batch, key):
        error = jnp.square((batch["inputs"] @ params["w"]).sum(-1) - batch["labels"])
        return error.mean(), (model_state, {"largest": error.max()})

    def scores(waves):
        ensemble = linear(waves, loss)
        return de.evaluate(ensemble, ensemble.init(data), data).members

    data = {"inputs": np.ones((8, 3), np.float32), "labels": np.arange(8, dtype=np.float32)}
    expected = scores(1)
    assert set(expected[0]) == {"member_id", "loss", "largest"}
    assert scores(2) == [pytest.approx(member) for member in expected]


def test_a_given_state_is_trained_on_in_waves_as_at_once():
    random = np.random.default_rng(0)
    data = {"inputs": random.normal(size=(8, 3)), "labels": np.arange(8) % 2}
    options = {"batch_size": 4, "progress": False}
    first = de.fit(linear(2), data, steps=3, **options).state
    given = de.fit(linear(2), data, steps=6, state=first, **options).state
    expected = de.fit(linear(1), data, steps=6, **options).state
    assert given.params["w"].sharding.memory_kind == "pinned_host"
    assert first.step.tolist() == [3] * 4  # not used up
    np.testing.assert_allclose(given.params["w"], expected.params["w"], rtol=1e-6)
