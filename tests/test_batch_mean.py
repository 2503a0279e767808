"""`batch_mean`: the mean over the global batch, and its gradient, on every mesh."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.errors import UserError
from dist_ens.layout import DATA
from dist_ens.losses import Ratio, batch_mean, data_mean
from dist_ens.randomness import INIT, member_key

STEPS, BATCH, LENGTH, VOCABULARY, SEED = 4, 8, 5, 7, 3
MESHES = [(1, 1), (2, 1), (4, 1), (2, 2), (1, 2), (1, 4)]
CASES = [(count, mesh) for count in (1, 2, 3, 4, 8) for mesh in MESHES if count % mesh[0] == 0]


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
    keys = jax.random.split(key, 2)
    shapes = {"embedding": (VOCABULARY, 6), "head": (6, VOCABULARY)}
    return {
        name: 0.5 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }, ()


def nll_of_tokens(params, batch):
    logits = jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])


def loss_fn(params, model_state, batch, key):
    loss = batch_mean(nll_of_tokens(params, batch), weights=batch["mask"])
    return loss, (model_state, {"perplexity": jnp.exp(loss)})


def ensemble_of(loss, num_members=2, mesh=(2, 2), **options):
    rows, columns = mesh
    layout = de.Layout.make(
        num_members, ensemble_axis=rows, devices=jax.devices()[: rows * columns]
    )
    return de.Ensemble(
        de.as_member(init=init),
        optax.sgd(0.3, momentum=0.9),
        loss,
        num_members=num_members,
        seed=SEED,
        layout=layout,
        **options,
    )


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


def assert_close(found, expected):
    """Compares leaves to 1e-5 of each leaf's largest value."""
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=1e-5 * np.abs(leaf).max())


def test_the_masks_leave_a_column_without_a_valid_token():
    masks = np.stack([batch["mask"] for batch in BATCHES])
    per_column = masks.reshape(STEPS, 2, -1).sum(axis=2)
    assert (per_column == 0).any(axis=1).tolist() == [False, True, True, False]
    assert masks[2].sum() == 1


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("num_members", "mesh"), CASES, ids=str)
def test_members_are_trained_as_by_a_loop_on_one_device(num_members, mesh, microbatches):
    ensemble = ensemble_of(loss_fn, num_members, mesh, microbatches=microbatches)
    state, metrics = trained(ensemble)
    for member_id in range(num_members):
        expected = member_by_hand(member_id)
        of_member = jax.tree.map(lambda leaf, i=member_id: leaf[i], state)
        assert_close(of_member.params, expected.params)
        assert_close(of_member.opt_state[0].trace, expected.velocity)
        losses = [of_step["loss"][member_id] for of_step in metrics]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
        if microbatches == 1:
            perplexities = [of_step["perplexity"][member_id] for of_step in metrics]
            np.testing.assert_allclose(perplexities, np.exp(expected.losses), rtol=1e-5)
        assert all(of_step["zero_weights"][member_id] == 0 for of_step in metrics)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_are_all_zero_give_no_loss_and_no_gradient(microbatches):
    ensemble = ensemble_of(loss_fn, microbatches=microbatches)
    nothing = BATCHES[0] | {"mask": np.zeros((BATCH, LENGTH), np.float32)}
    before = jax.device_get(ensemble.init(BATCHES[0]))
    after, [metrics] = trained(ensemble, [nothing])
    assert metrics["loss"].tolist() == [0, 0]
    assert metrics["zero_weights"].tolist() == [1, 1]
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    for leaf in jax.tree.leaves(after.opt_state):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_a_jitted_loss_is_the_same_loss():
    for microbatches in (1, 2):
        ensemble = ensemble_of(jax.jit(loss_fn), microbatches=microbatches)
        state, metrics = trained(ensemble)
        of_member = jax.tree.map(lambda leaf: leaf[1], state)
        assert_close(of_member.params, member_by_hand(1).params)
        assert metrics[0]["zero_weights"].tolist() == [0, 0]


