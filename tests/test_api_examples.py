"""The examples of the Python API reach their scores, and equal loops over members by hand."""

import importlib.util
import itertools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.experiment import Experiment
from dist_ens.experiment.train import train
from dist_ens.sampling import Order

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SGD = optax.sgd(0.1, momentum=0.9)
NUM_MEMBERS, STEPS, BATCH_SIZE = 2, 3, 16


@pytest.fixture(autouse=True)
def _rank_promotion_is_allowed():
    # The examples are written as users write, who add a bias to a batch.
    with jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def layout():
    """Two rows of the mesh for the members, and two columns for the data."""
    return de.Layout.make(NUM_MEMBERS, devices=jax.devices()[:4])


# --- their scores ---


def test_arrays_become_predictions_with_uncertainty():
    example = load("arrays_to_uncertainty")
    assert example.scores.ensemble["accuracy"] > 0.9
    p = example.p
    assert p.members.shape == (8, 497, 10)
    assert p.mean.shape == (497, 10)
    np.testing.assert_allclose(p.aleatoric + p.epistemic, p.total, atol=1e-5)
    assert 0 <= p.total.min() < 0.1 < p.total.max() <= np.log(10)


def test_an_own_loss_is_trained_and_resumed():
    result = load("own_loss").main()
    # A word is one of four, then certain: with a mean length of 5.5 characters the perplexity is
    # exp(ln(4) / 5.5) = 1.29. Documents that begin within a word, and dropout, add to it.
    assert 1.2 < result.history[-1]["train/perplexity"] < 2
    np.testing.assert_array_equal(result.state.step, [120] * 4)


def test_an_own_loop_trains_64_members():
    assert load("own_loop").main() > 0.95


def test_regression_is_less_sure_where_it_saw_no_data():
    shown = load("regression").main()
    # Noise of standard deviation 3 has an entropy of log(3) + log(2 pi e) / 2 = 2.52 nats.
    assert 2.3 < shown["scores"].ensemble["nll"] < 2.8
    assert shown["prediction"].std[2] > 2 * shown["prediction"].std[1]
    np.testing.assert_allclose(shown["prediction"].mean[:2], [0, 27], atol=2)


def test_a_finished_run_of_python_is_loaded():
    shown = load("finished_run").main()
    assert shown["scores"].ensemble["accuracy"] > 0.9
    assert len(shown["networks"]) == shown["run"].ensemble.num_members == 4


def test_a_finished_run_of_the_command_line_is_loaded(tmp_path):
    experiment = {
        "num_members": 2,
        "steps": 100,
        "model": {"name": "mlp", "hidden_sizes": (32,)},
        "optimizer": {"learning_rate": 1e-2},
    }
    train(Experiment.from_dict(experiment), tmp_path)
    shown = load("finished_run").main(tmp_path)
    assert shown["run"].step == 100
    assert shown["scores"].ensemble["accuracy"] > 0.85
    np.testing.assert_allclose(shown["prediction"].mean.sum(axis=1), 1, atol=1e-5)


def test_a_committee_learns_forces():
    assert load("force_field").main() < 0.3


def test_a_q_ensemble_drives_its_carts_to_the_goal():
    distances = load("q_ensemble").main()
    assert distances.shape == (8, 2000)
    assert distances[:, -400:].mean(axis=1).max() < 0.35


def test_gans_learn_a_ring():
    shown = load("gan")
    before, after = (each.mean_member["loss"] for each in (shown.before, shown.result.scores))
    assert after < before / 5


def test_a_masked_language_model_finds_masked_tokens():
    assert load("masked_lm").main().mean_member["accuracy"] > 0.8


def test_an_equinox_network_keeps_its_state():
    shown = load("equinox_state").main()
    assert shown["scores"].ensemble["accuracy"] > 0.9
    # The running statistics have moved from their beginning, and differ between members.
    moved = [leaf for leaf in jax.tree.leaves(shown["model_state"]) if leaf.shape == (4, 64)]
    assert moved
    assert all(np.abs(leaf[0] - leaf[1]).max() > 1e-3 for leaf in moved)


def test_a_prediction_with_uncertainty_takes_ten_lines():
    text = (EXAMPLES / "arrays_to_uncertainty.py").read_text()
    begin, end = text.index("\nimport "), text.index("p = ensemble.predict")
    assert len([line for line in text[begin:end].splitlines() if line]) + 1 <= 10


# --- the loop over members by hand ---


def key_of(member_id):
    return jax.random.fold_in(jax.random.key(0), member_id)


def batches_of(data):
    """The batches of arrays, in the order of `fit`."""
    order = Order(len(jax.tree.leaves(data)[0]), BATCH_SIZE)
    indices = order.indices(order.cursor(0, range(STEPS)), np.arange(BATCH_SIZE))
    return [
        jax.tree.map(lambda leaf: np.asarray(leaf)[rows], data)  # noqa: B023
        for rows in indices
    ]


