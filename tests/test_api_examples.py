"""The examples of the Python API reach their scores, and equal loops over members by hand."""

import importlib.util
import itertools
import pathlib

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
NUM_MEMBERS, STEPS, BATCH_SIZE = 2, 3, 16
LONG = pytest.mark.long


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


# --- their scores ---


def test_arrays_become_predictions_with_uncertainty():
    example = load("arrays_to_uncertainty")
    assert example.scores.ensemble["accuracy"] > 0.9
    p = example.p
    assert p.members.shape == (8, 497, 10)
    assert p.mean.shape == (497, 10)
    np.testing.assert_allclose(p.aleatoric + p.epistemic, p.total, atol=1e-5)
    assert 0 <= p.total.min() < 0.1 < p.total.max() <= np.log(10)
    # A prediction with its uncertainty takes ten lines.
    text = (EXAMPLES / "arrays_to_uncertainty.py").read_text()
    shown = text[text.index("\nimport ") : text.index("p = ensemble.predict")]
    assert len([line for line in shown.splitlines() if line]) + 1 <= 10


@LONG
def test_an_own_loss_is_trained_and_resumed():
    result = load("own_loss").main()
    # A word is one of four, then certain: with a mean length of 5.5 characters the perplexity is
    # exp(ln(4) / 5.5) = 1.29. Documents that begin within a word, and dropout, add to it.
    assert 1.2 < result.history[-1]["train/perplexity"] < 2
    np.testing.assert_array_equal(result.state.step, [120] * 4)


@LONG
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


@LONG
def test_a_finished_run_of_the_command_line_is_loaded(tmp_path):
    experiment = {"num_members": 2, "steps": 100, "optimizer": {"learning_rate": 1e-2}}
    experiment["model"] = {"name": "mlp", "hidden_sizes": (32,)}
    train(Experiment.from_dict(experiment), tmp_path)
    shown = load("finished_run").main(tmp_path)
    assert shown["run"].step == 100
    assert shown["scores"].ensemble["accuracy"] > 0.85
    np.testing.assert_allclose(shown["prediction"].mean.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_reached"),
    [
        pytest.param("own_loop", lambda accuracy: accuracy > 0.95, marks=LONG),
        pytest.param("force_field", lambda error: error < 0.3, marks=LONG),
        pytest.param("masked_lm", lambda s: s.mean_member["accuracy"] > 0.8, marks=LONG),
    ],
)
def test_an_example_reaches_its_score(name, is_reached):
    assert is_reached(load(name).main())


@LONG
def test_a_q_ensemble_drives_its_carts_to_the_goal():
    distances = load("q_ensemble").main()
    assert distances.shape == (8, 2000)
    assert distances[:, -400:].mean(axis=1).max() < 0.35


@LONG
def test_gans_learn_a_ring():
    shown = load("gan")
    before, after = (each.mean_member["loss"] for each in (shown.before, shown.result.scores))
    assert after < before / 5


@LONG
def test_an_equinox_network_keeps_its_state():
    shown = load("equinox_state").main()
    assert shown["scores"].ensemble["accuracy"] > 0.9
    # The running statistics have moved from their beginning, and differ between members.
    moved = [leaf for leaf in jax.tree.leaves(shown["model_state"]) if leaf.shape == (4, 64)]
    assert moved
    assert all(np.abs(leaf[0] - leaf[1]).max() > 1e-3 for leaf in moved)


# --- the loop over members by hand ---


def batches_of(data):
    """The batches of an iterable, or those of arrays in the order of `fit`."""
    if callable(data):
        return list(itertools.islice(data(), STEPS))
    order = Order(len(jax.tree.leaves(data)[0]), BATCH_SIZE)
    indices = order.indices(order.cursor(0, range(STEPS)), np.arange(BATCH_SIZE))
    return [jax.tree.map(lambda leaf, at=rows: np.asarray(leaf)[at], data) for rows in indices]


def by_hand(init, loss, batches, optimizer):
    """Trains one member after another on one device, and returns their parameters."""

    @jax.jit
    def step(params, opt_state, batch, key):
        grads = jax.grad(loss)(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    members = []
    for member_id in range(NUM_MEMBERS):
        key = jax.random.fold_in(jax.random.key(0), member_id)
        params, _ = jax.jit(init)(jax.random.fold_in(key, 0), batches[0])
        opt_state = optimizer.init(params)
        for number, batch in enumerate(batches):
            of_step = jax.random.fold_in(jax.random.fold_in(key, 1), number)
            params, opt_state = step(params, opt_state, batch, of_step)
        members.append(params)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *members)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# Of an example: its data, network and loss, and how a member of it is made and what it loses.


def own_loss(example):
    def loss(params, batch, key):
        inputs = batch["tokens"], batch["segments"]
        logits = example.Model().apply(params, *inputs, True, rngs={"dropout": key})
        nll, mask = cross_entropy(logits, batch["next"]), batch["mask"]
        return (nll * mask).sum() / mask.sum()

    assert not next(iter(example.loader()))["mask"].all()
    return example.loader, de.as_member(init=example.init), example.loss_fn, example.init, loss


def regression(example):
    x, y = example.cubic(50, seed=0)
    data = {"inputs": x.astype("f"), "labels": y.astype("f")}
    mean, std = float(np.mean(data["labels"])), float(np.std(data["labels"]))
    network = example.MLP(out=2)

    def loss(params, batch, key):
        outputs = network.apply(params, batch["inputs"])
        variance = jax.nn.softplus(outputs[:, 1]) + 1e-6
        squared = ((batch["labels"] - mean) / std - outputs[:, 0]) ** 2
        return (0.5 * (jnp.log(2 * jnp.pi * variance) + squared / variance)).mean()

    def init(key, batch):
        return network.init(key, batch["inputs"]), ()

    return data, network, de.losses.gaussian(standardize=True), init, loss


@pytest.mark.parametrize("parts_of", [regression, pytest.param(own_loss, marks=LONG)])
def test_an_example_is_a_loop_over_members(parts_of):
    data, network, loss, init, loss_by_hand = parts_of(load(parts_of.__name__))
    optimizer = optax.sgd(0.1, momentum=0.9)
    # Two rows of the mesh are for the members, and two columns for the data.
    layout = de.Layout.make(NUM_MEMBERS, devices=jax.devices()[:4])
    how = {"num_members": NUM_MEMBERS, "layout": layout, "execution": "vmap"}
    ensemble = de.Ensemble(network, optimizer, loss, **how)
    options = {} if callable(data) else {"batch_size": BATCH_SIZE}
    result = de.fit(ensemble, data, steps=STEPS, steps_per_call=1, progress=False, **options)
    found = jax.tree.leaves(result.state.params)
    expected = jax.tree.leaves(by_hand(init, loss_by_hand, batches_of(data), optimizer))
    for one, other in zip(found, expected, strict=True):
        # A value whose gradient is zero in exact arithmetic, such as the bias of attention's keys,
        # is rounding alone. So what is below 1e-3 counts as 1e-3.
        scale = max(float(np.abs(other).max()), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


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