def test_a_mean_inside_jit_or_remat_is_the_same_mean():
    for transform in (jax.jit, jax.checkpoint):
        mean = transform(lambda values, weights: batch_mean(values, weights))

        def loss(params, model_state, batch, key, mean=mean):
            return mean(nll_of_tokens(params, batch), batch["mask"]), (model_state, {})

        state, _ = trained(ensemble_of(loss))
        assert_close(jax.tree.map(lambda leaf: leaf[1], state.params), member_by_hand(1).params)


def ratio_by_hand(values, weights):
    return Ratio((values * weights).sum(), weights.sum())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("ratio", [functools.partial(batch_mean, ratio=True), ratio_by_hand])
def test_a_ratio_is_trained_as_the_mean_of_the_global_batch(ratio, microbatches):
    def loss(params, model_state, batch, key):
        nll = nll_of_tokens(params, batch)
        parts = jax.jit(ratio)(nll, batch["mask"])
        return parts, (model_state, {"double": parts._replace(total=2 * parts.total)})

    state, metrics = trained(ensemble_of(loss, microbatches=microbatches))
    expected = member_by_hand(1)
    assert_close(jax.tree.map(lambda leaf: leaf[1], state.params), expected.params)
    doubled = [of_step["double"][1] for of_step in metrics]
    np.testing.assert_allclose(doubled, 2 * np.array(expected.losses), rtol=1e-5)


# A mean of four values, worked by hand.

VALUES = jnp.array([[1.0, 2.0], [3.0, 10.0]])


def test_outside_a_lifted_function_it_is_the_plain_weighted_mean():
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
    assert data_mean({"a": 3.0}) == {"a": 3.0}


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2), (2, 2, 1), ()])
def test_weights_of_another_shape_are_refused(shape):
    message = f"weights have the shape {list(shape)}, and values [2, 2]. Give weights of shape"
    with pytest.raises(UserError, match=re.escape(message)):
        batch_mean(VALUES, weights=jnp.ones(shape))


def test_the_shapes_of_weights_are_named_once():
    # The shape of vectors is that of one weight for each example.
    with pytest.raises(UserError, match=r"Give weights of shape \[2\]\.$"):
        batch_mean(VALUES[0], weights=jnp.ones(3))


def test_the_sum_over_columns_of_its_gradient_over_their_number_is_the_global_gradient():
    # The transpose of psum is psum: each column's gradient of the global mean is that of its own
    # values times the number of columns, so that the mean over the columns is the gradient.
    layout = de.Layout.make(1, ensemble_axis=1, devices=jax.devices()[:4])
    values = np.arange(8, dtype=np.float32)
    weights = np.array([1, 2, 0, 0, 0, 3, 1, 1], np.float32)

    def gradient(scale, values, weights):
        def loss(scale):
            return batch_mean(jnp.square(scale * values), weights)

        value, grad = jax.value_and_grad(loss)(scale)
        return value, data_mean(grad)

    lifted = de.lift(gradient, layout=layout, in_specs=("members", "batch", "batch"))
    value, grad = lifted(np.ones(1, np.float32), values, weights)
    # Weights 1 2 0 0 0 3 1 1 of 0 1 4 9 16 25 36 49: (2 + 75 + 36 + 49) / 8 = 20.25; twice that.
    assert value.tolist() == [20.25]
    assert grad.tolist() == [40.5]


# Losses that are no mean over the global batch.


def local_mean(values, weights):
    return (values * weights).sum() / weights.sum()


LOCAL_MEANS = {
    "a quotient of sums": local_mean,
    "jnp.average": lambda v, m: jnp.average(v, weights=m),
    "jnp.mean with where": lambda v, m: jnp.mean(v, where=m > 0),
    "inside jit": lambda v, m: jax.jit(local_mean)(v, m),
    "a factor": lambda v, m: (v * m).sum() * (1 / m.sum()),
    "a power": lambda v, m: (v * m).sum() * m.sum() ** -1,
    "guarded": lambda v, m: (v * m).sum() / jnp.maximum(m.sum(), 1),
    "summed by a product": lambda v, m: v.ravel() @ m.ravel() / m.sum(),
    "normalised weights": lambda v, m: (v * (m / m.sum())).sum(),
    "inside remat": lambda v, m: jax.checkpoint(local_mean)(v, m),
}