def by_hand(init, loss, batches, optimizer=SGD):
    """Trains one member after another on one device.

    `loss(params, model_state, batch, key)` returns the loss and the new model state.
    """

    @jax.jit
    def step(params, model_state, opt_state, batch, key):
        grads, model_state = jax.grad(loss, has_aux=True)(params, model_state, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state

    members = []
    for member_id in range(NUM_MEMBERS):
        key = key_of(member_id)
        params, model_state = jax.jit(init)(jax.random.fold_in(key, 0), batches[0])
        opt_state = optimizer.init(params)
        for number, batch in enumerate(batches):
            of_step = jax.random.fold_in(jax.random.fold_in(key, 1), number)
            params, model_state, opt_state = step(params, model_state, opt_state, batch, of_step)
        members.append((params, model_state))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *members)


def fitted(member, loss, data, layout, optimizer=SGD, **options):
    ensemble = de.Ensemble(
        member, optimizer, loss, num_members=NUM_MEMBERS, layout=layout, execution="vmap"
    )
    return de.fit(ensemble, data, steps=STEPS, steps_per_call=1, progress=False, **options)


def assert_same(found, expected):
    """Within 1e-5 of each leaf's largest value.

    A value whose gradient is zero in exact arithmetic, such as the bias of attention's keys, is
    rounding alone; so what is below 1e-3 counts as 1e-3.
    """
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(other).max()), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def test_own_loss_is_a_loop_over_members(layout):
    example = load("own_loss")
    member = de.as_member(init=example.init)
    result = fitted(member, example.loss_fn, example.loader, layout)
    model = example.Model()

    def loss(params, model_state, batch, key):
        inputs = batch["tokens"], batch["segments"]
        logits = model.apply(params, *inputs, True, rngs={"dropout": key})
        nll, mask = cross_entropy(logits, batch["next"]), batch["mask"]
        return (nll * mask).sum() / mask.sum(), ()

    batches = list(itertools.islice(example.loader(), STEPS))
    assert not batches[0]["mask"].all()
    params, _ = by_hand(example.init, loss, batches)
    assert_same(result.state.params, params)


