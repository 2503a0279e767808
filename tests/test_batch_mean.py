"""`batch_mean` and `Ratio`: weighted means over the batch, and their gradients, on every mesh."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from batch_programs import normals
from dist_ens.ensemble.programs import step_of_one
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import EXAMPLES, INIT, member_key
from dist_ens.losses import Ratio, batch_mean
from marked import long
from networks import assert_close_to_scale, layout_on, member_of

STEPS, BATCH, LENGTH, VOCABULARY, SEED = 4, 8, 5, 7, 3
# Members, and the mesh of rows and columns.
CASES = [(1, (1, 4)), (2, (2, 2)), (3, (1, 2)), (4, (4, 1))]
LONG = [(1, (1, 1)), (2, (2, 1)), (4, (1, 4)), (8, (2, 2))]


def ragged_batches():
    """Returns token batches whose masks differ wildly between rows.

    Row `i` of step 0 has `i % 6` valid tokens. The second half of step 1 has none, so that one of
    two columns has none, and two of four. In step 2 the only valid token is in the last row.
    """
    random = np.random.default_rng(0)
    shape = (STEPS, BATCH, LENGTH)
    tokens = random.integers(0, VOCABULARY, shape).astype(np.int32)
    mask = (random.random(shape) < 0.5).astype(np.float32)
    mask[0] = np.arange(LENGTH) < (np.arange(BATCH) % 6)[:, None]
    mask[1, BATCH // 2 :] = 0
    mask[2] = 0
    mask[2, -1, 3] = 1
    return [
        {"tokens": t, "next": np.roll(t, -1, axis=1), "mask": m}
        for t, m in zip(tokens, mask, strict=True)
    ]


BATCHES = ragged_batches()


def init(key, batch):
    return normals(key, 0.5, embedding=(VOCABULARY, 6), head=(6, VOCABULARY)), ()


def nll_of_tokens(params, batch):
    logits = jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])


def loss_fn(params, model_state, batch, key):
    loss = batch_mean(nll_of_tokens(params, batch), weights=batch["mask"])
    return loss, (model_state, {"perplexity": jnp.exp(loss)})


def loss_as_ratio(params, model_state, batch, key):
    loss = batch_mean(nll_of_tokens(params, batch), batch["mask"], ratio=True)
    return loss, (model_state, {})


def ensemble_of(loss, num_members=2, mesh=(2, 2), **options):
    options |= {"num_members": num_members, "layout": layout_on(mesh, num_members), "seed": SEED}
    member, optimizer = de.as_member(init=init), optax.sgd(0.3, momentum=0.9)
    return de.Ensemble(member, optimizer, loss, **options)


def trained(ensemble, batches=None):
    state, metrics = ensemble.init(BATCHES[0]), []
    for batch in BATCHES if batches is None else batches:
        state, of_step = ensemble.update(state, batch)
        metrics.append(jax.device_get(of_step))
    return jax.device_get(state), metrics


@jax.jit
def step_by_hand(params, velocity, batch):
    """A step of SGD with momentum on the mean over the valid tokens of the whole batch."""

    def loss(params):
        return (nll_of_tokens(params, batch) * batch["mask"]).sum() / batch["mask"].sum()

    value, grads = jax.value_and_grad(loss)(params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - 0.3 * v, params, velocity), velocity, value


@functools.cache
def member_by_hand(member_id):
    """Returns a member's parameters, velocity and losses, trained alone on one device."""
    params, _ = init(jax.random.fold_in(member_key(SEED, member_id), INIT), None)
    velocity, losses = jax.tree.map(jnp.zeros_like, params), []
    for batch in BATCHES:
        params, velocity, loss = step_by_hand(params, velocity, batch)
        losses.append(float(loss))
    return SimpleNamespace(params=params, velocity=velocity, losses=losses)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("num_members", "mesh"), [*CASES, *long(*LONG)])