def of_tokens(mean):
    def loss(params, model_state, batch, key):
        return mean(nll_of_tokens(params, batch), batch["mask"]), (model_state, {})

    return loss


@pytest.mark.parametrize("name", LOCAL_MEANS)
def test_a_weighted_mean_of_one_column_is_refused(name):
    loss = of_tokens(LOCAL_MEANS[name])
    message = "The loss divides by a sum over one column's part of the batch.*batch_mean"
    ensemble = ensemble_of(loss)
    with pytest.raises(UserError, match=message):
        ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    with pytest.raises(UserError, match=message):
        de.fit(ensemble_of(loss), lambda: iter(BATCHES), steps=1, progress=False)


def test_a_weighted_mean_of_one_column_is_refused_in_waves_too():
    ensemble = ensemble_of(of_tokens(local_mean), num_members=4, waves=2)
    message = "The loss divides by a sum over one column's part of the batch"
    with pytest.raises(UserError, match=message):
        ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    with pytest.raises(UserError, match=message):
        de.fit(ensemble, lambda: iter(BATCHES), steps=1, progress=False)


def test_a_weighted_mean_of_one_column_is_right_where_there_is_one():
    ensemble = ensemble_of(of_tokens(local_mean), mesh=(2, 1))
    state, _ = trained(ensemble)
    assert_close(jax.tree.map(lambda leaf: leaf[1], state.params), member_by_hand(1).params)


