"""Methods: what each does to a member's examples and loss, against the same by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens.data import Spec, source_of_arrays
from dist_ens.ensemble import Batches
from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.randomness import EXAMPLES, member_key
from dist_ens.layout import BATCHES, Layout
from dist_ens.losses import (
    beta_nll,
    categorical,
    gaussian_nll,
    one_vs_rest,
    softmax_cross_entropy,
    squared_error,
)
from dist_ens.members import Member, from_functions
from dist_ens.methods import (
    LossInfo,
    adversarial,
    bootstrap,
    label_smoothing,
    loss_of_objective,
    mixup,
    poisson_weight,
)
from dist_ens.sampling import Order, kfold
from marked import long

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(8, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 8).astype(np.int32)


@pytest.mark.parametrize(("num_examples", "num_folds"), [(20, 5), (23, 4), (7, 7)])
def test_each_example_is_left_out_by_the_members_of_one_fold(num_examples, num_folds):
    order = Order(num_examples, 1, per_member=True, num_folds=num_folds)
    folds = kfold.fold_of_example(5, num_examples, num_folds)
    sizes = np.bincount(folds, minlength=num_folds)
    assert sizes.max() - sizes.min() <= 1
    for member_id in range(2 * num_folds):
        kept = set(np.flatnonzero(folds != member_id % num_folds).tolist())
        seen = set()
        for epoch in range(4):
            steps = range(epoch * order.epoch_length, (epoch + 1) * order.epoch_length)
            drawn = order.indices(order.cursor(5, steps), [0], np.int32([member_id]))[:, 0].tolist()
            assert len(set(drawn)) == len(drawn) == num_examples - sizes.max()
            assert set(drawn) <= kept
            seen |= set(drawn)
        assert seen == kept  # where an epoch passes one over, another one every time


def test_folds_are_the_same_on_the_host_and_on_the_device():
    order = Order(23, 6, per_member=True, num_folds=4, num_groups=2)
    cursor = order.cursor(3, range(9))
    on_device = jax.jit(lambda at, i: order.indices(at, np.arange(6), i))
    for member_id in (0, 5):
        on_host = order.indices(cursor, np.arange(6), np.int32([member_id]))
        assert (on_host // 23 == member_id % 2).all()  # of its own group alone
        np.testing.assert_array_equal(on_device(cursor, np.int32(member_id)), on_host)


@pytest.mark.slow
def test_a_bootstrap_sample_has_each_example_as_often_as_chance_would():
    weights = np.asarray(poisson_weight(jax.random.key(0), jnp.arange(20_000)))
    # Of mean and variance 1, with standard errors 0.007 and 0.012; 1/e are left out.
    assert weights.mean() == pytest.approx(1, abs=0.03)
    assert weights.var() == pytest.approx(1, abs=0.05)
    assert (weights == 0).mean() == pytest.approx(np.exp(-1), abs=0.015)
    again = poisson_weight(jax.random.key(0), jnp.array([[7, 3]]))
    np.testing.assert_array_equal(again, weights[None, [7, 3]])  # whatever comes beside it
    other = np.asarray(poisson_weight(jax.random.key(1), jnp.arange(20_000)))
    assert abs(np.corrcoef(weights, other)[0, 1]) < 0.03


def outputs_of(params, inputs):
    return jnp.tanh(inputs @ params)


def nll_at(params, inputs):
    """The loss of each example."""
    return softmax_cross_entropy(outputs_of(params, inputs), jnp.asarray(LABELS))


def smoothed(log_probs):
    """(1 - 0.2) nll + 0.2 mean_c -log p(c) of each example."""
    return -0.8 * log_probs[np.arange(8), LABELS] - 0.2 * log_probs.mean(axis=1)


def _outputs(params, model_state, inputs, key, train):
    outputs = outputs_of(params, inputs)
    return outputs, outputs  # also as its state, to be looked at


NETWORK = Member(lambda key, inputs: (jnp.zeros((3, 4)), ()), _outputs)
BATCH = {"inputs": jnp.asarray(INPUTS), "labels": jnp.asarray(LABELS)}
PARAMS = np.float32(RANDOM.normal(size=(3, 4)))


def info_of(objective, member_id=0):
    key = jax.random.key(1)
    return LossInfo(key, key, jnp.int32(member_id), None, objective)


def losses(method, objective, member_id=0):
    """The loss of each example, and the outputs of its forward pass."""
    loss = method(loss_of_objective(objective, NETWORK))

    def loss_of(batch):
        value, (outputs, _) = loss(jnp.asarray(PARAMS), (), batch, info_of(objective, member_id))
        return value, outputs

    alone = [loss_of(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], BATCH)) for i in range(8)]
    of_examples, outputs = (np.stack(values) for values in zip(*alone, strict=True))
    of_batch, outputs_of_batch = loss_of(BATCH)
    np.testing.assert_allclose(of_batch, of_examples.mean(), rtol=1e-5)
    np.testing.assert_allclose(outputs_of_batch, outputs[:, 0], rtol=1e-5, atol=1e-6)
    return of_examples, outputs_of_batch


@pytest.mark.slow
def test_smoothed_labels_give_a_part_to_every_class():
    outputs = outputs_of(PARAMS, INPUTS)
    log_probs = jax.nn.log_softmax(outputs)
    got, _ = losses(label_smoothing(0.2), categorical(4))
    np.testing.assert_allclose(got, smoothed(log_probs), rtol=1e-5)
    # The accuracy is that of the labels.
    loss = label_smoothing(0.2)(loss_of_objective(categorical(4), NETWORK))
    _, (_, scores) = loss(jnp.asarray(PARAMS), (), BATCH, info_of(categorical(4)))
    right = log_probs.argmax(axis=1) == LABELS
    assert float(scores["accuracy"]) == pytest.approx(float(right.mean()))
    one_hot = 0.8 * jax.nn.one_hot(LABELS, 4) + 0.05
    sigmoid, _ = losses(label_smoothing(0.2), one_vs_rest(4))
    by_hand = optax.sigmoid_binary_cross_entropy(outputs, one_hot).sum(axis=1)
    np.testing.assert_allclose(sigmoid, by_hand, rtol=1e-5)


@pytest.mark.slow
def test_mixed_examples_lie_between_two_and_so_do_their_labels():
    seen = {}

    def spy(params, model_state, batch, info):
        seen.update(batch)

    mixup(0.4)(spy)(None, (), BATCH, info_of(categorical(4)))
    # One weight for all: read from the first input, it holds for every other and for the labels.
    weight = (seen["inputs"][0, 0] - INPUTS[7, 0]) / (INPUTS[0, 0] - INPUTS[7, 0])
    assert 0 < weight < 1
    for name, leaf in (("inputs", INPUTS), ("labels", np.eye(4)[LABELS])):
        expected = weight * leaf + (1 - weight) * leaf[::-1]
        np.testing.assert_allclose(seen[name], expected, atol=1e-5)
    targets = {**BATCH, "labels": jnp.asarray(INPUTS[:, 0])}
    mixup(0.4)(spy)(None, (), targets, info_of(squared_error()))
    np.testing.assert_allclose(seen["labels"], seen["inputs"][:, 0], atol=1e-6)


@pytest.mark.slow
def test_an_adversarial_example_is_a_step_of_its_groups_range_up_the_loss():
    ranges = np.float32([[1, 2, 0], [10, 20, 30]])  # of two groups
    gradient = jax.grad(lambda inputs: nll_at(PARAMS, inputs).sum())(INPUTS)
    for member_id, own in ((2, ranges[0]), (3, ranges[1])):
        worse = INPUTS + 0.01 * own * np.sign(gradient)
        got, outputs = losses(adversarial(0.01, ranges), categorical(4), member_id=member_id)
        expected = (nll_at(PARAMS, INPUTS) + nll_at(PARAMS, worse)) / 2
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        np.testing.assert_allclose(outputs, outputs_of(PARAMS, INPUTS), rtol=1e-5, atol=1e-6)


def updated(methods, data_axis=1):
    """The weights of two members before and after a step, on examples 40 to 47 of a split."""
    member = from_functions(lambda key: jax.random.normal(key, (3, 4)), outputs_of)
    layout = Layout.make(2, ensemble_axis=1, devices=jax.devices()[:data_axis])
    ensemble = networks.ensemble_of(member, optax.sgd(1.0), layout, categorical(4), methods=methods)
    state = networks.begin(ensemble, jax.ShapeDtypeStruct((1, 3), np.float32))
    before = np.asarray(state.params)
    places = np.arange(40, 48, dtype=np.int32)
    batches = Batches({"inputs": INPUTS[None], "labels": LABELS[None]}, places[None])
    state, _ = ensemble.update_steps(state, layout.put(batches, BATCHES))
    return before, np.asarray(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("data_axis", [2, *long(1)])
def test_a_member_learns_from_an_example_by_its_weight(data_axis):
    before, after = updated((bootstrap(),), data_axis=data_axis)
    for member_id in (0, 1):
        key = jax.random.fold_in(member_key(0, member_id), EXAMPLES)
        weights = poisson_weight(key, jnp.arange(8) + 40)
        gradient = jax.grad(lambda w, by: (by * nll_at(w, INPUTS)).mean())(
            before[member_id], weights
        )
        expected = before[member_id] - gradient
        np.testing.assert_allclose(after[member_id], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_methods_combine_the_first_innermost():
    methods = (label_smoothing(0.2), adversarial(0.1, np.ones((1, 3), np.float32)))

    def loss_at(w, inputs):
        return smoothed(jax.nn.log_softmax(outputs_of(w, inputs))).mean()

    for w, got in zip(*updated(methods), strict=True):
        worse = INPUTS + 0.1 * jnp.sign(jax.grad(loss_at, argnums=1)(w, INPUTS))
        both = [jax.grad(loss_at)(w, inputs) for inputs in (INPUTS, worse)]
        np.testing.assert_allclose(got, w - sum(both) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_beta_nll_weighs_by_the_variance_and_learns_nothing_through_the_weight():
    outputs, targets = jnp.array([0.3, 0.7]), jnp.array(1.2)
    variance = jax.nn.softplus(0.7) + 1e-6
    plain = jax.grad(lambda o: gaussian_nll(o, targets))(outputs)
    weighted = jax.grad(lambda o: beta_nll(o, targets, beta=0.5))(outputs)
    np.testing.assert_allclose(weighted, variance**0.5 * plain, rtol=1e-5)
    # With 1, the mean learns as from squared errors: (mean - target).
    mean_gradient = jax.grad(lambda o: beta_nll(o, targets, beta=1.0))(outputs)[0]
    assert float(mean_gradient) == pytest.approx(0.3 - 1.2, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 1], bool, 1),
        ([3, 200], np.uint8, 197),
        ([-2, 1], np.int8, 3),
        ([2**32 - 9, 2**32 - 2], np.uint32, 7),  # one number to float32, whose steps are 256 there
        ([-65504, 65504], np.float16, 131008),  # more than float16 holds
    ],
)
def test_ranges_of_every_type_are_those_of_its_numbers(values, dtype, expected):
    inputs, labels = np.array([values], dtype).T, np.arange(2)
    source = source_of_arrays((inputs, labels), (inputs, labels))
    assert source.input_ranges().tolist() == [[expected]]


def test_a_part_that_is_held_out_leaves_the_ranges_and_places_of_the_others():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(30, 2)).astype(np.float32)
    source = source_of_arrays((inputs, np.arange(30) % 3), (inputs[:3], np.arange(3)))
    np.testing.assert_array_equal(source.train_positions, np.arange(30))
    part = source.with_validation(0.2)
    assert (len(part.train), len(part.valid), part.num_train_examples) == (24, 6, 24)
    train, valid = (s.take(np.arange(len(s)))["inputs"] for s in (part.train, part.valid))
    both = np.concatenate([train, valid])
    np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(inputs, axis=0))
    np.testing.assert_array_equal(inputs[part.train_positions], train)
    np.testing.assert_allclose(part.input_ranges()[0], np.ptp(train, axis=0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["categorical", "one_vs_rest"])
def test_every_loss_trains_with_all_methods(name):
    loss = {"name": name, "adversarial": 0.01, "mixup": 0.5, "label_smoothing": 0.1}
    values = {"steps": 1, "num_members": 2, "loss": loss, "data": {"global_batch_size": 4}}
    run = Run(Experiment.from_dict(values), Spec((4,), "float32", (), 3), 20)
    ensemble = build_ensemble(run, Layout.make(2, ensemble_axis=1))
    state = ensemble.abstract_state(run.batch(4))
    inputs, labels = jnp.ones((1, 8, 4)), jnp.ones((1, 8), int)
    batches = {"inputs": inputs, "labels": labels}
    _, metrics = jax.eval_shape(ensemble.update_steps, state, batches)
    assert metrics["loss"].shape == (1, 2)