def test_members_are_trained_as_by_a_loop_on_one_device(num_members, mesh, microbatches):
    loss = loss_fn if microbatches == 1 else loss_as_ratio
    state, metrics = trained(ensemble_of(loss, num_members, mesh, microbatches=microbatches))
    for member_id in range(num_members):
        expected = member_by_hand(member_id)
        found = member_of((state.params, state.opt_state[0].trace), member_id)
        assert_close_to_scale(found, (expected.params, expected.velocity))
        losses = [of_step["loss"][member_id] for of_step in metrics]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
        if microbatches == 1:
            perplexities = [of_step["perplexity"][member_id] for of_step in metrics]
            np.testing.assert_allclose(perplexities, np.exp(expected.losses), rtol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_are_all_zero_give_no_loss_and_no_gradient(microbatches):
    ensemble = ensemble_of(loss_as_ratio, microbatches=microbatches)
    nothing = BATCHES[0] | {"mask": np.zeros((BATCH, LENGTH), np.float32)}
    before = jax.device_get(ensemble.init(BATCHES[0]))
    after, [metrics] = trained(ensemble, [nothing])
    assert metrics["loss"].tolist() == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    for leaf in jax.tree.leaves(after.opt_state):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def ratio_by_hand(values, weights):
    return Ratio((values * weights).sum(), weights.sum())


RATIOS = [jax.jit(functools.partial(batch_mean, ratio=True)), jax.jit(ratio_by_hand)]


@pytest.mark.parametrize(
    ("mean", "microbatches"),
    [
        (lambda values, mask: jnp.average(values, weights=mask), 1),
        (jax.jit(lambda values, mask: batch_mean(values, mask)), 1),
        (jax.checkpoint(lambda values, mask: batch_mean(values, mask)), 1),
        *itertools.product(RATIOS, (1, 2)),
    ],
)
def test_a_mean_however_it_is_written_is_that_of_the_whole_batch(mean, microbatches):
    def loss(params, model_state, batch, key):
        found = mean(nll_of_tokens(params, batch), batch["mask"])
        if isinstance(found, Ratio):
            return found, (model_state, {"double": found._replace(total=2 * found.total)})
        return found, (model_state, {"double": 2 * found})

    state, metrics = trained(ensemble_of(loss, microbatches=microbatches))
    expected = member_by_hand(1)
    assert_close_to_scale(member_of(state.params, 1), expected.params)
    doubled = [of_step["double"][1] for of_step in metrics]
    np.testing.assert_allclose(doubled, 2 * np.array(expected.losses), rtol=1e-5)


# A mean of four values, worked by hand.

VALUES = jnp.array([[1.0, 2.0], [3.0, 10.0]])


def test_it_is_the_plain_weighted_mean():
    # (1 + 2 + 3 + 10) / 4 = 4
    assert batch_mean(VALUES) == 4
    # (1 * 1 + 3 * 3) / (1 + 3) = 2.5
    assert batch_mean(VALUES, weights=jnp.array([[1, 0], [3, 0]])) == 2.5
    # Weights [batch] count both values of a row: (3 + 10) / 2 = 6.5
    assert batch_mean(VALUES, weights=jnp.array([False, True])) == 6.5
    assert batch_mean(VALUES, weights=jnp.zeros(2)) == 0
    assert batch_mean(VALUES, weights=jnp.array([False, True]), ratio=True) == (13, 2)
    # A sum of 2,501 ones in bfloat16 would be 2,496.
    ones = batch_mean(jnp.ones(2501, jnp.bfloat16), ratio=True)
    assert [float(part) for part in ones] == [2501, 2501]
    # Gradient: weights / sum of weights
    gradient = jax.grad(batch_mean)(VALUES, jnp.array([[1.0, 0.0], [3.0, 0.0]]))
    assert gradient.tolist() == [[0.25, 0], [0.75, 0]]
    assert jax.grad(batch_mean)(VALUES, jnp.zeros(2)).tolist() == [[0, 0], [0, 0]]


def test_an_axis_of_the_mesh_is_no_part_of_a_step():
    def loss(params, model_state, batch, key):
        return jax.lax.pmean(nll_of_tokens(params, batch).mean(), "data"), (model_state, {})

    ensemble = ensemble_of(loss)
    state = ensemble.init(BATCHES[0])
    named = "names an axis of the devices: Found an unbound axis name: data. A step is written"
    with pytest.raises(UserError, match=named):
        ensemble.update(state, BATCHES[0])
    step = de.lift(lambda x: jax.lax.psum(x, "data"), layout=ensemble.layout, in_specs=("members",))
    with pytest.raises(UserError, match=named):
        step(np.ones(2, np.float32))
    with pytest.raises(UserError, match=named):  # The record of a run is made without a mesh.
        jax.eval_shape(step_of_one(ensemble), member_of(state, 0), BATCHES[0])


@pytest.mark.parametrize(("microbatches", "ratio"), [(1, False), (1, True), (2, True)])
def test_adversarial_training_takes_weights(microbatches, ratio):
    def loss(params, model_state, batch, key):
        values = jnp.square(jnp.tanh(batch["inputs"] @ params["w"]) - 1)
        return batch_mean(values, batch["weights"], ratio=ratio), (model_state, {})

    member = de.as_member(init=lambda key, batch: ({"w": jnp.array([0.5, -1.0, 2.0])}, ()))
    batch = {
        "inputs": np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32),
        "weights": np.array([1, 0, 0, 0, 2, 3, 1, 1], np.float32),
    }
    options = {"methods": [de.methods.adversarial(0.1)], "microbatches": microbatches}
    options |= {"num_members": 2, "layout": layout_on((2, 2), 2)}
    ensemble = de.Ensemble(member, optax.sgd(1.0), loss, **options)
    state = ensemble.init(batch)

    def by_hand(w):
        def values(x):
            return jnp.square(jnp.tanh(x @ w) - 1)

        sign = jnp.sign(jax.grad(lambda x: values(x).sum())(batch["inputs"]))
        # Of an example of weight 0 the gradient is 0, and so is its sign: it does not count.
        worse = jax.lax.stop_gradient(batch["inputs"] + 0.1 * sign)
        weights = batch["weights"] / 8
        return (weights @ values(batch["inputs"]) + weights @ values(worse)) / 2

    value, gradient = jax.value_and_grad(by_hand)(state.params["w"][0])
    expected = state.params["w"][0] - gradient
    state, metrics = ensemble.update(state, batch)
    np.testing.assert_allclose(metrics["loss"], [value, value], rtol=1e-5)
    np.testing.assert_allclose(state.params["w"][1], expected, rtol=1e-5)


@pytest.mark.parametrize("ratio", [False, *long(True)])
def test_a_loss_counts_the_examples_as_bootstrap_drew_them(ratio):
    def loss(params, model_state, batch, key, counts):
        nll = counts[:, None] * nll_of_tokens(params, batch)
        return batch_mean(nll, batch["mask"], ratio=ratio), (model_state, {})

    data = {name: np.concatenate([b[name] for b in BATCHES]) for name in BATCHES[0]}
    ensemble = ensemble_of(loss, methods=[de.methods.bootstrap()], execution="vmap")
    found = de.fit(ensemble, data, steps=1, batch_size=4 * BATCH, progress=False).state

    params, _ = init(jax.random.fold_in(member_key(SEED, 1), INIT), None)
    drawn = jax.random.fold_in(member_key(SEED, 1), EXAMPLES)
    counts = de.methods.poisson_weight(drawn, jnp.arange(4 * BATCH))

    def by_hand(params):
        return (counts @ (nll_of_tokens(params, data) * data["mask"])).sum() / data["mask"].sum()

    expected = jax.tree.map(lambda p, g: p - 0.3 * g, params, jax.grad(by_hand)(params))
    assert_close_to_scale(member_of(found.params, 1), expected)