def test_own_loop_is_a_loop_over_members(layout, monkeypatch):
    example = load("own_loop")
    monkeypatch.setattr(example, "optimizer", SGD)
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(16, 2)).astype("f"), "y": rng.integers(2, size=16)} for _ in range(3)
    ]
    keys = jax.random.split(jax.random.key(1), 3)
    members = layout.init(example.init_of_one_member, jax.random.key(0))
    specs = ("members", "batch", "shared")
    step = de.lift(example.step_of_one_member, layout=layout, in_specs=specs, donate_argnums=0)
    for batch, key in zip(batches, keys, strict=True):
        members, _ = step(members, layout.put(batch), key)

    @jax.jit
    def step_by_hand(params, opt_state, batch, key):
        x = batch["x"] + 0.1 * jax.random.normal(key, (2,))
        grads = jax.grad(lambda p: cross_entropy(example.logits_of(p, x), batch["y"]).mean())
        updates, opt_state = SGD.update(grads(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for member_id, member in enumerate(de.unstack_members(members)):
        by_hand, opt_state = example.init_of_one_member(jax.random.fold_in(key_of(member_id), 0))
        for batch, key in zip(batches, keys, strict=True):
            by_hand, opt_state = step_by_hand(by_hand, opt_state, batch, key)
        assert_same(member, (by_hand, opt_state))


def test_regression_is_a_loop_over_members(layout):
    example = load("regression")
    x, y = example.cubic(50, seed=0)
    data = {"inputs": x.astype("f"), "labels": y.astype("f")}
    loss = de.losses.gaussian(standardize=True)
    result = fitted(example.MLP(out=2), loss, data, layout, batch_size=BATCH_SIZE)
    mean, std = float(np.mean(data["labels"])), float(np.std(data["labels"]))

    def loss_by_hand(params, model_state, batch, key):
        outputs = example.MLP(out=2).apply(params, batch["inputs"])
        variance = jax.nn.softplus(outputs[:, 1]) + 1e-6
        squared = ((batch["labels"] - mean) / std - outputs[:, 0]) ** 2
        return (0.5 * (jnp.log(2 * jnp.pi * variance) + squared / variance)).mean(), ()

    def init(key, batch):
        return example.MLP(out=2).init(key, batch["inputs"]), ()

    params, _ = by_hand(init, loss_by_hand, batches_of(data))
    assert_same(result.state.params, params["params"])


def test_a_finished_run_is_a_loop_over_members(layout, tmp_path):
    example = load("finished_run")
    rng = np.random.default_rng(0)
    data = {"inputs": rng.normal(size=(50, 8, 8)).astype("f"), "labels": rng.integers(10, size=50)}
    options = {"batch_size": BATCH_SIZE, "checkpoints": de.Checkpoints(tmp_path)}
    result = fitted(example.MLP(), de.losses.categorical(10), data, layout, **options)
    run = de.load(tmp_path, ensemble=result.ensemble)

    def loss(params, model_state, batch, key):
        logits = example.MLP().apply(params, batch["inputs"])
        return cross_entropy(logits, batch["labels"]).mean(), ()

    def init(key, batch):
        return example.MLP().init(key, batch["inputs"]), ()

    params, _ = by_hand(init, loss, batches_of(data))
    assert_same(run.state.params, params["params"])
    for params, probs in zip(
        de.unstack_members(run.state.params), run.predict(data["inputs"]).members, strict=True
    ):
        logits = example.MLP().apply({"params": jax.device_get(params)}, data["inputs"])
        np.testing.assert_allclose(jax.nn.softmax(logits), probs, atol=1e-5)


def test_a_force_field_is_a_loop_over_members(layout):
    example = load("force_field")
    data, member = example.clusters(50, seed=0), (example.init, example.apply)
    optimizer = optax.sgd(1e-4, momentum=0.9)  # with more the forces of the first steps diverge
    result = fitted(member, example.loss_fn, data, layout, optimizer, batch_size=BATCH_SIZE)

    def loss(params, model_state, batch, key):
        energies, slopes = jax.vmap(jax.value_and_grad(example.energy, 1), (None, 0, 0))(
            params, batch["positions"], batch["mask"]
        )
        of_atoms = ((-slopes - batch["forces"]) ** 2).sum(axis=-1)
        of_forces = (of_atoms * batch["mask"]).sum() / batch["mask"].sum()
        return ((energies - batch["energies"]) ** 2).mean() + 10 * of_forces, ()

    batches = batches_of(data)
    params, _ = by_hand(example.init, loss, batches, optimizer)
    assert_same(result.state.params, params)


def test_forces_are_minus_the_slope_of_the_energy_and_none_act_on_padding():
    example = load("force_field")
    # Two atoms at distance r = 1.5: the force along x is 4 * (12 r^-13 - 6 r^-7) on the second.
    positions = np.array([[[0, 0, 0], [1.5, 0, 0], [0.1, 0.1, 0.1]]], "f")
    batch = {"positions": positions, "mask": np.array([[1, 1, 0]], "f")}
    found, _ = example.apply(None, (), batch, None, False)
    force = 4 * (12 * 1.5**-13 - 6 * 1.5**-7)
    expected = [[[-force, 0, 0], [force, 0, 0], [0, 0, 0]]]
    np.testing.assert_allclose(found["forces"], expected, atol=1e-5)
    np.testing.assert_allclose(found["energies"], [4 * (1.5**-12 - 1.5**-6)], atol=1e-5)


def test_a_q_ensemble_is_a_loop_over_members(layout, monkeypatch):
    example = load("q_ensemble")
    monkeypatch.setattr(example, "TIMES", jnp.arange(20))
    monkeypatch.setattr(example, "optimizer", SGD)
    agents = layout.init(example.init, jax.random.key(0))
    learn = de.lift(
        lambda agent: jax.lax.scan(example.step, agent, example.TIMES),
        layout=layout,
        in_specs=("members",),
    )
    agents, distances = learn(agents)

    learn_by_hand = jax.jit(lambda agent: jax.lax.scan(example.step, agent, example.TIMES))
    for member_id in range(NUM_MEMBERS):
        agent, distance = learn_by_hand(example.init(jax.random.fold_in(key_of(member_id), 0)))
        found = jax.tree.map(lambda leaf: leaf[member_id], (agents[:4], distances))  # noqa: B023
        assert_same(found, (agent[:4], distance))


def test_a_masked_language_model_is_a_loop_over_members(layout):
    example = load("masked_lm")
    data = example.sentences(50, seed=0)
    member = de.as_member(init=example.init)
    result = fitted(member, example.loss_fn, data, layout, batch_size=BATCH_SIZE)

    def loss(params, model_state, batch, key):
        is_masked = jax.random.bernoulli(key, 0.2, batch["tokens"].shape)
        tokens = jnp.where(is_masked, example.MASK, batch["tokens"])
        logits = example.Encoder().apply(params, tokens, batch["segments"])
        nll = cross_entropy(logits, batch["tokens"])
        return (nll * is_masked).sum() / is_masked.sum(), ()

    params, _ = by_hand(example.init, loss, batches_of(data))
    assert_same(result.state.params, params)


def test_an_equinox_network_is_a_loop_over_members(layout):
    example = load("equinox_state")
    rng = np.random.default_rng(0)
    data = {"inputs": rng.normal(size=(50, 64)).astype("f"), "labels": rng.integers(10, size=50)}
    member = de.as_member(lambda key: example.Network(key))
    result = fitted(member, de.losses.categorical(10), data, layout, batch_size=BATCH_SIZE)

    def make(key):
        return eqx.nn.make_with_state(example.Network)(key)

    def init(key, batch):
        network, state = make(key)
        return eqx.filter(network, eqx.is_inexact_array), state

    static = eqx.filter(make(jax.random.key(0))[0], eqx.is_inexact_array, inverse=True)

    def loss(params, state, batch, key):
        of_batch = jax.vmap(
            eqx.combine(params, static), in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )
        logits, state = of_batch(batch["inputs"], state)
        return cross_entropy(logits, batch["labels"]).mean(), state

    params, state = by_hand(init, loss, batches_of(data))
    assert_same(result.state.params, params)
    assert_same(result.state.model_state, state)