def layer_norm(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def batch_norm(x):
    mean = data_mean(x.mean(axis=(0, 1)))
    variance = data_mean((x**2).mean(axis=(0, 1))) - mean**2
    return (x - mean[None, None]) * jax.lax.rsqrt(variance + 1e-6)[None, None]


def with_outputs(transform):
    """Returns a plain mean of a network whose outputs are transformed."""

    def loss(params, model_state, batch, key):
        hidden = jnp.tanh(params["embedding"][batch["tokens"]])
        logits = transform(params, hidden @ params["head"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        return nll.mean(), (model_state, {})

    return loss


def smoothed_loss(params, model_state, batch, key):
    logits = jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch["next"], VOCABULARY), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean(), (model_state, {})


def mean_of_sequences(params, model_state, batch, key):
    """A mean over examples, each the mean over its own valid tokens."""
    nll, mask = nll_of_tokens(params, batch), batch["mask"]
    per_sequence = (nll * mask).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    return per_sequence.mean(), (model_state, {})


def with_accuracy(params, model_state, batch, key):
    """A plain mean beside an auxiliary scalar that is a mean of one column's valid tokens."""
    nll = nll_of_tokens(params, batch)
    return nll.mean(), (model_state, {"of_valid": local_mean(nll, batch["mask"])})


def with_penalty(params, model_state, batch, key):
    norm = optax.tree.norm(params)
    return nll_of_tokens(params, batch).mean() + 0.1 / norm, (model_state, {})


SOUND = {
    "a plain mean": with_outputs(lambda params, logits: logits),
    "LayerNorm": with_outputs(lambda params, logits: layer_norm(logits)),
    "BatchNorm": with_outputs(lambda params, logits: batch_norm(logits)),
    "temperature": with_outputs(
        lambda params, logits: logits / (1 + jnp.square(params["head"][0, 0]))
    ),
    "label smoothing": smoothed_loss,
    "a mean of each sequence": mean_of_sequences,
    "an auxiliary scalar": with_accuracy,
    "a penalty of the parameters": with_penalty,
    "batch_mean": loss_fn,
    "a sum over a number": lambda p, s, b, k: (
        nll_of_tokens(p, b).sum() / b["tokens"].size,
        (s, {}),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_mean_of_the_global_batch_is_not_refused(name):
    ensemble = ensemble_of(SOUND[name])
    _, metrics = ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    assert np.isfinite(metrics["loss"]).all()


def test_a_global_mean_beside_a_term_of_one_column_is_refused():
    def loss(params, model_state, batch, key):
        activity = jnp.square(params["embedding"][batch["tokens"]]).mean()
        mean = batch_mean(nll_of_tokens(params, batch), batch["mask"])
        return mean + activity, (model_state, {})

    ensemble = ensemble_of(loss)
    message = "The loss differs between the columns of mesh 2 x 2.*Average that part"
    with pytest.raises(UserError, match=message):
        ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])
    with pytest.raises(UserError, match=message):
        de.fit(ensemble, lambda: iter(BATCHES), steps=1, progress=False)


def per_position(params, model_state, batch, key):
    """A mean over the examples for each position of the sequence, with weights of its own."""
    means = jax.vmap(batch_mean, in_axes=1)(nll_of_tokens(params, batch), batch["mask"])
    return means.mean(), (model_state, {})


def test_a_mean_inside_vmap_is_that_of_the_global_batch():
    batch = BATCHES[3]
    ensemble = ensemble_of(per_position)
    _, metrics = ensemble.update(ensemble.init(batch), batch)
    params, _ = init(jax.random.fold_in(member_key(SEED, 1), INIT), None)
    nll = np.asarray(nll_of_tokens(params, batch))
    expected = ((nll * batch["mask"]).sum(axis=0) / batch["mask"].sum(axis=0)).mean()
    np.testing.assert_allclose(metrics["loss"][1], expected, rtol=1e-5)


@pytest.mark.parametrize("mean", [per_position, of_tokens(jax.jit(lambda v, m: batch_mean(v, m)))])
def test_a_mean_with_weights_inside_a_transformation_is_refused_with_microbatches(mean):
    ensemble = ensemble_of(mean, microbatches=2)
    message = "The loss calls batch_mean with weights inside a transformation such as vmap"
    with pytest.raises(UserError, match=message):
        ensemble.update(ensemble.init(BATCHES[0]), BATCHES[0])


def test_the_data_axis_is_the_one_that_losses_may_name():
    def loss(params, model_state, batch, key):
        nll, mask = nll_of_tokens(params, batch), batch["mask"]
        total = jax.lax.psum((nll * mask).sum(), DATA) / jax.lax.psum(mask.sum(), DATA)
        return total, (model_state, {})

    state, _ = trained(ensemble_of(loss))
    assert_close(jax.tree.map(lambda leaf: leaf[1], state.params), member_by_hand(1).params)


@pytest.mark.parametrize(("microbatches", "ratio"), [(1, False), (2, False), (2, True)])
def test_adversarial_training_takes_weights(microbatches, ratio):
    def loss(params, model_state, batch, key):
        hidden = jnp.tanh(batch["inputs"] @ params["w"])
        mean = batch_mean(jnp.square(hidden - 1), batch["weights"], ratio=ratio)
        return mean, (model_state, {})

    def init(key, batch):
        return {"w": jnp.array([0.5, -1.0, 2.0])}, ()

    random = np.random.default_rng(1)
    batch = {
        "inputs": random.normal(size=(8, 3)).astype(np.float32),
        "weights": np.array([1, 0, 0, 0, 2, 3, 1, 1], np.float32),
    }
    ensemble = de.Ensemble(
        de.as_member(init=init),
        optax.sgd(1.0),
        loss,
        num_members=2,
        methods=[de.methods.adversarial(0.1)],
        layout=de.Layout.make(2, ensemble_axis=2, devices=jax.devices()[:4]),
        microbatches=microbatches,
    )
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
    assert metrics["zero_weights"].tolist() == [0, 0]


def test_a_jitted_mean_counts_examples_as_bootstrap_drew_them():
    def mean(values, weights):
        return batch_mean(values, weights)

    def trained_with(mean):
        ensemble = ensemble_of(of_tokens(mean), methods=[de.methods.bootstrap()], execution="vmap")
        data = {name: np.concatenate([b[name] for b in BATCHES]) for name in BATCHES[0]}
        return de.fit(ensemble, data, steps=3, batch_size=BATCH, progress=False).state

    expected = trained_with(mean)
    for other in (jax.jit(mean), functools.partial(batch_mean, ratio=True), ratio_by_hand):
        found = trained_with(other)
        assert_close(jax.device_get(found.params), jax.device_get(expected.params))
